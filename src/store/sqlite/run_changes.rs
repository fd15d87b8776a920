//! Writes a change to the row of a run that exists.

use rusqlite::named_params;

use crate::domain::run::Outcome;
use crate::store::encoding::ended_runs::EndedRun;
use crate::store::encoding::integers;
use crate::store::encoding::run_values::{self, UsageValues};
use crate::store::sqlite::statements::Statements;
use crate::store::sqlite::usage_rollup;
use crate::store::{Change, FinishedRun, Progress};

/// Applies a change, and raises the run's last event to `last_event` if that is greater. Returns the number of rows that
/// changed: 0 if the run does not exist or has ended, if its cancel was requested before, or if it has other messages than the
/// change assumes.
pub fn update(
    sql: &mut Statements<'_>,
    id: &[u8; 16],
    last_event: i64,
    change: &Change,
) -> rusqlite::Result<usize> {
    let only_event = named_params! {":id": id, ":last_event": last_event};
    match change {
        // The caller inserts and finishes runs.
        Change::Create(_) | Change::Finish(_) => Ok(0),
        Change::Start { at, deadline } => sql.start_run.execute(named_params! {
            ":id": id,
            ":last_event": last_event,
            ":started_at": at.as_millisecond(),
            ":deadline_at": deadline.0.as_millisecond(),
            ":deadline_seconds": integers::signed(deadline.1),
        }),
        Change::Pause { since, waiting_for } => sql.pause_run.execute(named_params! {
            ":id": id,
            ":last_event": last_event,
            ":waiting_since": since.as_millisecond(),
            ":waiting_for": serde_json::to_string(waiting_for).ok(),
        }),
        Change::Unpause { deadline } => sql.unpause_run.execute(named_params! {
            ":id": id,
            ":last_event": last_event,
            ":deadline_at": deadline.0.as_millisecond(),
            ":deadline_seconds": integers::signed(deadline.1),
        }),
        Change::Resume => sql.resume_run.execute(only_event),
        Change::Unchanged | Change::Claim(_) => sql.update_last_event.execute(only_event),
        Change::Progress(progress) => update_progress(sql, id, last_event, progress),
        Change::CountToolCall => add_events(sql, id, last_event, 1),
        Change::RequestCancel { reason } => sql.request_cancel.execute(named_params! {
            ":id": id,
            ":last_event": last_event,
            ":reason": reason,
        }),
        Change::Hold => sql.hold_run.execute(only_event),
        Change::Release => sql.release_run.execute(only_event),
        Change::AddMessage(message) => sql.add_message.execute(named_params! {
            ":id": id,
            ":last_event": last_event,
            ":number": message.number,
        }),
    }
}

/// Adds events and tool calls to a run. Returns the number of rows that changed, as [`update`].
pub fn add_events(
    sql: &mut Statements<'_>,
    id: &[u8; 16],
    last_event: i64,
    tool_calls: i64,
) -> rusqlite::Result<usize> {
    let params = named_params! {":id": id, ":last_event": last_event, ":count": tool_calls};
    match tool_calls {
        0 => sql.update_last_event.execute(&params[..2]),
        _ => sql.count_tool_calls.execute(params),
    }
}

fn update_progress(
    sql: &mut Statements<'_>,
    id: &[u8; 16],
    last_event: i64,
    progress: &Progress,
) -> rusqlite::Result<usize> {
    let usage = UsageValues::from(&progress.usage);
    sql.update_progress.execute(named_params! {
        ":id": id,
        ":last_event": last_event,
        ":turns": progress.turns,
        ":model": progress.model,
        ":stop_reason": progress.stop_reason,
        ":input_tokens": usage.input_tokens,
        ":output_tokens": usage.output_tokens,
        ":cache_read_tokens": usage.cache_read_tokens,
        ":cache_write_tokens": usage.cache_write_tokens,
        ":model_calls": usage.model_calls,
        ":tool_calls": usage.tool_calls,
        ":cost": usage.cost,
        ":unreported": usage.unreported,
        ":model_usage": run_values::model_usage_value(&progress.models),
    })
}

/// Ends a run and returns what is counted of it. `None` if the run does not exist or has ended.
pub fn finish(
    sql: &mut Statements<'_>,
    id: &[u8; 16],
    last_event: i64,
    finished: &FinishedRun,
) -> rusqlite::Result<Option<EndedRun>> {
    let is_structured = matches!(
        finished.outcome,
        Outcome::Completed {
            structured: true,
            ..
        }
    );
    let (content, partial, failure, reason) = match &finished.outcome {
        Outcome::Completed { content, .. } => (Some(content), None, None, None),
        Outcome::Failed { failure, partial } => (None, partial.as_ref(), Some(failure), None),
        Outcome::Cancelled { reason, partial } => (None, partial.as_ref(), None, Some(reason)),
    };
    let error = failure.map(|failure| serde_json::to_string(failure).unwrap_or_default());
    let progress = &finished.progress;
    let own = UsageValues::from(&progress.usage);
    let tree = UsageValues::from(&finished.tree_usage.usage);
    let params = named_params! {
        ":id": id,
        ":last_event": last_event,
        ":turns": progress.turns,
        ":model": progress.model,
        ":stop_reason": progress.stop_reason,
        ":input_tokens": own.input_tokens,
        ":output_tokens": own.output_tokens,
        ":cache_read_tokens": own.cache_read_tokens,
        ":cache_write_tokens": own.cache_write_tokens,
        ":model_calls": own.model_calls,
        ":tool_calls": own.tool_calls,
        ":cost": own.cost,
        ":unreported": own.unreported,
        ":status": finished.outcome.status().as_str(),
        ":finished_at": finished.finished_at.as_millisecond(),
        ":content": content,
        ":partial_content": partial,
        ":error": error,
        ":cancel_reason": reason,
        ":tree_runs": integers::signed(finished.tree_usage.runs),
        ":tree_input_tokens": tree.input_tokens,
        ":tree_output_tokens": tree.output_tokens,
        ":tree_cache_read_tokens": tree.cache_read_tokens,
        ":tree_cache_write_tokens": tree.cache_write_tokens,
        ":tree_model_calls": tree.model_calls,
        ":tree_tool_calls": tree.tool_calls,
        ":tree_cost": tree.cost,
        ":tree_unreported": tree.unreported,
        ":structured": is_structured.then_some(true),
        ":completion_status": finished.completion_status,
        ":messages": finished.messages,
        ":model_usage": run_values::model_usage_value(&progress.models),
    };
    if sql.finish_run.execute(params)? == 0 {
        return Ok(None);
    }
    let row = sql
        .ended_run
        .query_row(named_params! {":id": id}, usage_rollup::read_ended_row)?;
    Ok(row.map(|row| row.ended(finished)))
}
