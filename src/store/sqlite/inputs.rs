//! The pending inputs of people. The table follows from the events: a request inserts a row, and the answer or
//! the end of the run removes it, each in the transaction of its event.

use rusqlite::{Connection, named_params};

use crate::domain::run::RunId;
use crate::store::encoding::input_changes::InputChange;
use crate::store::encoding::integers;
use crate::store::sqlite::rows;
use crate::store::sqlite::statements::Statements;

/// Applies the changes of a write about a run. `first_seq` is the number of its first event.
pub fn apply(
    sql: &mut Statements<'_>,
    run: RunId,
    changes: &[InputChange],
    first_seq: u64,
) -> rusqlite::Result<()> {
    let run = rows::id_bytes(&run);
    for change in changes {
        match change {
            InputChange::Requested {
                index,
                call,
                kind,
                request,
                wake,
            } => sql.insert_input.execute(named_params! {
                ":run": run,
                ":seq": integers::signed(first_seq + *index as u64),
                ":call": call,
                ":kind": kind.as_str(),
                ":request": request,
                ":wake": wake,
            })?,
            InputChange::Decided { call } => sql
                .delete_input
                .execute(named_params! {":run": run, ":call": call})?,
        };
    }
    Ok(())
}

/// Whether any input is pending.
pub fn exist(db: &Connection) -> rusqlite::Result<bool> {
    let sql = "SELECT EXISTS (SELECT 1 FROM inputs) AS found";
    db.query_row(sql, [], |row| row.get("found"))
}
