//! Waits for the results of tools that the client of the run executes. The calls are recorded as started, and their results
//! before the run continues, so that a restarted daemon neither forgets the calls nor their results.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};

use crate::domain::message::{ToolCall, ToolResult};
use crate::domain::run::now;
use crate::domain::waiting_for::WaitingFor;
use crate::engine::approval::pause;
use crate::engine::control::cancel;
use crate::engine::history::held_time;
use crate::engine::run_loop::call_records::CompletedCall;
use crate::engine::run_loop::tool_calls::{self, BatchContext};
use crate::engine::state::active_run::ActiveRun;
use crate::engine::state::client_calls::{ClientResult, ResultsMessage, WaitingCalls};
use crate::engine::state::failures;
use crate::engine::state::pause::{PauseEvent, PauseReason};
use crate::engine::state::turn_error::TurnError;
use crate::store::{Change, IdempotencyClaim, StoreError};

/// The results of all calls, in their order; `results` has those of the agent's own tools.
pub async fn await_results(
    batch: &BatchContext,
    calls: &[ToolCall],
    mut results: Vec<Option<ToolResult>>,
) -> Result<Vec<ToolResult>, StoreError> {
    for (position, call) in calls.iter().enumerate() {
        if results[position].is_none() {
            let started = Box::pin(tool_calls::start_client_call(batch, position, call));
            results[position] = started.await?;
        }
    }
    if results.iter().any(Option::is_none) {
        let run = &batch.context.run;
        run.clock().apply(PauseEvent::CallsStarted(1));
        let waited = wait(batch, calls, &mut results).await;
        let finished = Box::pin(pause::finish_call(&batch.context)).await;
        if let Err(error) = waited.and(finished) {
            run.suspend(&error);
            return Err(error);
        }
    }
    Ok(results.into_iter().flatten().collect())
}

/// Waits as a call that is paused, and fills in the missing results.
// What is done soon is boxed here and in what waits for this: thousands of runs wait here, each with space for what it awaits.
async fn wait(
    batch: &BatchContext,
    calls: &[ToolCall],
    results: &mut [Option<ToolResult>],
) -> Result<(), StoreError> {
    let (engine, run) = (&batch.context.engine, &batch.context.run);
    let waiting = (0..).zip(&*results).filter(|(_, result)| result.is_none());
    let positions: Vec<u32> = waiting.map(|(position, _)| position).collect();
    let id = run.scope.run;
    let waiting = positions.iter().filter_map(|it| calls.get(*it as usize));
    let since = waiting.map(|call| started_at(batch, call)).min();
    let mut registration = WaitingCalls::register(
        &engine.client_calls,
        id,
        (batch.turn, positions.clone()),
        since.unwrap_or_else(now),
    );
    Box::pin(pause::pause(
        &batch.context,
        PauseReason::Call(WaitingFor::ClientTools),
        None,
    ))
    .await?;
    loop {
        let (received, claim, ack) = match receive(batch, calls, &mut registration).await {
            Ok(message) => (message.results, message.claim, Some(message.ack)),
            Err(TurnError::Store(error)) => return Err(error),
            Err(error) => (refuse(run, &positions, &error), None, None),
        };
        let committed = Box::pin(record(batch, calls, received, claim, results)).await;
        let is_repeated = matches!(committed, Err(StoreError::AlreadyClaimed(_)));
        if is_repeated {
            registration.renew();
        }
        if let Some(ack) = ack {
            // The results count even if their client has disconnected.
            let _ = ack.send(committed.clone());
        }
        if !is_repeated {
            committed?;
            registration.settle();
            return Box::pin(pause::unpause(
                &batch.context,
                PauseReason::Call(WaitingFor::ClientTools),
            ))
            .await;
        }
    }
}

/// The results, unless the run ends first: also when none came within the limit.
async fn receive(
    batch: &BatchContext,
    calls: &[ToolCall],
    registration: &mut WaitingCalls<'_>,
) -> Result<ResultsMessage, TurnError> {
    let (engine, run) = (&batch.context.engine, &batch.context.run);
    let limit = engine.settings.client_tool_wait;
    let remaining = Box::pin(remaining_wait(batch, calls, limit)).await?;
    let received = async {
        tokio::select! {
            biased;
            message = &mut registration.receiver => message.ok(),
            () = pause::sleep_unless_held(run, remaining) => None,
        }
    };
    match pause::within_deadline(run, received).await? {
        Some(message) => Ok(message),
        None => {
            let reason = format!(
                "no results of the client's tools within {}s (clients.tool_wait)",
                limit.as_secs()
            );
            Box::pin(cancel::cancel(engine, run.scope.run, &reason)).await?;
            Err(TurnError::Cancelled)
        }
    }
}

/// Results for the model that say why there are none.
fn refuse(run: &ActiveRun, positions: &[u32], error: &TurnError) -> Vec<ClientResult> {
    let content = failures::interruption_message(run, error);
    let refused = positions.iter().map(|position| ClientResult {
        position: *position,
        content: content.clone(),
        is_error: true,
        attachments: Vec::new(),
    });
    refused.collect()
}

/// Commits the results that are missing, all at once.
async fn record(
    batch: &BatchContext,
    calls: &[ToolCall],
    received: Vec<ClientResult>,
    claim: Option<IdempotencyClaim>,
    results: &mut [Option<ToolResult>],
) -> Result<(), StoreError> {
    let run = &batch.context.run;
    let mut entries = Vec::new();
    let mut recorded: Vec<(usize, ToolResult)> = Vec::new();
    for result in received {
        let position = result.position as usize;
        let is_missing = matches!(results.get(position), Some(None));
        let (Some(call), true) = (calls.get(position), is_missing) else {
            continue;
        };
        if recorded.iter().any(|(other, _)| *other == position) {
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
        entries.push(completed.entry(batch.turn, run.refused_by()));
        recorded.push((position, result));
    }
    let change = Change::by_request(claim, batch.turn);
    let journal = &batch.context.engine.journal;
    journal.append(run, change, entries).await?;
    for (position, result) in recorded {
        results[position] = Some(result);
    }
    Ok(())
}

/// When the call was given to the client: now, unless an earlier process did.
fn started_at(batch: &BatchContext, call: &ToolCall) -> Timestamp {
    let recorded = batch.recorded_calls.started.get(&call.id).copied();
    recorded.unwrap_or(batch.started_at)
}

/// How long the client may still take. The time for which the run was paused does not count.
async fn remaining_wait(
    batch: &BatchContext,
    calls: &[ToolCall],
    limit: Duration,
) -> Result<Duration, StoreError> {
    let Some(started) = calls.iter().map(|call| started_at(batch, call)).max() else {
        return Ok(limit);
    };
    let mut waited = now().duration_since(started);
    // An earlier process may have waited, or this one before results that were refused.
    if waited > SignedDuration::from_secs(1) {
        waited = waited.saturating_sub(held_time::since(&batch.context, started).await?);
    }
    Ok(limit.saturating_sub(Duration::try_from(waited).unwrap_or_default()))
}
