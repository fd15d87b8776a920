//! Waits for the results of tools that the client of the run executes. The calls are recorded as started, and their results
//! before the run continues, so that a restarted daemon neither forgets the calls nor their results.

use std::time::Duration;

use jiff::Timestamp;

use crate::domain::message::{ToolCall, ToolResult};
use crate::domain::run::now;
use crate::engine::approval::pause;
use crate::engine::cancel;
use crate::engine::run_loop::tool_calls::{self, BatchContext, CompletedCall};
use crate::engine::state::client_calls::{ClientResult, WaitingCalls};
use crate::engine::state::failures;
use crate::engine::state::pause::{PauseEvent, PauseReason};
use crate::engine::state::turn_error::TurnError;
use crate::store::{Change, StoreError};

/// The results of all calls, in their order; `results` has those of the agent's own tools.
pub async fn await_results(
    batch: &BatchContext,
    calls: &[ToolCall],
    mut results: Vec<Option<ToolResult>>,
) -> Result<Vec<ToolResult>, StoreError> {
    for (position, call) in calls.iter().enumerate() {
        if results[position].is_none() {
            results[position] = tool_calls::start_client_call(batch, position, call).await?;
        }
    }
    if results.iter().any(Option::is_none) {
        let run = &batch.context.run;
        run.clock().apply(PauseEvent::CallsStarted(1));
        let waited = wait(batch, calls, &mut results).await;
        let finished = pause::finish_call(&batch.context).await;
        if let Err(error) = waited.and(finished) {
            run.suspend(&error);
            return Err(error);
        }
    }
    Ok(results.into_iter().flatten().collect())
}

/// Waits as a call that is paused, and fills in the missing results.
async fn wait(
    batch: &BatchContext,
    calls: &[ToolCall],
    results: &mut [Option<ToolResult>],
) -> Result<(), StoreError> {
    let (engine, run) = (&batch.context.engine, &batch.context.run);
    let waiting = (0..).zip(&*results).filter(|(_, result)| result.is_none());
    let positions: Vec<u32> = waiting.map(|(position, _)| position).collect();
    let id = run.scope.run;
    let mut registration =
        WaitingCalls::register(&engine.client_calls, id, batch.turn, positions.clone());
    pause::pause(&batch.context, PauseReason::ClientTools, None).await?;
    let limit = engine.settings.client_tool_wait;
    let received = async {
        tokio::select! {
            biased;
            message = &mut registration.receiver => message.ok(),
            () = tokio::time::sleep(remaining_wait(batch, calls, limit)) => None,
        }
    };
    let received = match pause::within_deadline(run, received).await {
        Ok(None) => {
            let reason = format!(
                "no results of the client's tools within {}s (clients.tool_wait)",
                limit.as_secs()
            );
            cancel::cancel(engine, id, &reason).await?;
            Err(TurnError::Cancelled)
        }
        Ok(Some(message)) => Ok(message),
        Err(error) => Err(error),
    };
    let (received, ack) = match received {
        Err(TurnError::Store(error)) => return Err(error),
        Err(error) => {
            let content = failures::interruption_message(run, &error);
            let refused = positions.iter().map(|position| ClientResult {
                position: *position,
                content: content.clone(),
                is_error: true,
                attachments: Vec::new(),
            });
            (refused.collect(), None)
        }
        Ok(message) => (message.results, Some(message.ack)),
    };
    let committed = record(batch, calls, received, results).await;
    if let Some(ack) = ack {
        // The results count even if their client has disconnected.
        let _ = ack.send(committed.clone());
    }
    committed?;
    pause::unpause(&batch.context, PauseReason::ClientTools).await
}

/// Commits the results that are missing, all at once.
async fn record(
    batch: &BatchContext,
    calls: &[ToolCall],
    received: Vec<ClientResult>,
    results: &mut [Option<ToolResult>],
) -> Result<(), StoreError> {
    let run = &batch.context.run;
    let (mut steps, mut events) = (Vec::new(), Vec::new());
    for result in received {
        let position = result.position as usize;
        let (Some(call), Some(slot)) = (calls.get(position), results.get_mut(position)) else {
            continue;
        };
        if slot.is_some() {
            continue;
        }
        let duration = now().duration_since(started_at(batch, call));
        let result = ToolResult {
            attachments: result.attachments,
            ..ToolResult::text(
                &call.id,
                batch.toolbox.limit_result(result.content),
                result.is_error,
            )
        };
        let duration = Duration::try_from(duration).unwrap_or_default();
        let completed = CompletedCall::new(position, call, &result, duration);
        let (step, event) = completed.records(batch.turn, run.refused_by());
        steps.push(step);
        events.push(event);
        *slot = Some(result);
    }
    let journal = &batch.context.engine.journal;
    let committed = journal.append(run, Change::Unchanged, steps, events);
    committed.await.map(drop)
}

/// When the call was given to the client: now, unless an earlier process did.
fn started_at(batch: &BatchContext, call: &ToolCall) -> Timestamp {
    let recorded = batch.recorded_calls.started.get(&call.id).copied();
    recorded.unwrap_or(batch.started_at)
}

/// How long the client may still take.
fn remaining_wait(batch: &BatchContext, calls: &[ToolCall], limit: Duration) -> Duration {
    let started = calls.iter().map(|call| started_at(batch, call)).max();
    let waited = started.map(|started| now().duration_since(started));
    let waited = waited.and_then(|waited| Duration::try_from(waited).ok());
    limit.saturating_sub(waited.unwrap_or_default())
}
