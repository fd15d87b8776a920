//! The run object and what belongs to it, with the fields of the API's contract in its order. The views borrow from the
//! run and are serialized straight to bytes.

use std::collections::BTreeMap;

use jiff::Timestamp;
use schemars::JsonSchema;
use serde::{Serialize, Serializer};
use serde_json::value::RawValue;

use crate::domain::content::Content;
use crate::domain::failure::Failure;
use crate::domain::run::{ForkedFrom, PendingInput, Reused, Run, RunId, Status};
use crate::domain::score::RunScores;
use crate::domain::suspension::SuspensionCause;
use crate::domain::timestamp_text;
use crate::domain::usage::{TreeUsage, Usage};
use crate::domain::variant::Variant;
use crate::domain::waiting_for::{Wait, WaitingFor};
use crate::domain::warning::RunWarning;
use crate::web::response::input::InputView;

/// A run: one execution of an agent.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Run")]
pub struct RunView<'a> {
    /// The run's id.
    id: RunId,
    /// The name of the agent.
    agent: &'a str,
    /// The version of the agent's definition: `sha256:` and the digest of its file.
    agent_version: &'a str,
    /// The version that the run got: `current`, or `candidate` of the agent's rollout; null unless it is a root run of an agent with one.
    variant: Option<Variant>,
    /// The run's status.
    status: Status,
    /// The run that called this one; null for a root run.
    parent_id: Option<RunId>,
    /// The root of the run's tree; the run itself if it is a root run.
    root_id: RunId,
    /// Levels below the root; 0 for a root run.
    depth: u8,
    /// The tool call of the parent that started the run; null for a root run.
    tool_call_id: Option<&'a str>,
    /// The user message.
    input: &'a Content,
    /// The final text; null until the run is completed.
    content: Option<&'a str>,
    /// The last text of the model, if the run failed or was cancelled.
    partial_content: Option<&'a str>,
    /// `content` as JSON, if a JSON `response_format` was requested; otherwise null.
    structured: Option<&'a RawValue>,
    /// The model that the provider named in its last reply; before the first reply, the requested model.
    model: &'a str,
    /// Why the last reply ended, in the provider's own word.
    stop_reason: Option<&'a str>,
    /// The number of turns: requests to the model with their replies.
    turns: u32,
    /// Input tokens of all turns of this run, cached ones included.
    input_tokens: u64,
    /// Output tokens of all turns of this run.
    output_tokens: u64,
    /// Executed tool calls of this run, failed ones included.
    tool_calls: u64,
    /// Milliseconds from the start to the end, or until now.
    duration_ms: u64,
    /// Usage of the run and all its descendants, also while it runs.
    tree: TreeUsageView,
    /// The session that it continues; only root runs have one.
    session: Option<&'a str>,
    /// Where another run was forked to start this one; null for other runs.
    forked_from: Option<ForkedFrom>,
    /// What the run waits for; null unless its status is `waiting`.
    waiting_for: Option<WaitingFor>,
    /// The details of that; null unless the status is `waiting`.
    wait: Option<Wait>,
    /// Why the run is suspended with its tree; null if it is not, or if another node drives it.
    suspended: Option<SuspensionCause>,
    /// The tool calls of the run and its descendants that wait for approval, at most 100.
    pending_approvals: Vec<&'a PendingInput>,
    /// The questions of the run and its descendants that wait for a person's answer, at most 100.
    pending_inputs: Vec<InputView<'a>>,
    /// What went wrong without failing the run.
    warnings: &'a [RunWarning],
    /// Why the run failed; null unless its status is `failed`.
    error: Option<&'a Failure>,
    /// Why the run was cancelled; null if it was not, or without a reason.
    cancel_reason: Option<&'a str>,
    /// The label that the parent gave to an ad-hoc sub-agent.
    label: Option<&'a str>,
    /// `complete` or `incomplete`, for an ad-hoc sub-agent that has ended.
    completion_status: Option<&'a str>,
    /// The labels of the request that started the run.
    labels: &'a BTreeMap<String, String>,
    /// The scores of the run, by name.
    scores: &'a RunScores,
    /// How often the run was started; above 1 after a restart of the daemon.
    attempt: u32,
    /// When the run was accepted.
    #[serde(serialize_with = "timestamp_text::serialize")]
    #[schemars(with = "Timestamp")]
    created_at: Timestamp,
    /// When the run started; null while it is queued.
    #[serde(serialize_with = "timestamp_text::serialize_option")]
    #[schemars(with = "Option<Timestamp>")]
    started_at: Option<Timestamp>,
    /// When the run ended; null until then.
    #[serde(serialize_with = "timestamp_text::serialize_option")]
    #[schemars(with = "Option<Timestamp>")]
    finished_at: Option<Timestamp>,
    /// The number of the run's last event; for a root run, of its tree's last event.
    last_event: u64,
    /// Paths of routes about the run.
    links: Links<'a>,
    /// Present if texts were cut because the request did not say `full=true`: `GET /runs/{id}` has all of them.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    truncated: bool,
}

