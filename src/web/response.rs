//! What clients read of a run, field for field as the contract has it. Borrowed views, written straight to bytes.

use std::collections::{BTreeMap, HashMap};

use jiff::Timestamp;
use schemars::JsonSchema;
use serde::{Serialize, Serializer};
use serde_json::value::RawValue;

use crate::domain::content::Content;
use crate::domain::message::{Message, ToolCall, ToolResult};
use crate::domain::run::{Failure, Run, RunId, Status, WaitingFor};
use crate::domain::structured;
use crate::domain::usage::{TreeUsage, Usage};
use crate::engine::replay::history::{self, RecordedConversation};
use crate::store::{PAGE_BYTES, Step, TASK_CHARS};

/// A run.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Run")]
pub struct RunView<'a> {
    id: RunId,
    agent: &'a str,
    agent_version: &'a str,
    status: Status,
    parent_id: Option<RunId>,
    root_id: RunId,
    /// Levels below the root.
    depth: u8,
    /// The parent's tool call that started it.
    tool_call_id: Option<&'a str>,
    /// As given; a child's whole message.
    input: &'a Content,
    /// The final text, once completed.
    content: Option<&'a str>,
    /// The last text of a run that did not complete.
    partial_content: Option<&'a str>,
    /// The JSON of `content`, where that was asked for.
    structured: Option<&'a RawValue>,
    /// Who gave the last reply.
    model: &'a str,
    /// The provider's own word for why that ended.
    stop_reason: Option<&'a str>,
    turns: u32,
    input_tokens: u64,
    output_tokens: u64,
    tool_calls: u64,
    duration_ms: u64,
    /// The run with all its descendants, also while it runs.
    tree: TreeUsageView,
    /// Of one that is `waiting`: for what.
    waiting_for: Option<WaitingFor>,
    /// Null unless failed.
    error: Option<&'a Failure>,
    cancel_reason: Option<&'a str>,
    label: Option<&'a str>,
    completion_status: Option<&'a str>,
    labels: &'a BTreeMap<String, String>,
    /// How often it was started; above 1 after a restart.
    attempt: u32,
    created_at: Timestamp,
    started_at: Option<Timestamp>,
    finished_at: Option<Timestamp>,
    /// The number of its last event; a root's: of its tree's.
    last_event: u64,
    links: Links<'a>,
}

impl<'a> RunView<'a> {
    /// The view at the time `now`; `prefix` is the server's path prefix.
    pub fn new(run: &'a Run, prefix: &'a str, now: Timestamp) -> Self {
        let link = |suffix| Link {
            prefix,
            id: run.id,
            suffix,
        };
        Self {
            id: run.id,
            agent: &run.agent,
            agent_version: &run.agent_version,
            status: run.status,
            waiting_for: run.waiting_for.filter(|_| run.status == Status::Waiting),
            parent_id: run.parent_id,
            root_id: run.root_id,
            depth: run.depth.0,
            tool_call_id: run.tool_call_id.as_deref(),
            input: &run.input,
            content: run.content.as_deref(),
            partial_content: run.partial_content.as_deref(),
            structured: run
                .content
                .as_deref()
                .filter(|_| run.structured)
                .and_then(structured::extract_json),
            model: &run.model,
            stop_reason: run.stop_reason.as_deref(),
            turns: run.turns,
            input_tokens: run.usage.tokens.input,
            output_tokens: run.usage.tokens.output,
            tool_calls: run.usage.tool_calls,
            duration_ms: run.duration_ms(now),
            tree: TreeUsageView::from(&run.tree),
            error: run.error.as_ref(),
            cancel_reason: run.cancel_reason.as_deref(),
            label: run.label.as_deref(),
            completion_status: run.completion_status.as_deref(),
            labels: &run.labels,
            attempt: run.attempt,
            created_at: run.created_at,
            started_at: run.started_at,
            finished_at: run.finished_at,
            last_event: run.last_event,
            links: Links {
                this: link(""),
                events: link("/events"),
                cancel: link("/cancel"),
                tree: link("/tree"),
            },
        }
    }
}

/// Usage of a run with all its descendants.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "TreeUsage")]
struct TreeUsageView {
    runs: u64,
    #[serde(flatten)]
    usage: UsageView,
}

impl From<&TreeUsage> for TreeUsageView {
    fn from(tree: &TreeUsage) -> Self {
        Self {
            runs: tree.runs,
            usage: UsageView::from(&tree.usage),
        }
    }
}

