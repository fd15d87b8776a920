//! Converts ids and claims to columns and back.

use rusqlite::{Row, RowIndex};

use crate::domain::run::RunId;
use crate::store::ClaimedRun;

/// Reads the columns `run`, `body` and `message` of a claim.
pub fn claimed_run(row: &Row<'_>) -> rusqlite::Result<ClaimedRun> {
    Ok(ClaimedRun {
        run: id(row, "run")?,
        body_hash: row.get("body")?,
        number: row.get("message")?,
    })
}

pub fn id_bytes(id: &RunId) -> &[u8; 16] {
    id.0.as_bytes()
}

pub fn id(row: &Row<'_>, column: impl RowIndex) -> rusqlite::Result<RunId> {
    row.get(column).map(from_bytes)
}

fn from_bytes(bytes: [u8; 16]) -> RunId {
    RunId(uuid::Uuid::from_bytes(bytes))
}
