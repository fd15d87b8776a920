//! Executes a reply's calls and adds their results to the conversation.

use std::sync::Arc;

use crate::domain::event::EventKind;
use crate::domain::message::{ToolCall, ToolResult};
use crate::domain::run::RunId;
use crate::engine::context::RunContext;
use crate::engine::delegation::delegate::{DriveFn, RunDelegate};
use crate::engine::replay::run_log::RecordedCalls;
use crate::engine::run_loop::conversation::{Conversation, LoopVerdict};
use crate::engine::run_loop::ending::Ending;
use crate::engine::run_loop::tool_calls::{self, BatchContext, CallsError};
use crate::engine::state::failures;
use crate::store::{Change, Step, StoreError};
use crate::tools::toolbox::Toolbox;

/// What a run's calls are executed with.
pub struct ToolContext {
    pub toolbox: Arc<Toolbox>,
    /// Drives its children.
    pub drive: DriveFn,
}

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

/// Executes the calls that have no result yet, and adds all results to the conversation.
pub async fn execute_calls(
    context: &RunContext,
    tool_context: &ToolContext,
    call_batch: CallBatch,
    conversation: &mut Conversation,
) -> Result<(), Ending> {
    let CallBatch {
        turn,
        calls,
        results,
        recorded_calls,
    } = call_batch;
    let toolbox = &tool_context.toolbox;
    let calls: Vec<_> = calls
        .into_iter()
        .map(|call| toolbox.resolve(call))
        .collect();
    let has_new_results = results.iter().any(Option::is_none);
    let is_resumed = recorded_calls.last_turn >= turn;
    let finished_children: Vec<RunId> = calls
        .iter()
        .filter_map(|call| recorded_calls.children.get(&call.id))
        .filter(|child| child.status.is_terminal())
        .map(|child| child.id)
        .collect();
    let delegate = Arc::new(RunDelegate::new(
        context,
        &recorded_calls,
        tool_context.drive,
    ));
    let batch = BatchContext {
        context: context.clone(),
        toolbox: Arc::clone(&tool_context.toolbox),
        delegate,
        turn,
        recorded_calls,
    };
    let results = match tool_calls::execute(batch, calls, results).await {
        Ok(results) => results,
        Err(CallsError::Store(error)) => return Err(error.into()),
        Err(CallsError::Interrupted(tool)) => {
            let message = format!(
                "the daemon stopped while tool \"{tool}\" was running; it may or may not have finished, and it is not \
                 safe to repeat"
            );
            return Err(Ending::failed(failures::interrupted(&message)));
        }
    };
    if is_resumed {
        // A refusal that was recorded before the restart ends the run now, as it would have then.
        for result in results.iter().filter(|result| result.is_error) {
            context.run.restore_refusal(&result.content);
        }
        restore_child_refusals(context, &finished_children).await?;
    }
    match conversation.push_results(results) {
        LoopVerdict::Continue => Ok(()),
        // The process that added the last result has already sent this warning.
        LoopVerdict::Warn(_) if !has_new_results => Ok(()),
        LoopVerdict::Warn(repeats) => {
            let warning = EventKind::LoopWarning {
                turn,
                repeats,
                message: failures::loop_detected(repeats).message,
            };
            context
                .engine
                .journal
                .enqueue(&context.run, Change::Unchanged, Vec::new(), vec![warning])
                .await?;
            Ok(())
        }
        LoopVerdict::Stop(repeats) => Err(Ending::failed(failures::loop_detected(repeats))),
    }
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
            for step in store.steps(run.id).await? {
                if let Step::Result { result, .. } = step
                    && result.is_error
                {
                    context.run.restore_refusal(&result.content);
                }
            }
        }
    }
    Ok(())
}