/// A run's own usage.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Usage")]
pub struct UsageView {
    input_tokens: u64,
    output_tokens: u64,
    cache_read_tokens: u64,
    cache_write_tokens: u64,
    model_calls: u64,
    tool_calls: u64,
    /// Null where no price is known for any model that answered.
    cost_usd: Option<f64>,
    /// False where some provider's usage is not known.
    complete: bool,
}

impl From<&Usage> for UsageView {
    fn from(usage: &Usage) -> Self {
        Self {
            input_tokens: usage.tokens.input,
            output_tokens: usage.tokens.output,
            cache_read_tokens: usage.tokens.cache_read,
            cache_write_tokens: usage.tokens.cache_write,
            model_calls: usage.model_calls,
            tool_calls: usage.tool_calls,
            cost_usd: usage.cost.map(|cost| cost.to_usd()),
            complete: usage.is_complete(),
        }
    }
}

#[derive(Serialize, JsonSchema)]
struct Links<'a> {
    #[serde(rename = "self")]
    this: Link<'a>,
    events: Link<'a>,
    cancel: Link<'a>,
    tree: Link<'a>,
}

#[derive(JsonSchema)]
#[schemars(into = "String")]
struct Link<'a> {
    prefix: &'a str,
    id: RunId,
    suffix: &'static str,
}

impl Serialize for Link<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!(
            "{}/runs/{}{}",
            self.prefix, self.id, self.suffix
        ))
    }
}

/// A direct child: the run object, and what a tree's summary adds to it.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Child")]
pub struct ChildView<'a> {
    #[serde(flatten)]
    run: RunView<'a>,
    task: Option<&'a str>,
    usage: UsageView,
}

impl<'a> ChildView<'a> {
    /// The view at the time `now`.
    pub fn new(run: &'a Run, prefix: &'a str, now: Timestamp) -> Self {
        Self {
            run: RunView::new(run, prefix, now),
            task: run.task.as_deref(),
            usage: UsageView::from(&run.usage),
        }
    }
}

/// A run's summary with its children's in it.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Tree")]
pub struct RunSummary<'a> {
    id: RunId,
    agent: &'a str,
    status: Status,
    depth: u8,
    label: Option<&'a str>,
    tool_call_id: Option<&'a str>,
    task: Option<&'a str>,
    /// There when the task is longer: `task` is its beginning.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    truncated: bool,
    model: &'a str,
    turns: u32,
    usage: UsageView,
    duration_ms: u64,
    error: Option<&'a Failure>,
    children: Vec<RunSummary<'a>>,
}

/// For each parent the ids of its tool calls in the order of the calls.
pub type CallOrder = HashMap<RunId, Vec<String>>;

impl<'a> RunSummary<'a> {
    /// The tree below `top`, from the runs of that tree in any order. None where `top` is not among them.
    pub fn build_tree(
        root: RunId,
        runs: &'a [Run],
        order: &CallOrder,
        now: Timestamp,
    ) -> Option<Self> {
        let mut children_of: HashMap<RunId, Vec<&Run>> = HashMap::new();
        for run in runs {
            if let Some(parent) = run.parent_id {
                children_of.entry(parent).or_default().push(run);
            }
        }
        for (parent, children) in &mut children_of {
            sort_by_call_order(children, order.get(parent), |run| {
                (run.id, run.tool_call_id.as_deref())
            });
        }
        let run = runs.iter().find(|run| run.id == root)?;
        Some(Self::build_subtree(run, &children_of, now))
    }

    /// The depth of a tree is bounded, so this recursion is.
    fn build_subtree(
        run: &'a Run,
        children_of: &HashMap<RunId, Vec<&'a Run>>,
        now: Timestamp,
    ) -> Self {
        let children = children_of.get(&run.id).map_or(&[][..], Vec::as_slice);
        let task = run.task.as_deref();
        let excerpt = task.and_then(|task| Some((task, task.char_indices().nth(TASK_CHARS)?.0)));
        Self {
            id: run.id,
            agent: &run.agent,
            status: run.status,
            depth: run.depth.0,
            label: run.label.as_deref(),
            tool_call_id: run.tool_call_id.as_deref(),
            task: excerpt.map(|(task, end)| &task[..end]).or(task),
            truncated: excerpt.is_some(),
            model: &run.model,
            turns: run.turns,
            usage: UsageView::from(&run.usage),
            duration_ms: run.duration_ms(now),
            error: run.error.as_ref(),
            children: children
                .iter()
                .map(|child| Self::build_subtree(child, children_of, now))
                .collect(),
        }
    }
}

