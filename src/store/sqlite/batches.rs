//! Batches of runs and their lines.

use jiff::Timestamp;
use rusqlite::{Connection, OptionalExtension, Row, named_params};

use crate::domain::batch::{Batch, BatchCounts, BatchId, BatchLine};
use crate::domain::run::{RunId, now};
use crate::store::StoreError;
use crate::store::batches::{
    BatchChange, BatchKey, BatchQuery, LineQuery, MAX_TRIMMED_LINES, PAGE_ENDED_BATCHES,
    UnusedBatches,
};
use crate::store::encoding::clock_skew::first_id;
use crate::store::encoding::integers;
use crate::store::sqlite::error::store_error;
use crate::store::sqlite::rows;
use crate::store::sqlite::statements::Statements;

const COLUMNS: &str = "id, agent, owner, lines, created_at, finished_at, cancel_reason, body_hash";

/// Bytes of texts in one answer of lines.
const PAGE_BYTES: usize = 4 << 20;

fn batch(row: &Row<'_>) -> rusqlite::Result<Batch> {
    let lines: i64 = row.get("lines")?;
    Ok(Batch {
        id: BatchId(rows::id(row, "id")?.0),
        agent: row.get("agent")?,
        owner: row.get("owner")?,
        lines: integers::unsigned(lines),
        created_at: rows::time(row, "created_at")?.unwrap_or_default(),
        finished_at: rows::time(row, "finished_at")?,
        cancel_reason: row.get("cancel_reason")?,
        body_hash: row.get("body_hash")?,
    })
}

pub fn find(db: &Connection, id: BatchId) -> Result<Option<Batch>, StoreError> {
    let sql = format!("SELECT {COLUMNS} FROM batches WHERE id = :id");
    let read = || {
        let mut sql = db.prepare_cached(&sql)?;
        sql.query_row(named_params! {":id": id.0.as_bytes()}, batch)
            .optional()
    };
    read().map_err(store_error)
}

pub fn find_by_key(db: &Connection, key: &BatchKey) -> Result<Option<Batch>, StoreError> {
    let sql = format!(
        "SELECT {COLUMNS} FROM batches WHERE key_owner = :owner AND agent = :agent AND key = :key AND key_expires > :now"
    );
    let read = || {
        let mut sql = db.prepare_cached(&sql)?;
        let params = named_params! {
            ":owner": key.owner.as_deref().unwrap_or_default(), ":agent": key.agent, ":key": key.key,
            ":now": now().as_millisecond(),
        };
        sql.query_row(params, batch).optional()
    };
    read().map_err(store_error)
}

pub fn list(db: &Connection, query: &BatchQuery) -> Result<Vec<Batch>, StoreError> {
    let sql = format!(
        "SELECT {COLUMNS} FROM batches WHERE (:owner IS NULL OR owner = :owner) AND (:before IS NULL OR id < :before) \
         ORDER BY id DESC LIMIT :limit"
    );
    let read = || {
        let mut sql = db.prepare_cached(&sql)?;
        let params = named_params! {
            ":owner": query.owner, ":before": query.before.as_ref().map(|it| it.0.as_bytes()),
            ":limit": integers::signed(query.limit as u64),
        };
        sql.query_map(params, batch)?
            .collect::<rusqlite::Result<_>>()
    };
    read().map_err(store_error)
}

pub fn unfinished(db: &Connection) -> Result<Vec<Batch>, StoreError> {
    let sql = format!("SELECT {COLUMNS} FROM batches WHERE finished_at IS NULL ORDER BY id");
    let read = || {
        let mut sql = db.prepare_cached(&sql)?;
        sql.query_map([], batch)?.collect::<rusqlite::Result<_>>()
    };
    read().map_err(store_error)
}

/// Reads a page of ended batches and returns those that have no run.
pub fn unused(
    db: &Connection,
    before: Timestamp,
    after: Option<BatchId>,
) -> Result<UnusedBatches, StoreError> {
    let after = after.map_or([0; 16], |id| *id.0.as_bytes());
    let read = || {
        let mut sql = db.prepare_cached(
            "SELECT b.id, NOT EXISTS (SELECT 1 FROM batch_lines l JOIN runs r ON r.id = l.run WHERE l.batch = b.id) \
             AS is_unused FROM batches b WHERE b.finished_at < :before AND b.id > :after ORDER BY b.id LIMIT :limit",
        )?;
        let mut found = sql.query(named_params! {
            ":before": before.as_millisecond(), ":after": after,
            ":limit": integers::signed(PAGE_ENDED_BATCHES as u64),
        })?;
        let (mut ids, mut last, mut count) = (Vec::new(), None, 0);
        while let Some(row) = found.next()? {
            let id = BatchId(rows::id(row, "id")?.0);
            if row.get::<_, bool>("is_unused")? {
                ids.push(id);
            }
            last = Some(id);
            count += 1;
        }
        let next = last.filter(|_| count == PAGE_ENDED_BATCHES);
        Ok(UnusedBatches { ids, next })
    };
    read().map_err(store_error)
}

pub fn counts(db: &Connection, id: BatchId) -> Result<BatchCounts, StoreError> {
    let read = || {
        let mut counts = BatchCounts::default();
        let mut sql = db.prepare_cached(
            "SELECT CASE WHEN l.problem IS NOT NULL THEN 'rejected' WHEN l.run IS NULL THEN 'pending' \
             ELSE coalesce(r.status, 'deleted') END AS state, count(*) AS count \
             FROM batch_lines l LEFT JOIN runs r ON r.id = l.run WHERE l.batch = :id GROUP BY state",
        )?;
        let mut found = sql.query(named_params! {":id": id.0.as_bytes()})?;
        while let Some(row) = found.next()? {
            let state: String = row.get("state")?;
            let count = integers::unsigned(row.get("count")?);
            let field = match state.as_str() {
                "pending" => &mut counts.pending,
                "queued" => &mut counts.queued,
                "running" => &mut counts.running,
                "waiting" => &mut counts.waiting,
                "cancelling" => &mut counts.cancelling,
                "completed" => &mut counts.completed,
                "failed" => &mut counts.failed,
                "cancelled" => &mut counts.cancelled,
                "rejected" => &mut counts.rejected,
                _ => &mut counts.deleted,
            };
            *field += count;
        }
        Ok(counts)
    };
    read().map_err(store_error)
}