impl<'a> RunView<'a> {
    /// `prefix` is the server's path prefix.
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
            variant: run.variant,
            status: run.status,
            session: run.session.as_deref(),
            forked_from: run.fork.as_ref().and_then(|fork| fork.from),
            waiting_for: run.waiting_for.filter(|_| run.status == Status::Waiting),
            wait: run.wait(),
            suspended: run.suspended,
            pending_approvals: run.pending_approvals().collect(),
            pending_inputs: run.pending_questions().map(InputView::from).collect(),
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
                .and_then(|it| serde_json::from_str(it).ok()),
            model: &run.model,
            stop_reason: run.stop_reason.as_deref(),
            turns: run.turns,
            input_tokens: run.usage.tokens.input,
            output_tokens: run.usage.tokens.output,
            tool_calls: run.usage.tool_calls,
            duration_ms: run.duration_ms(now),
            tree: TreeUsageView {
                reused: run.fork.as_ref().map(|fork| fork.reused),
                ..TreeUsageView::from(&run.tree)
            },
            warnings: &run.warnings,
            error: run.error.as_ref(),
            cancel_reason: run.cancel_reason.as_deref(),
            label: run.label.as_deref(),
            completion_status: run.completion_status.as_deref(),
            labels: &run.labels,
            scores: &run.scores,
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
            truncated: run.is_cut,
        }
    }
}

/// Usage of a run and all its descendants.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "TreeUsage")]
struct TreeUsageView {
    /// The number of runs, this one included.
    runs: u64,
    #[serde(flatten)]
    usage: UsageView,
    /// What the tree took over instead of doing it; absent if it is not a fork's.
    #[serde(skip_serializing_if = "Option::is_none")]
    reused: Option<Reused>,
}

impl From<&TreeUsage> for TreeUsageView {
    fn from(tree: &TreeUsage) -> Self {
        Self {
            runs: tree.runs,
            usage: UsageView::from(&tree.usage),
            reused: None,
        }
    }
}

/// A run's own usage.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Usage")]
pub struct UsageView {
    /// Input tokens, cached ones included.
    input_tokens: u64,
    /// Output tokens.
    output_tokens: u64,
    /// The input tokens that were read from the provider's cache.
    cache_read_tokens: u64,
    /// The input tokens that were written to the provider's cache.
    cache_write_tokens: u64,
    /// Replies of models.
    model_calls: u64,
    /// Executed tool calls, failed ones included.
    tool_calls: u64,
    /// US dollars; null if no price is known for any model that was used.
    cost_usd: Option<f64>,
    /// False if a provider did not report its usage.
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

/// Paths of routes about a run.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "RunLinks")]
struct Links<'a> {
    /// The run.
    #[serde(rename = "self")]
    this: Link<'a>,
    /// The run's events.
    events: Link<'a>,
    /// Cancels the run.
    cancel: Link<'a>,
    /// The run's tree.
    tree: Link<'a>,
}

#[derive(JsonSchema)]
#[schemars(into = "String", inline)]
struct Link<'a> {
    prefix: &'a str,
    id: RunId,
    suffix: &'static str,
}

impl Serialize for Link<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut path = String::with_capacity(self.prefix.len() + 64);
        path.push_str(self.prefix);
        path.push_str("/runs/");
        path.push_str(self.id.encode(&mut [0; 40]));
        path.push_str(self.suffix);
        serializer.serialize_str(&path)
    }
}

/// A direct child: the run object with the task and the run's own usage.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ChildRun")]
pub struct ChildView<'a> {
    #[serde(flatten)]
    run: RunView<'a>,
    /// The task that the parent gave.
    task: Option<&'a str>,
    /// The usage of the child alone.
    usage: UsageView,
}

impl<'a> ChildView<'a> {
    pub fn new(run: &'a Run, prefix: &'a str, now: Timestamp) -> Self {
        Self {
            run: RunView::new(run, prefix, now),
            task: run.task.as_deref(),
            usage: UsageView::from(&run.usage),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use jiff::Timestamp;

    use super::{ChildView, RunView};
    use crate::domain::run::{Depth, Run, RunId, Scope, Status};

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
    fn the_run_object_has_the_fields_of_the_contract_in_order() {
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
}
