//! How trees and definitions are removed: a little in one transaction, so that no run waits long. Knows no transaction.

use rusqlite::params;

use crate::domain::run::RunId;
use crate::store::sqlite::definitions::Known;
use crate::store::sqlite::rows::{self, Hash};
use crate::store::sqlite::statements::Statements;
use crate::store::sqlite::writer::{GONE, MORE};

/// Entries and runs that one part of a tree has at most.
const PART_ROWS: u32 = 128;
/// Bytes of their texts after which a part ends.
const PART_BYTES: u64 = 1 << 20;

/// Removes a part of a root's tree: its log first, from its end, so that nobody reads it with a gap; then its runs from
/// the leaves up, so that what a kill leaves is still found below its root.
pub fn remove_part(
    sql: &mut Statements<'_>,
    definitions: &mut Known,
    root: RunId,
) -> rusqlite::Result<u64> {
    let mut left = Part {
        rows: PART_ROWS,
        bytes: PART_BYTES,
    };
    let entries: Vec<(i64, i64)> = sql
        .entries
        .query_map(params![rows::bytes(&root), PART_ROWS], |row| {
            Ok((row.get(0)?, row.get(1)?))
        })?
        .collect::<rusqlite::Result<_>>()?;
    for (entry, bytes) in entries {
        sql.delete_entry.execute([entry])?;
        if !left.take(bytes) {
            return Ok(MORE);
        }
    }
    let mut path = vec![root];
    while let Some(run) = path.last().copied() {
        let below = sql
            .child
            .query_map(params![rows::bytes(&run)], |row| rows::id(row, 0))?
            .next()
            .transpose()?;
        if let Some(child) = below {
            path.push(child);
            continue;
        }
        let bytes = remove_run(sql, definitions, run)?;
        path.pop();
        if !left.take(bytes) && !path.is_empty() {
            return Ok(MORE);
        }
    }
    Ok(GONE)
}

/// What a part may still take.
struct Part {
    rows: u32,
    bytes: u64,
}

impl Part {
    /// Takes a row with so many bytes; false where it was the last.
    fn take(&mut self, bytes: i64) -> bool {
        self.rows = self.rows.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(rows::unsigned(bytes));
        self.rows > 0 && self.bytes > 0
    }
}

/// Removes a run without children and everything of its own; returns the bytes of its texts.
fn remove_run(
    sql: &mut Statements<'_>,
    definitions: &mut Known,
    id: RunId,
) -> rusqlite::Result<i64> {
    let run = rows::bytes(&id);
    let (labels, definition, bytes): (Option<String>, Option<Hash>, i64) =
        sql.leaving.query_row(params![run], |row| {
            Ok((row.get(0)?, row.get(1)?, row.get(2)?))
        })?;
    for (key, value) in rows::labels(labels.as_deref()) {
        sql.delete_label.execute(params![key, value, run])?;
    }
    sql.delete_claims.execute(params![run])?;
    sql.delete_deliveries.execute(params![run])?;
    sql.delete_text.execute(params![run])?;
    sql.delete_run.execute(params![run])?;
    if let Some(definition) = definition
        && sql
            .delete_own_definition
            .execute(params![definition, run])?
            > 0
    {
        definitions.clear();
    }
    Ok(bytes)
}

/// Removes a few definitions that nobody runs by, as far as the age of the oldest run tells; true where there may be
/// more.
pub fn drop_definitions(
    sql: &mut Statements<'_>,
    definitions: &mut Known,
) -> rusqlite::Result<bool> {
    let oldest: Option<[u8; 16]> = sql.oldest.query_row([], |row| row.get(0))?;
    let unused_before = oldest.map_or(i64::MAX, |id| made_at(RunId(uuid::Uuid::from_bytes(id))));
    let dropped = sql.delete_old_definitions.execute([unused_before])?;
    if dropped > 0 {
        definitions.clear();
    }
    Ok(dropped > 0)
}

/// When a run was made, in milliseconds, as its id tells. Ids sort by it, so no run is older than the one that is first.
pub fn made_at(run: RunId) -> i64 {
    let made = run.0.get_timestamp().map_or((0, 0), |time| time.to_unix());
    rows::signed(made.0.saturating_mul(1000) + u64::from(made.1 / 1_000_000))
}
