//! Reads batches of runs and their lines.

use jiff::Timestamp;
use tokio_postgres::Row;
use uuid::Uuid;

use crate::domain::batch::{Batch, BatchCounts, BatchId, BatchLine};
use crate::domain::run::now;
use crate::store::batches::{BatchKey, BatchQuery, LineQuery, PAGE_ENDED_BATCHES, UnusedBatches};
use crate::store::encoding::integers::signed;
use crate::store::postgres::rows::{self, StoreResult};
use crate::store::reader::Reader;
use crate::store::sql::value::{free_text, params};

const COLUMNS: &str = "id, agent, owner, lines, created_at, finished_at, cancel_reason, body_hash";
/// Bytes of texts in one answer of lines: it ends with the line that reaches them.
const PAGE_BYTES: i64 = 4 << 20;

const COUNTS: &str = "SELECT CASE WHEN l.problem IS NOT NULL THEN 'rejected' WHEN l.run IS NULL THEN 'pending' \
     ELSE coalesce(r.status, 'deleted') END AS state, count(*) AS count \
     FROM batch_lines l LEFT JOIN runs r ON r.id = l.run WHERE l.batch = :batch GROUP BY state";
const LINES: &str = "SELECT p.line, p.body, p.run, p.problem FROM (SELECT l.*, sum(coalesce(octet_length(l.body), 0)) \
     OVER (ORDER BY l.line ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS bytes_before FROM \
     (SELECT line, body, run, problem FROM batch_lines WHERE batch = :batch AND line >= :start \
     AND (NOT :only_open OR (problem IS NULL AND (run IS NULL \
     OR EXISTS (SELECT 1 FROM runs r WHERE r.id = run AND r.finished_at IS NULL)))) ORDER BY line LIMIT :limit) l) p \
     WHERE coalesce(p.bytes_before, 0) < :bytes ORDER BY p.line";

/// A page of ended batches, and whether they have no run.
const ENDED: &str = "SELECT b.id, NOT EXISTS (SELECT 1 FROM batch_lines l JOIN runs r ON r.id = l.run WHERE l.batch = b.id) \
     AS is_unused FROM batches b WHERE b.finished_at < :before AND b.id > :after ORDER BY b.id LIMIT :limit";

pub async fn find(db: &Reader, id: BatchId) -> StoreResult<Option<Batch>> {
    let sql = format!("SELECT {COLUMNS} FROM batches WHERE id = :id");
    let found = db.row(&sql, params! {":id": id.0}).await?;
    found.as_ref().map(batch).transpose()
}

pub async fn find_by_key(db: &Reader, key: &BatchKey) -> StoreResult<Option<Batch>> {
    let sql = format!(
        "SELECT {COLUMNS} FROM batches WHERE key_owner = :owner AND agent = :agent AND key = :key AND key_expires > :now"
    );
    let params = params! {
        ":owner": key.owner.as_deref().unwrap_or_default(),
        ":agent": &key.agent,
        ":key": free_text(&key.key),
        ":now": now().as_millisecond(),
    };
    let found = db.row(&sql, params).await?;
    found.as_ref().map(batch).transpose()
}

pub async fn list(db: &Reader, query: &BatchQuery) -> StoreResult<Vec<Batch>> {
    let sql = format!(
        "SELECT {COLUMNS} FROM batches WHERE (:owner::text IS NULL OR owner = :owner) AND (:before::uuid IS NULL OR id < :before) \
         ORDER BY id DESC LIMIT :limit"
    );
    let params = params! {
        ":owner": query.owner.as_ref(),
        ":before": query.before.map(|id| id.0),
        ":limit": signed(query.limit as u64),
    };
    let found = db.rows(&sql, params).await?;
    found.iter().map(batch).collect()
}

pub async fn unfinished(db: &Reader) -> StoreResult<Vec<Batch>> {
    let sql = format!("SELECT {COLUMNS} FROM batches WHERE finished_at IS NULL ORDER BY id");
    db.rows(&sql, &[]).await?.iter().map(batch).collect()
}

/// Reads a page of ended batches and returns those that have no run.
pub async fn unused(
    db: &Reader,
    before: Timestamp,
    after: Option<BatchId>,
) -> StoreResult<UnusedBatches> {
    let params = params! {
        ":before": before.as_millisecond(),
        ":after": after.map_or(Uuid::nil(), |id| id.0),
        ":limit": signed(PAGE_ENDED_BATCHES as u64),
    };
    let found = db.rows(ENDED, params).await?;
    let mut page = UnusedBatches::default();
    for row in &found {
        let id = BatchId(rows::get(row, "id")?);
        if rows::get::<bool>(row, "is_unused")? {
            page.ids.push(id);
        }
        if found.len() == PAGE_ENDED_BATCHES {
            page.next = Some(id);
        }
    }
    Ok(page)
}

pub async fn counts(db: &Reader, id: BatchId) -> StoreResult<BatchCounts> {
    let mut counts = BatchCounts::default();
    for row in db.rows(COUNTS, params! {":batch": id.0}).await? {
        let field = match rows::str(&row, "state")?.unwrap_or_default() {
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
        *field += rows::count(&row, "count")?;
    }
    Ok(counts)
}

pub async fn lines(db: &Reader, query: LineQuery) -> StoreResult<Vec<BatchLine>> {
    let params = params! {
        ":batch": query.batch.0,
        ":start": query.from,
        ":only_open": query.only_open,
        ":limit": signed(query.limit as u64),
        ":bytes": PAGE_BYTES,
    };
    let found = db.rows(LINES, params).await?;
    found.iter().map(line).collect()
}

fn batch(row: &Row) -> StoreResult<Batch> {
    Ok(Batch {
        id: BatchId(rows::get(row, "id")?),
        agent: rows::required_text(row, "agent")?,
        owner: rows::text(row, "owner")?,
        lines: rows::count(row, "lines")?,
        created_at: rows::time(row, "created_at")?.unwrap_or_default(),
        finished_at: rows::time(row, "finished_at")?,
        cancel_reason: rows::text(row, "cancel_reason")?,
        body_hash: rows::hash(row, "body_hash")?.unwrap_or_default(),
    })
}

fn line(row: &Row) -> StoreResult<BatchLine> {
    Ok(BatchLine {
        index: rows::small(row, "line")?,
        body: rows::text(row, "body")?,
        run: rows::optional_id(row, "run")?,
        problem: rows::text(row, "problem")?,
    })
}
