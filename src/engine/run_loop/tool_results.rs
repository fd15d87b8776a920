//! Executes a reply's calls and adds their results to the conversation.

use std::sync::{Arc, OnceLock};

use crate::domain::event::EventKind;
use crate::domain::message::{ToolCall, ToolResult};
use crate::domain::run::{RunId, now};
use crate::domain::warning::{Warning, WarningCode};
use crate::engine::context::RunContext;
use crate::engine::conversation::loop_guard::LoopVerdict;
use crate::engine::history::run_log::RecordedCalls;
use crate::engine::run_loop::client_calls;
use crate::engine::run_loop::delegation::delegate::RunDelegate;
use crate::engine::run_loop::ending::Ending;
use crate::engine::run_loop::played_calls;
use crate::engine::run_loop::tool_calls::{self, BatchContext, CallsError};
use crate::engine::run_loop::turn_loop::TurnLoop;
use crate::engine::state::failures;
use crate::record::entry::Entry;
use crate::store::{Change, StoreError};

/// The calls of one reply.
pub struct CallBatch {
    /// The turn of the reply.
    pub turn: u32,
    pub calls: Vec<ToolCall>,
    /// What an earlier process recorded; `results.len() == calls.len()`.
    pub results: Vec<Option<ToolResult>>,
    /// What an earlier process had started.
    pub recorded_calls: Arc<RecordedCalls>,
}

impl CallBatch {
    /// Calls of a new reply.
    pub fn new(turn: u32, calls: Vec<ToolCall>) -> Self {
        Self {
            turn,
            results: calls.iter().map(|_| None).collect(),
            calls,
            recorded_calls: Arc::default(),
        }
    }

    /// Children of these calls that had ended before a restart.
    fn finished_children(&self) -> Vec<RunId> {
        let calls = self.calls.iter();
        let children = calls.filter_map(|call| self.recorded_calls.children.get(&call.id));
        let finished = children.filter(|child| child.status.is_terminal());
        finished.map(|child| child.id).collect()
    }
}

/// Executes the calls that have no result yet, and adds all results to the conversation.
pub async fn execute_calls(
    turn_loop: &mut TurnLoop<'_>,
    call_batch: CallBatch,
) -> Result<(), Ending> {
    let context = turn_loop.context;
    let turn = call_batch.turn;
    let has_new_results = call_batch.results.iter().any(Option::is_none);
    let is_resumed = call_batch.recorded_calls.last_turn >= turn;
    let finished_children = call_batch.finished_children();
    let recorded_calls = Arc::clone(&call_batch.recorded_calls);
    let results = execute_batch(turn_loop, call_batch).await?;
    if is_resumed {
        // A refusal that was recorded before the restart ends the run now, as it would have then.
        context.run.restore_refusals(&recorded_calls.refused_by);
        Box::pin(restore_child_refusals(context, &finished_children)).await?;
    }
    match turn_loop.conversation.push_results(results) {
        LoopVerdict::Continue => Ok(()),
        // The process that added the last result has already sent this warning.
        LoopVerdict::Warn(_) if !has_new_results => Ok(()),
        LoopVerdict::Warn(repeats) => Ok(Box::pin(warn_of_loop(context, turn, repeats)).await?),
        LoopVerdict::Stop(repeats) => Err(Ending::failed(failures::loop_detected(repeats))),
    }
}

async fn execute_batch(
    turn_loop: &TurnLoop<'_>,
    call_batch: CallBatch,
) -> Result<Vec<ToolResult>, Ending> {
    let CallBatch {
        turn,
        calls,
        mut results,
        recorded_calls,
    } = call_batch;
    let context = turn_loop.context;
    let toolbox = &turn_loop.preamble.toolbox;
    let delegate = RunDelegate::new(context, turn, &recorded_calls, turn_loop.drive_child);
    let batch = BatchContext {
        context: context.clone(),
        toolbox: Arc::clone(toolbox),
        delegate: Arc::new(delegate),
        turn,
        recorded_calls,
        started_at: now(),
        interrupted: OnceLock::new(),
    };
    let calls = calls.into_iter().map(|call| toolbox.resolve(call));
    let (batch, calls) = (Arc::new(batch), calls.collect::<Vec<_>>());
    if let Some(evaluation) = context.run.tree.played() {
        let played = played_calls::play(&batch, evaluation, &calls, &mut results);
        Box::pin(played).await.map_err(ending)?;
    }
    let executed = Box::pin(tool_calls::execute(&batch, &calls, results)).await;
    let results = executed.map_err(ending)?;
    if results.iter().all(Option::is_some) {
        return Ok(results.into_iter().flatten().collect());
    }
    Ok(Box::pin(client_calls::await_results(&batch, &calls, results)).await?)
}

fn ending(error: CallsError) -> Ending {
    match error {
        CallsError::Store(error) => error.into(),
        CallsError::Interrupted(tool) => Ending::failed(failures::interrupted_call(&tool)),
        CallsError::Diverged(tool) => Ending::failed(failures::diverged(&tool)),
        CallsError::Unplayable(why) => Ending::failed(failures::config(&why)),
    }
}

async fn warn_of_loop(context: &RunContext, turn: u32, repeats: u32) -> Result<(), StoreError> {
    let message = failures::loop_detected(repeats).message;
    let warning = Warning::new(WarningCode::CallsRepeated, &message);
    context.run.warn(warning, Some(turn));
    let warning = EventKind::LoopWarning {
        turn,
        repeats,
        message,
    };
    let journal = &context.engine.journal;
    journal
        .enqueue(&context.run, Change::Unchanged, vec![warning.into()])
        .await
}

/// Restores the budget refusals that children of this run met before a restart. A child's own end names only the first
/// limit that it reached.
async fn restore_child_refusals(
    context: &RunContext,
    children: &[RunId],
) -> Result<(), StoreError> {
    if context
        .run
        .tree
        .budgets
        .refusals(&context.run.accounts)
        .is_empty()
    {
        return Ok(());
    }
    let store = context.engine.journal.store();
    for child in children {
        for run in store.tree(*child).await? {
            for it in store.entries(run.id).await? {
                if let Entry::CallCompleted { refused_by, .. } = it.entry {
                    context.run.restore_refusals(&refused_by);
                }
            }
        }
    }
    Ok(())
}
