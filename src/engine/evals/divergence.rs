//! Finds the call at which a run of an evaluation diverged, in the record of its tree.

use std::collections::HashMap;
use std::sync::Arc;

use crate::domain::agent::Agent;
use crate::domain::evaluation::Divergence;
use crate::domain::failure::FailureCode;
use crate::domain::message::{ToolCall, shorten};
use crate::domain::run::{Run, RunId};
use crate::domain::run_path;
use crate::engine::backtest::unknown_calls;
use crate::engine::record::agent_snapshots;
use crate::record::entry::Entry;
use crate::store::StoreError;
use crate::store::run_store::RunStore;
use crate::tools;

/// Most characters of the arguments that are kept.
const MAX_ARGUMENTS: usize = 2_000;

/// A reply that makes calls.
#[derive(Default)]
struct CallingReply {
    turn: u32,
    calls: Vec<ToolCall>,
    /// The positions of the calls that have a result.
    completed: Vec<usize>,
}

/// The first divergence in the tree of an ended root; `None` if none of its runs has diverged.
pub async fn find(store: &dyn RunStore, root: RunId) -> Result<Option<Divergence>, StoreError> {
    let runs = store.tree(root).await?;
    let has_diverged = |run: &&Run| {
        let error = run.error.as_ref();
        error.is_some_and(|error| error.code == FailureCode::Diverged)
    };
    // A caller of a run that has diverged diverges with it: the deepest one has made the call.
    let deepest = runs.iter().filter(has_diverged);
    let deepest = deepest.max_by_key(|run| (run.depth.0, std::cmp::Reverse(run.id)));
    let Some(run) = deepest else {
        return Ok(None);
    };
    let by_id: HashMap<RunId, &Run> = runs.iter().map(|run| (run.id, run)).collect();
    let settings = agent(store, root)
        .await?
        .and_then(|root| root.evaluation.clone());
    let agent = agent(store, run.id).await?;
    let last = replies(store, run.id).await?.pop();
    let last = last.unwrap_or_else(|| CallingReply {
        turn: run.turns,
        ..CallingReply::default()
    });
    let has_result = |call: &ToolCall| match (&settings, &agent) {
        (Some(settings), Some(agent)) => unknown_calls::has_result(settings, agent, call),
        _ => tools::is_pure(&call.name, &[]),
    };
    let calls = last.calls.iter().enumerate();
    let mut calls = calls.filter(|(position, _)| !last.completed.contains(position));
    let made = calls.find(|(_, call)| !has_result(call));
    let made = made.map(|(_, call)| call);
    Ok(Some(Divergence {
        path: path(store, &by_id, run).await?,
        turn: last.turn,
        tool: made.map_or_else(String::new, |call| shorten(&call.name, 200)),
        arguments: made.map_or_else(String::new, |call| {
            shorten(call.sent_arguments(), MAX_ARGUMENTS)
        }),
    }))
}

/// The definition of a run.
async fn agent(store: &dyn RunStore, run: RunId) -> Result<Option<Arc<Agent>>, StoreError> {
    let definition = store.definition(run).await?;
    Ok(definition.and_then(|json| agent_snapshots::parse(&json)))
}

/// The path of a run in its tree.
async fn path(
    store: &dyn RunStore,
    runs: &HashMap<RunId, &Run>,
    run: &Run,
) -> Result<String, StoreError> {
    let mut steps = Vec::new();
    let mut child = run;
    while let Some(parent) = child.parent_id.and_then(|id| runs.get(&id)) {
        steps.push((position(store, parent.id, child).await?, &child.agent));
        child = parent;
    }
    let root = child.agent.clone();
    Ok(steps
        .into_iter()
        .rev()
        .fold(root, |path, ((turn, position), agent)| {
            run_path::child(&path, turn, position, agent)
        }))
}

/// The turn and the position, from 1, of the call that started a run.
async fn position(
    store: &dyn RunStore,
    parent: RunId,
    child: &Run,
) -> Result<(u32, usize), StoreError> {
    for reply in replies(store, parent).await? {
        let mut calls = reply.calls.iter();
        let at = calls.position(|call| Some(&call.id) == child.tool_call_id.as_ref());
        if let Some(at) = at {
            return Ok((reply.turn, at + 1));
        }
    }
    Ok((0, 0))
}

async fn replies(store: &dyn RunStore, run: RunId) -> Result<Vec<CallingReply>, StoreError> {
    let mut replies: Vec<CallingReply> = Vec::new();
    for recorded in store.entries(run).await? {
        match recorded.entry {
            Entry::Replied { turn, message, .. } if !message.tool_calls.is_empty() => {
                replies.push(CallingReply {
                    turn,
                    calls: message.tool_calls,
                    completed: Vec::new(),
                });
            }
            Entry::CallCompleted { turn, position, .. } => {
                let mut replies = replies.iter_mut();
                if let Some(reply) = replies.find(|reply| reply.turn == turn) {
                    reply.completed.push(position as usize);
                }
            }
            _ => {}
        }
    }
    Ok(replies)
}
