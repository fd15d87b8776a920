//! Removes trees and definitions, a small part in one transaction, so that no run waits long.

use rusqlite::{Connection, Row, named_params};

use crate::domain::run::RunId;
use crate::store::encoding::definition_cache::DefinitionCache;
use crate::store::encoding::{clock_skew, integers, run_values};
use crate::store::sqlite::attachments;
use crate::store::sqlite::rows;
use crate::store::sqlite::statements::Statements;
use crate::store::write_queue::deletions::Deletions;

/// Largest number of entries and runs of one part.
const PART_ROWS: u32 = 128;
/// A part ends when it has removed texts of this many bytes.
pub const PART_BYTES: usize = 1 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeleteProgress {
    /// The tree is removed.
    Done,
    /// The tree has another part.
    More,
}

/// Reads the roots that are marked in the table.
pub fn load_deletions(db: &Connection) -> rusqlite::Result<Deletions> {
    let roots = db
        .prepare("SELECT root FROM deletions")?
        .query_map([], |row| rows::id(row, "root"))?
        .collect::<rusqlite::Result<_>>()?;
    Ok(Deletions::new(roots))
}

/// Removes a part of a tree: first its log, from the end, so that no reader sees a gap; then its runs from the leaves up, so
/// that after a crash the remaining runs are still reachable from the root.
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
        .query(named_params! {":root": rows::id_bytes(&root), ":limit": PART_ROWS})?
        .mapped(|row| Ok((row.get("id")?, row.get("bytes")?)))
        .collect::<rusqlite::Result<_>>()?;
    for (entry, bytes) in entries {
        sql.delete_entry.execute(named_params! {":id": entry})?;
        if !budget.spend(bytes) {
            return Ok(DeleteProgress::More);
        }
    }
    let mut path = vec![root];
    while let Some(run) = path.last().copied() {
        let first_child = sql
            .find_child
            .query_row(named_params! {":parent": rows::id_bytes(&run)}, |row| {
                rows::id(row, "id")
            })?;
        if let Some(child) = first_child {
            path.push(child);
            continue;
        }
        // One by one: the attachments of a run can be hundreds of megabytes.
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

/// What a part may still remove.
struct PartBudget {
    rows: u32,
    bytes: u64,
}

impl PartBudget {
    /// Counts a row with this many bytes; false if it was the last of the part.
    fn spend(&mut self, bytes: i64) -> bool {
        self.rows = self.rows.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(integers::unsigned(bytes));
        self.rows > 0 && self.bytes > 0
    }
}

/// Removes a run without children, and all that belongs to it. Returns the number of bytes of its texts.
fn delete_run(
    sql: &mut Statements<'_>,
    cache: &mut DefinitionCache,
    id: RunId,
) -> rusqlite::Result<i64> {
    let run = rows::id_bytes(&id);
    let contents = sql
        .run_contents
        .query_row(named_params! {":id": run}, RunContents::read)?
        .ok_or(rusqlite::Error::QueryReturnedNoRows)?;
    for (key, value) in run_values::labels(contents.labels.as_deref()) {
        sql.delete_label
            .execute(named_params! {":key": key, ":value": value, ":run": run})?;
    }
    sql.delete_claims.execute(named_params! {":run": run})?;
    sql.delete_deliveries.execute(named_params! {":run": run})?;
    sql.delete_push_configs
        .execute(named_params! {":run": run})?;
    sql.delete_text.execute(named_params! {":run": run})?;
    sql.delete_inputs.execute(named_params! {":run": run})?;
    sql.delete_scores.execute(named_params! {":run": run})?;
    sql.delete_scorings.execute(named_params! {":run": run})?;
    sql.delete_run.execute(named_params! {":run": run})?;
    let own = sql
        .delete_own_definitions
        .execute(named_params! {":run": run})?;
    if own > 0 {
        cache.clear();
    }
    Ok(contents.bytes)
}

/// What is removed with a run.
struct RunContents {
    labels: Option<String>,
    bytes: i64,
}

impl RunContents {
    fn read(row: &Row<'_>) -> rusqlite::Result<Self> {
        Ok(Self {
            labels: row.get("labels")?,
            bytes: row.get("bytes")?,
        })
    }
}

/// Removes a few definitions that were last used before the oldest run was accepted. Returns true if there may be more.
pub fn delete_unused_definitions(
    sql: &mut Statements<'_>,
    cache: &mut DefinitionCache,
) -> rusqlite::Result<bool> {
    let oldest: Option<Option<[u8; 16]>> = sql.oldest_run.query_row(&[], |row| row.get("id"))?;
    let oldest = oldest.flatten();
    let unused_before = oldest.map_or(i64::MAX, |id| {
        clock_skew::created_ms(RunId(uuid::Uuid::from_bytes(id)))
    });
    let deleted = sql
        .delete_old_definitions
        .execute(named_params! {":unused_before": unused_before})?;
    if deleted > 0 {
        cache.clear();
    }
    Ok(deleted > 0)
}