pub fn lines(db: &Connection, query: LineQuery) -> Result<Vec<BatchLine>, StoreError> {
    let read = || {
        let mut sql = db.prepare_cached(
            "SELECT line, body, run, problem FROM batch_lines WHERE batch = :batch AND line >= :start \
             AND (NOT :only_open OR (problem IS NULL AND (run IS NULL \
             OR EXISTS (SELECT 1 FROM runs r WHERE r.id = run AND r.finished_at IS NULL)))) ORDER BY line LIMIT :limit",
        )?;
        let mut found = sql.query(named_params! {
            ":batch": query.batch.0.as_bytes(), ":start": query.from, ":only_open": query.only_open,
            ":limit": integers::signed(query.limit as u64),
        })?;
        let (mut lines, mut bytes) = (Vec::new(), 0);
        while let Some(row) = found.next()? {
            let line = line(row)?;
            bytes += line.body.as_ref().map_or(0, String::len);
            lines.push(line);
            if bytes >= PAGE_BYTES {
                break;
            }
        }
        Ok(lines)
    };
    read().map_err(store_error)
}

fn line(row: &Row<'_>) -> rusqlite::Result<BatchLine> {
    let run: Option<[u8; 16]> = row.get("run")?;
    Ok(BatchLine {
        index: row.get("line")?,
        body: row.get("body")?,
        run: run.map(|bytes| RunId(uuid::Uuid::from_bytes(bytes))),
        problem: row.get("problem")?,
    })
}

pub fn add_lines(
    sql: &mut Statements<'_>,
    id: BatchId,
    lines: &[BatchLine],
) -> rusqlite::Result<()> {
    for line in lines {
        sql.insert_batch_line.execute(named_params! {
            ":batch": id.0.as_bytes(), ":line": line.index, ":body": line.body, ":problem": line.problem,
        })?;
    }
    Ok(())
}

/// Removes the lines of a batch that is not accepted.
pub fn remove_unaccepted(sql: &mut Statements<'_>, id: BatchId) -> rusqlite::Result<()> {
    sql.delete_lines_without_batch
        .execute(named_params! {":batch": id.0.as_bytes()})
        .map(drop)
}

/// Returns false if the key has accepted another batch.
pub fn accept(
    sql: &mut Statements<'_>,
    batch: &Batch,
    key: Option<&BatchKey>,
) -> rusqlite::Result<bool> {
    if let Some(key) = key {
        let owner = key.owner.as_deref().unwrap_or_default();
        let now = now().as_millisecond();
        sql.forget_batch_key.execute(named_params! {
            ":owner": owner, ":agent": key.agent, ":key": key.key, ":now": now,
        })?;
        let params = named_params! {":owner": owner, ":agent": key.agent, ":key": key.key};
        if sql.has_batch_key.exists(params)? {
            return Ok(false);
        }
    }
    sql.insert_batch.execute(named_params! {
        ":id": batch.id.0.as_bytes(), ":agent": batch.agent, ":owner": batch.owner, ":lines": integers::signed(batch.lines),
        ":created_at": batch.created_at.as_millisecond(), ":body_hash": batch.body_hash,
        ":key_owner": key.map(|key| key.owner.as_deref().unwrap_or_default()),
        ":key": key.map(|key| key.key.as_str()),
        ":key_expires": key.map(|key| key.expires_at.as_millisecond()),
    })?;
    Ok(true)
}

pub fn change(sql: &mut Statements<'_>, id: BatchId, change: &BatchChange) -> rusqlite::Result<()> {
    let id = id.0.as_bytes();
    let changed = match change {
        BatchChange::Started { index, run } => sql.start_batch_line.execute(named_params! {
            ":batch": id, ":line": index, ":run": rows::id_bytes(run),
        }),
        BatchChange::Rejected { index, problem } => sql.reject_batch_line.execute(named_params! {
            ":batch": id, ":line": index, ":problem": problem,
        }),
        BatchChange::Cancel { reason } => sql
            .cancel_batch
            .execute(named_params! {":id": id, ":reason": reason}),
        BatchChange::Finish { at } => sql
            .finish_batch
            .execute(named_params! {":id": id, ":at": at.as_millisecond()}),
    };
    changed.map(drop)
}

/// Removes some lines of a batch that is not needed any more, and the batch after its last line; returns true if there is more.
pub fn trim(sql: &mut Statements<'_>, id: BatchId, before: Timestamp) -> rusqlite::Result<bool> {
    let (id, before) = (id.0.as_bytes(), before.as_millisecond());
    let lines = sql.delete_batch_lines.execute(named_params! {
        ":batch": id, ":before": before, ":limit": MAX_TRIMMED_LINES,
    })?;
    let batches = sql
        .delete_batch
        .execute(named_params! {":batch": id, ":before": before})?;
    Ok(lines > 0 && batches == 0)
}

pub fn trim_unaccepted(sql: &mut Statements<'_>, before: Timestamp) -> rusqlite::Result<()> {
    sql.delete_unaccepted_lines
        .execute(named_params! {":before": first_id(before).as_bytes()})
        .map(drop)
}
