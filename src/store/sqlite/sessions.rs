//! Removes a session's name from its runs.

use rusqlite::named_params;

use crate::domain::run::RunId;
use crate::store::sqlite::rows;
use crate::store::sqlite::statements::Statements;
use crate::store::write_queue::job::ForgetProgress;

/// Runs that lose their session's name in one transaction.
const PART_RUNS: u32 = 256;

/// Removes a session's name from the oldest of its runs: the conversation is that of the last one, so it is either whole or
/// gone.
pub fn forget_part(
    sql: &mut Statements<'_>,
    owner: Option<&str>,
    name: &str,
) -> rusqlite::Result<ForgetProgress> {
    let runs: Vec<RunId> = sql
        .session_runs
        .query(named_params! {":owner": owner, ":session": name, ":limit": PART_RUNS})?
        .mapped(|row| rows::id(row, "id"))
        .collect::<rusqlite::Result<_>>()?;
    for run in &runs {
        sql.forget_session
            .execute(named_params! {":id": rows::id_bytes(run)})?;
    }
    Ok(match runs.len() {
        0 => ForgetProgress::NotFound,
        many if many == PART_RUNS as usize => ForgetProgress::More,
        _ => ForgetProgress::Done,
    })
}