/// Sorts children by the place of their calls; without a known place they keep the order of their making, at the end.
pub fn sort_by_call_order<C>(
    children: &mut [C],
    calls: Option<&Vec<String>>,
    call_of: impl Fn(&C) -> (RunId, Option<&str>),
) {
    let positions: HashMap<&str, usize> = calls
        .into_iter()
        .flatten()
        .enumerate()
        .map(|(position, id)| (id.as_str(), position))
        .collect();
    children.sort_by_key(|child| {
        let (id, call) = call_of(child);
        let position = call.and_then(|call| positions.get(call));
        (position.copied().unwrap_or(usize::MAX), id)
    });
}

/// The ids of all tool calls in a run's steps, in the order of the calls.
pub fn call_ids(steps: &[Step]) -> Vec<String> {
    steps
        .iter()
        .filter_map(|step| match step {
            Step::Reply { message, .. } => Some(&message.tool_calls),
            Step::Prompt { .. }
            | Step::Said { .. }
            | Step::Result { .. }
            | Step::Remembers { .. }
            | Step::Compacting
            | Step::Compacted { .. } => None,
        })
        .flatten()
        .map(|call| call.id.clone())
        .collect()
}

/// A run's conversation as recorded.
#[derive(Serialize, JsonSchema)]
pub struct Conversation<'a> {
    system: Option<&'a str>,
    data: Vec<MessageView<'a>>,
    /// The `after` of the next page; null where there is none.
    next_after: Option<usize>,
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Message")]
#[serde(tag = "role", rename_all = "lowercase")]
enum MessageView<'a> {
    User {
        content: &'a Content,
    },
    Assistant {
        content: &'a str,
        tool_calls: Vec<ToolCallView<'a>>,
    },
    Tool {
        tool_results: &'a [ToolResult],
    },
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ToolCall")]
struct ToolCallView<'a> {
    id: &'a str,
    name: &'a str,
    arguments: &'a RawValue,
}

impl<'a> From<&'a ToolCall> for ToolCallView<'a> {
    fn from(call: &'a ToolCall) -> Self {
        Self {
            id: &call.id,
            name: &call.name,
            arguments: &call.arguments,
        }
    }
}

