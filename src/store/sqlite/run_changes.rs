//! Writes a change to the row of a run that exists.

use rusqlite::named_params;

use crate::store::FinishedRun;
use crate::store::encoding::encoded_write::EncodedWrite;
use crate::store::encoding::ended_runs::EndedRun;
use crate::store::row_changes::{self, RowChange};
use crate::store::sql::value::{NamedValue, values};
use crate::store::sqlite::rows;
use crate::store::sqlite::statements::Statements;
use crate::store::sqlite::usage_rollup;

/// Changes the row, and raises the run's last event to `last_event` if that is greater. Returns the number of rows that
/// changed: 0 if the run does not exist or has ended, if its cancel was requested before, or if it has other messages than the
/// change assumes.
pub fn update(
    sql: &mut Statements<'_>,
    write: &EncodedWrite,
    last_event: i64,
) -> rusqlite::Result<usize> {
    let (change, mut values) = row_changes::row_change(&write.change);
    values.extend(values! {":run": write.run, ":last_event": last_event});
    sql.row_change(change).change(&values)
}

/// Adds events and tool calls to the run of this write, as [`update`] does.
pub fn add_events(
    sql: &mut Statements<'_>,
    write: &EncodedWrite,
    last_event: i64,
    tool_calls: i64,
) -> rusqlite::Result<usize> {
    let change = match tool_calls {
        0 => RowChange::LastEvent,
        _ => RowChange::CountToolCalls,
    };
    let values: [NamedValue<'_>; 3] =
        values! {":run": write.run, ":last_event": last_event, ":calls": tool_calls};
    sql.row_change(change).change(&values)
}

/// What is counted of a run that has just ended.
pub fn ended(
    sql: &mut Statements<'_>,
    write: &EncodedWrite,
    finished: &FinishedRun,
) -> rusqlite::Result<Option<EndedRun>> {
    let params = named_params! {":id": rows::id_bytes(&write.run)};
    let row = sql
        .ended_run
        .query_row(params, usage_rollup::read_ended_row)?;
    Ok(row.map(|row| row.ended(finished)))
}
