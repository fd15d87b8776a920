//! Gives the calls of one reply, in a tree that plays a recorded one again, their recorded results.

use std::time::Duration;

use crate::domain::message::{ToolCall, ToolResult, shorten};
use crate::engine::backtest::load::{self, LoadError};
use crate::engine::backtest::recorded_calls;
use crate::engine::backtest::unknown_calls;
use crate::engine::run_loop::call_records::{CompletedCall, started};
use crate::engine::run_loop::limits;
use crate::engine::run_loop::run_spans;
use crate::engine::run_loop::tool_calls::{self, BatchContext, CallsError};
use crate::engine::state::evaluated_tree::{EvaluatedTree, PlayedCall};
use crate::engine::state::failures;
use crate::store::{Change, StoreError};
use crate::tools;
use crate::tools::deferred::TOOL_SEARCH;

/// Records the results. The calls that remain without one are executed; the error names the first that is not.
pub async fn play(
    batch: &BatchContext,
    evaluation: &EvaluatedTree,
    calls: &[ToolCall],
    results: &mut [Option<ToolResult>],
) -> Result<(), CallsError> {
    let run = &batch.context.run;
    // The record has what a search found then.
    let is_playable = |call: &ToolCall| {
        call.name == TOOL_SEARCH || !tools::is_pure(&call.name, &run.agent.approve)
    };
    let pending = calls.iter().enumerate();
    let pending =
        pending.filter(|(position, call)| results[*position].is_none() && is_playable(call));
    let pending: Vec<(usize, &ToolCall)> = pending.collect();
    if pending.is_empty() {
        return Ok(());
    }
    let loaded = load::results(&batch.context, evaluation);
    let recorded = match limits::within_deadline(run, loaded).await {
        Ok(loaded) => loaded.map_err(|error| match error {
            LoadError::Store(error) => CallsError::Store(error),
            error => CallsError::Unplayable(error.to_string()),
        })?,
        // The run ends before its next turn.
        Err(error) => {
            let why = failures::interruption_message(run, &error);
            for (position, call) in pending {
                results[position] = Some(ToolResult::text(&call.id, &*why, true));
            }
            return Ok(());
        }
    };
    let (mut played, mut unknown) = (Vec::new(), None);
    for (position, call) in pending {
        let key = recorded_calls::key(call, &recorded.ignore);
        match recorded.take(key) {
            Some(PlayedCall::Result(result)) => played.push((position, call, result)),
            Some(PlayedCall::ApprovedDelegation) => {}
            None if batch.has_started(call) => {}
            None if unknown_calls::has_result(&evaluation.settings, &run.agent, call) => {}
            None => drop(unknown.get_or_insert(call)),
        }
    }
    record(batch, played, results).await?;
    match unknown {
        None => Ok(()),
        Some(call) => {
            evaluation.diverge();
            Err(CallsError::Diverged(shorten(&call.name, 200)))
        }
    }
}

/// Records the calls with their results, all in one commit.
async fn record(
    batch: &BatchContext,
    played: Vec<(usize, &ToolCall, ToolResult)>,
    results: &mut [Option<ToolResult>],
) -> Result<(), StoreError> {
    let run = &batch.context.run;
    let journal = &batch.context.engine.journal;
    let last = played.len().saturating_sub(1);
    for (index, (position, call, recorded)) in played.into_iter().enumerate() {
        let is_counted = batch.has_started(call);
        let (change, result) = match tool_calls::count_call(batch, call) {
            Ok(()) if is_counted => (Change::Unchanged, recorded),
            Ok(()) => (Change::CountToolCall, recorded),
            Err(refusal) => {
                let refused = ToolResult::text(&call.id, refusal.exceeded.to_string(), true);
                (Change::Unchanged, refused)
            }
        };
        let result = ToolResult {
            call_id: call.id.clone(),
            ..result
        };
        let completed = CompletedCall::new(position, call, &result, Duration::ZERO);
        let mut entries = Vec::new();
        if !is_counted {
            entries.push(started(batch.turn, call).into());
        }
        entries.push(completed.entry(batch.turn, run.refused_by()));
        match index == last {
            true => drop(journal.append(run, change, entries).await?),
            false => journal.enqueue(run, change, entries).await?,
        }
        run_spans::end_tool_call(run, batch.turn, call, &result, Duration::ZERO);
        results[position] = Some(result);
    }
    Ok(())
}