impl<'a> Conversation<'a> {
    /// A page of what was recorded, behind so many messages. It ends with the message that takes it to [`PAGE_BYTES`].
    pub fn page(recorded: &'a RecordedConversation, after: usize) -> Self {
        let mut bytes = 0;
        let mut data = Vec::new();
        for message in recorded.messages.iter().skip(after) {
            data.push(match message {
                Message::User { content } => MessageView::User { content },
                Message::Assistant(reply) => MessageView::Assistant {
                    content: &reply.content,
                    tool_calls: reply.tool_calls.iter().map(ToolCallView::from).collect(),
                },
                Message::Tool { tool_results } => MessageView::Tool { tool_results },
            });
            bytes += history::message_bytes(message);
            if bytes >= PAGE_BYTES {
                break;
            }
        }
        let end = after.saturating_add(data.len());
        Self {
            system: recorded.system.as_deref(),
            data,
            next_after: (end < recorded.messages.len()).then_some(end),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use jiff::Timestamp;
    use serde_json::value::RawValue;

    use super::{ChildView, Conversation, RunSummary, RunView, call_ids};
    use crate::domain::message::{AssistantMessage, ToolCall, ToolResult};
    use crate::domain::run::{Depth, Run, RunId, Scope, Status};
    use crate::engine::replay::history::RecordedConversation;
    use crate::store::{PAGE_BYTES, Step};

    fn id(n: u8) -> RunId {
        format!("run_01980000-0000-7000-8000-0000000000{n:02x}")
            .parse()
            .expect("an id")
    }

    fn run(n: u8, parent: Option<u8>, call: Option<&str>) -> Run {
        let at = |second: i64| Timestamp::from_second(1_800_000_000 + second).expect("a time");
        Run {
            root_id: id(1),
            parent_id: parent.map(id),
            depth: Depth(u8::from(parent.is_some())),
            tool_call_id: call.map(str::to_owned),
            agent_version: "sha256:00".to_owned(),
            status: Status::Completed,
            input: "go".into(),
            task: call.map(|call| format!("task of {call}")),
            labels: BTreeMap::from([("team".to_owned(), "a".to_owned())]),
            content: Some("done".to_owned()),
            model: "m".to_owned(),
            stop_reason: Some("end_turn".to_owned()),
            turns: 2,
            created_at: at(0),
            started_at: Some(at(1)),
            finished_at: Some(at(3)),
            last_event: 17,
            ..Run::queued(&Scope::root(id(n), None), "planner".to_owned())
        }
    }

    #[test]
    fn the_run_object_has_the_contracts_fields_in_its_order() {
        let run = run(1, None, None);
        let view = RunView::new(&run, "/axed", run.created_at);
        insta::assert_snapshot!(serde_json::to_string_pretty(&view).expect("JSON"));
    }

    #[test]
    fn a_child_is_a_run_with_its_task_and_usage() {
        let run = run(2, Some(1), Some("c1"));
        let child = serde_json::to_value(ChildView::new(&run, "", run.created_at)).expect("JSON");
        assert_eq!(child["task"], "task of c1");
        assert_eq!(child["usage"]["model_calls"], 0);
        assert_eq!(child["links"]["tree"], format!("/runs/{}/tree", id(2)));
    }

    fn call(id: &str) -> ToolCall {
        ToolCall {
            id: id.to_owned(),
            provider_id: "p".to_owned(),
            name: "call_agent".to_owned(),
            arguments: Arc::from(
                RawValue::from_string(r#"{"b":1,"a":2}"#.to_owned()).expect("JSON"),
            ),
        }
    }

    fn steps() -> Vec<Step> {
        let result = |position, call: &str| Step::Result {
            turn: 1,
            position,
            result: ToolResult::text(call, format!("result of {call}"), false),
        };
        vec![
            Step::Prompt {
                system: "be brief".to_owned(),
                message: "go".into(),
                earlier: Vec::new(),
            },
            Step::Reply {
                turn: 1,
                message: AssistantMessage {
                    content: String::new(),
                    tool_calls: vec![call("c1"), call("c2")],
                    echo: None,
                },
            },
            result(1, "c2"),
            result(0, "c1"),
            Step::Reply {
                turn: 2,
                message: AssistantMessage {
                    content: "done".to_owned(),
                    ..AssistantMessage::default()
                },
            },
        ]
    }

    #[test]
    fn children_are_in_call_order() {
        let runs = [
            run(1, None, None),
            run(2, Some(1), Some("c2")),
            run(3, Some(1), Some("c1")),
            run(4, Some(3), Some("c9")),
        ];
        let order = [(id(1), call_ids(&steps()))].into();
        let tree =
            RunSummary::build_tree(id(1), &runs, &order, runs[0].created_at).expect("a tree");
        let tree = serde_json::to_value(tree).expect("JSON");
        assert_eq!(tree["children"][0]["task"], "task of c1");
        assert_eq!(tree["children"][0]["children"][0]["task"], "task of c9");
        assert_eq!(tree["children"][1]["task"], "task of c2");
        assert!(RunSummary::build_tree(id(9), &runs, &order, runs[0].created_at).is_none());
    }

    #[test]
    fn a_conversation_reads_in_the_order_of_its_calls() {
        let recorded = RecordedConversation::from_steps(steps());
        let conversation = serde_json::to_string(&Conversation::page(&recorded, 0)).expect("JSON");
        insta::assert_snapshot!(conversation, @r#"{"system":"be brief","data":[{"role":"user","content":"go"},{"role":"assistant","content":"","tool_calls":[{"id":"c1","name":"call_agent","arguments":{"b":1,"a":2}},{"id":"c2","name":"call_agent","arguments":{"b":1,"a":2}}]},{"role":"tool","tool_results":[{"call_id":"c1","content":"result of c1","is_error":false},{"call_id":"c2","content":"result of c2","is_error":false}]},{"role":"assistant","content":"done","tool_calls":[]}],"next_after":null}"#);
        let rest = serde_json::to_value(Conversation::page(&recorded, 3)).expect("JSON");
        assert_eq!(rest["data"][0]["content"], "done");
        assert_eq!(rest["data"].as_array().map(Vec::len), Some(1));
        let long = || Step::Said {
            content: "x".repeat(PAGE_BYTES),
        };
        let recorded = RecordedConversation::from_steps(vec![long(), long()]);
        let first = serde_json::to_value(Conversation::page(&recorded, 0)).expect("JSON");
        assert_eq!(first["next_after"], 1);
        let second = serde_json::to_value(Conversation::page(&recorded, 1)).expect("JSON");
        assert_eq!(second["next_after"], serde_json::Value::Null);
        assert!(
            serde_json::to_string(&Conversation::page(&RecordedConversation::default(), 0))
                .expect("JSON")
                .contains("null")
        );
    }
}
