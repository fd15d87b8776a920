//! A run's tree as one summary, and the order of a run's children.

use std::collections::HashMap;

use jiff::Timestamp;
use schemars::JsonSchema;
use serde::Serialize;

use crate::domain::failure::Failure;
use crate::domain::run::{ReusedRun, Run, RunId, Status};
use crate::record::entry::Entry;
use crate::store::runs::TASK_CHARS;
use crate::web::response::run::UsageView;

/// The summary of a run, with those of its children in it.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "RunTree")]
pub struct RunSummary<'a> {
    /// The run's id.
    id: RunId,
    /// The name of the agent.
    agent: &'a str,
    /// The run's status.
    status: Status,
    /// Levels below the root of the whole tree.
    depth: u8,
    /// The label that the parent gave to an ad-hoc sub-agent.
    label: Option<&'a str>,
    /// The tool call of the parent that started the run; null for a root run.
    tool_call_id: Option<&'a str>,
    /// The task that the parent gave; null for a root run.
    task: Option<&'a str>,
    /// True if `task` is only the beginning of the task.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    truncated: bool,
    /// The model of the last reply.
    model: &'a str,
    /// The number of turns.
    turns: u32,
    /// The usage of the run alone.
    usage: UsageView,
    /// Milliseconds from the start to the end, or until now.
    duration_ms: u64,
    /// Why the run failed; null unless its status is `failed`.
    error: Option<&'a Failure>,
    /// The runs of the forked tree whose results the run took over; absent if there are none.
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    reused: &'a [ReusedRun],
    /// The runs that this one called, in the order of the calls.
    children: Vec<RunSummary<'a>>,
}

/// For each parent run, the ids of its tool calls in the order of the calls.
pub type CallOrder = HashMap<RunId, Vec<String>>;

impl<'a> RunSummary<'a> {
    /// The tree below `root`, from its runs in any order; `None` if `root` is not one of them.
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

    /// The depth of a tree is limited, and so is this recursion.
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
            reused: run.fork.as_ref().map_or(&[][..], |fork| &fork.reused_runs),
            children: children
                .iter()
                .map(|child| Self::build_subtree(child, children_of, now))
                .collect(),
        }
    }
}

/// Sorts children by the position of their calls. Children without a known position come last, oldest first.
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
pub fn call_ids(steps: &[Entry]) -> Vec<String> {
    steps
        .iter()
        .filter_map(|step| match step {
            Entry::Replied { message, .. } => Some(&message.tool_calls),
            _ => None,
        })
        .flatten()
        .map(|call| call.id.clone())
        .collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::value::RawValue;

    use super::{RunSummary, call_ids};
    use crate::domain::message::{AssistantMessage, ToolCall};
    use crate::domain::run::{Depth, Run, RunId, Scope};
    use crate::record::entry::{Entry, ReplyReport};

    fn id(n: u8) -> RunId {
        format!("run_01980000-0000-7000-8000-0000000000{n:02x}")
            .parse()
            .expect("an id")
    }

    fn run(n: u8, parent: Option<u8>, call: Option<&str>) -> Run {
        Run {
            root_id: id(1),
            parent_id: parent.map(id),
            depth: Depth(u8::from(parent.is_some())),
            tool_call_id: call.map(str::to_owned),
            task: call.map(|call| format!("task of {call}")),
            ..Run::queued(&Scope::root(id(n), None), "planner".to_owned())
        }
    }

    fn call(id: &str) -> ToolCall {
        ToolCall {
            id: id.to_owned(),
            provider_id: "p".to_owned(),
            name: "call_agent".to_owned(),
            arguments: Arc::from(RawValue::from_string("{}".to_owned()).expect("JSON")),
            invalid_arguments: None,
        }
    }

    fn steps() -> Vec<Entry> {
        vec![Entry::Replied {
            turn: 1,
            message: AssistantMessage {
                content: String::new(),
                tool_calls: vec![call("c1"), call("c2")],
                echo: None,
            },
            report: ReplyReport::default(),
        }]
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
}
