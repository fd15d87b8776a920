//! How trees and definitions are removed: a little in one transaction, so that no run waits long. Knows no transaction.

use std::collections::VecDeque;

use rusqlite::{Connection, params};

use crate::domain::run::RunId;
use crate::store::sqlite::attachments;
use crate::store::sqlite::definition_cache::DefinitionCache;
use crate::store::sqlite::rows::{self, Hash};
use crate::store::sqlite::statements::Statements;

/// Entries and runs that one part of a tree has at most.
const PART_ROWS: u32 = 128;
/// Bytes of their texts after which a part ends.
pub const PART_BYTES: usize = 1 << 20;

/// What there is of a tree after a part of it was removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeleteProgress {
    /// It is gone.
    Done,
    /// A further part.
    More,
}

/// Roots whose trees are being removed: marked in the table, so that nobody sees them and the next start goes on.
#[derive(Debug, Default)]
pub struct Deletions {
    roots: VecDeque<RunId>,
    /// Whether a part could not be removed since something was last written.
    is_paused: bool,
}

impl Deletions {
    /// Those that are marked.
    pub fn load(db: &Connection) -> rusqlite::Result<Self> {
        let roots = db
            .prepare("SELECT root FROM deletions")?
            .query_map([], |row| rows::id(row, 0))?
            .collect::<rusqlite::Result<_>>()?;
        Ok(Self {
            roots,
            is_paused: false,
        })
    }

    /// One more that has been marked.
    pub fn add(&mut self, root: RunId) {
        self.roots.push_back(root);
    }

    /// Whose turn it is.
    pub fn next(&mut self) -> Option<RunId> {
        self.roots.rotate_left(1.min(self.roots.len()));
        self.is_paused = false;
        self.roots.back().copied()
    }

    /// Its root is gone.
    pub fn remove(&mut self, root: RunId) {
        self.roots.retain(|other| *other != root);
    }

    /// Lets them rest until something is written.
    pub fn pause(&mut self) {
        self.is_paused = true;
    }

    /// Whether there is something to remove, after so many writes.
    pub fn is_due(&self, writes: usize) -> bool {
        !self.roots.is_empty() && (writes > 0 || !self.is_paused)
    }
}

/// Removes a part of a root's tree: its log first, from its end, so that nobody reads it with a gap; then its runs from
/// the leaves up, so that what a kill leaves is still found below its root.
pub fn delete_part(
    sql: &mut Statements<'_>,
    cache: &mut DefinitionCache,
    root: RunId,
) -> rusqlite::Result<DeleteProgress> {
    let mut budget = PartBudget {
        rows: PART_ROWS,
        bytes: PART_BYTES as u64,
    };
    let entries: Vec<(i64, i64)> = sql
        .last_entries
        .query_map(params![rows::id_bytes(&root), PART_ROWS], |row| {
            Ok((row.get(0)?, row.get(1)?))
        })?
        .collect::<rusqlite::Result<_>>()?;
    for (entry, bytes) in entries {
        sql.delete_entry.execute([entry])?;
        if !budget.spend(bytes) {
            return Ok(DeleteProgress::More);
        }
    }
    let mut path = vec![root];
    while let Some(run) = path.last().copied() {
        let first_child = sql
            .find_child
            .query_map(params![rows::id_bytes(&run)], |row| rows::id(row, 0))?
            .next()
            .transpose()?;
        if let Some(child) = first_child {
            path.push(child);
            continue;
        }
        // Each in a step of its own: those of one run can be hundreds of megabytes.
        while let Some(bytes) = attachments::delete_one(sql, run)? {
            if !budget.spend(bytes) {
                return Ok(DeleteProgress::More);
            }
        }
        let bytes = delete_run(sql, cache, run)?;
        path.pop();
        if !budget.spend(bytes) && !path.is_empty() {
            return Ok(DeleteProgress::More);
        }
    }
    Ok(DeleteProgress::Done)
}

/// What a part may still take.
struct PartBudget {
    rows: u32,
    bytes: u64,
}

impl PartBudget {
    /// Takes a row with so many bytes; false where it was the last.
    fn spend(&mut self, bytes: i64) -> bool {
        self.rows = self.rows.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(rows::unsigned(bytes));
        self.rows > 0 && self.bytes > 0
    }
}

/// Removes a run without children and everything of its own; returns the bytes of its texts.
fn delete_run(
    sql: &mut Statements<'_>,
    cache: &mut DefinitionCache,
    id: RunId,
) -> rusqlite::Result<i64> {
    let run = rows::id_bytes(&id);
    let (labels, definition, bytes): (Option<String>, Option<Hash>, i64) =
        sql.run_contents.query_row(params![run], |row| {
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
        cache.clear();
    }
    Ok(bytes)
}

/// Removes a few definitions that nobody runs by, as far as the age of the oldest run tells; true where there may be
/// more.
pub fn delete_unused_definitions(
    sql: &mut Statements<'_>,
    cache: &mut DefinitionCache,
) -> rusqlite::Result<bool> {
    let oldest: Option<[u8; 16]> = sql.oldest_run.query_row([], |row| row.get(0))?;
    let unused_before = oldest.map_or(i64::MAX, |id| created_ms(RunId(uuid::Uuid::from_bytes(id))));
    let deleted = sql.delete_old_definitions.execute([unused_before])?;
    if deleted > 0 {
        cache.clear();
    }
    Ok(deleted > 0)
}

/// When a run was made, in milliseconds, as its id tells. Ids sort by it, so no run is older than the one that is first.
pub fn created_ms(run: RunId) -> i64 {
    let created = run.0.get_timestamp().map_or((0, 0), |time| time.to_unix());
    rows::signed(created.0.saturating_mul(1000) + u64::from(created.1 / 1_000_000))
}
