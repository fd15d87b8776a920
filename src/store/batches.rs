//! Batches of runs. A batch exists once [`BatchRecords::accept_batch`] has committed it; lines without a batch
//! are those of a request that ended early, and are removed by it or later.

use std::ops::ControlFlow;

use futures_util::future::BoxFuture;
use jiff::Timestamp;
use uuid::Uuid;

use crate::domain::batch::{Batch, BatchCounts, BatchId, BatchLine};
use crate::domain::run::{RunId, now};
use crate::store::StoreError;
use crate::store::changes::Changes;
use crate::store::encoding::clock_skew::first_id;
use crate::store::encoding::integers::signed;
use crate::store::engine::Engine;
use crate::store::reader::{ReadMode, Reader};
use crate::store::sql::row::{Row, StoreResult};
use crate::store::sql::value::{free_text, params, values};

pub trait BatchRecords: Send + Sync + 'static {
    /// Adds lines to a batch that is not accepted yet.
    fn add_batch_lines(
        &self,
        batch: BatchId,
        lines: Vec<BatchLine>,
    ) -> BoxFuture<'_, Result<(), StoreError>>;

    /// Makes a batch of the lines that were added. Returns false if its idempotency key has accepted another.
    fn accept_batch(
        &self,
        batch: Batch,
        key: Option<BatchKey>,
    ) -> BoxFuture<'_, Result<bool, StoreError>>;

    /// Removes the lines that were added to a batch, unless it was accepted.
    fn remove_unaccepted_lines(&self, batch: BatchId) -> BoxFuture<'_, Result<(), StoreError>>;

    fn batch(&self, id: BatchId) -> BoxFuture<'_, Result<Option<Batch>, StoreError>>;

    /// The batch that an idempotency key has accepted, until the key expires.
    fn batch_with_key(&self, key: BatchKey) -> BoxFuture<'_, Result<Option<Batch>, StoreError>>;

    /// A page of batches, newest first.
    fn batches(&self, query: BatchQuery) -> BoxFuture<'_, Result<Vec<Batch>, StoreError>>;

    /// The batches that have lines without a result, oldest first.
    fn unfinished_batches(&self) -> BoxFuture<'_, Result<Vec<Batch>, StoreError>>;

    fn batch_counts(&self, id: BatchId) -> BoxFuture<'_, Result<BatchCounts, StoreError>>;

    /// Lines in their order.
    fn batch_lines(&self, query: LineQuery) -> BoxFuture<'_, Result<Vec<BatchLine>, StoreError>>;

    fn change_batch(
        &self,
        id: BatchId,
        change: BatchChange,
    ) -> BoxFuture<'_, Result<(), StoreError>>;

    /// A page of the batches that ended before this time and of which the store has no run, oldest first.
    fn unused_batches(
        &self,
        before: Timestamp,
        after: Option<BatchId>,
    ) -> BoxFuture<'_, Result<UnusedBatches, StoreError>>;

    /// Removes a part of a batch that ended before this time and of which the store has no run. Returns true if there is more
    /// of it.
    fn trim_batch(&self, id: BatchId, before: Timestamp)
    -> BoxFuture<'_, Result<bool, StoreError>>;

    /// Removes the lines of batches whose ids were made before this time and that were not accepted.
    fn trim_unaccepted_lines(&self, before: Timestamp) -> BoxFuture<'_, Result<(), StoreError>>;
}

/// Ended batches that one page of [`BatchRecords::unused_batches`] reads: the lines of each may be searched.
pub const PAGE_ENDED_BATCHES: usize = 16;
/// Lines that [`BatchRecords::trim_batch`] removes at once.
pub const MAX_TRIMMED_LINES: u32 = 1_000;

/// A page of batches that can be removed.
#[derive(Clone, Debug, Default)]
pub struct UnusedBatches {
    pub ids: Vec<BatchId>,
    /// The cursor of the next page; `None` if this is the last.
    pub next: Option<BatchId>,
}

/// An idempotency key; unique for an owner and an agent.
#[derive(Clone, Debug)]
pub struct BatchKey {
    pub owner: Option<String>,
    pub agent: String,
    pub key: String,
    pub expires_at: Timestamp,
}

#[derive(Clone, Debug)]
pub struct BatchQuery {
    /// Only batches of this key.
    pub owner: Option<String>,
    /// Only batches that were created before this one (the cursor).
    pub before: Option<BatchId>,
    pub limit: usize,
}

#[derive(Clone, Copy, Debug)]
pub struct LineQuery {
    pub batch: BatchId,
    /// The first line, counted from 0.
    pub from: u32,
    pub limit: usize,
    /// Only lines that have no result: no run, or one that has not ended.
    pub only_open: bool,
}

#[derive(Clone, Debug)]
pub enum BatchChange {
    /// A run has started for a line.
    Started { index: u32, run: RunId },
    /// No run can start for a line.
    Rejected { index: u32, problem: String },
    /// No more runs start. The first reason stays.
    Cancel { reason: String },
    /// Each line has its result.
    Finish { at: Timestamp },
}

/// Bytes of texts in one answer of lines: it ends with the line that reaches them.
const PAGE_BYTES: usize = 4 << 20;

/// Selects batches for [`batch`].
macro_rules! select {
    ($rest:literal) => {
        concat!(
            "SELECT id, agent, owner, lines, created_at, finished_at, cancel_reason, body_hash FROM batches ",
            $rest
        )
    };
}

const FIND: &str = select!("WHERE id = :id");
const FIND_BY_KEY: &str =
    select!("WHERE key_owner = :owner AND agent = :agent AND key = :key AND key_expires > :now");
const LIST: &str = select!(
    "WHERE (:owner::text IS NULL OR owner = :owner) AND (:before::uuid IS NULL OR id < :before) \
     ORDER BY id DESC LIMIT :limit"
);
const UNFINISHED: &str = select!("WHERE finished_at IS NULL ORDER BY id");
/// A page of ended batches, and whether they have no run.
const ENDED: &str = "SELECT b.id, NOT EXISTS (SELECT 1 FROM batch_lines l JOIN runs r ON r.id = l.run WHERE l.batch = b.id) \
     AS is_unused FROM batches b WHERE b.finished_at < :before AND b.id > :after ORDER BY b.id LIMIT :limit";
const COUNTS: &str = "SELECT CASE WHEN l.problem IS NOT NULL THEN 'rejected' WHEN l.run IS NULL THEN 'pending' \
     ELSE coalesce(r.status, 'deleted') END AS state, count(*) AS count \
     FROM batch_lines l LEFT JOIN runs r ON r.id = l.run WHERE l.batch = :batch GROUP BY state";
/// SQLite's reader stops by itself at the line that reaches so many bytes.
const LINES: &str = "{|SELECT p.line, p.body, p.run, p.problem FROM (SELECT l.*, sum(coalesce(octet_length(l.body), 0)) \
     OVER (ORDER BY l.line ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS bytes_before FROM (}\
     SELECT line, body, run, problem FROM batch_lines WHERE batch = :batch AND line >= :start \
     AND (NOT :only_open OR (problem IS NULL AND (run IS NULL \
     OR EXISTS (SELECT 1 FROM runs r WHERE r.id = run AND r.finished_at IS NULL)))) ORDER BY line LIMIT :limit\
     {|) l) p WHERE coalesce(p.bytes_before, 0) < :bytes ORDER BY p.line}";

const INSERT_LINE: &str =
    "INSERT INTO batch_lines (batch, line, body, problem) VALUES (:batch, :line, :body, :problem)";
const FORGET_KEY: &str = "UPDATE batches SET key_owner = NULL, key = NULL \
     WHERE key_owner = :owner AND agent = :agent AND key = :key AND key_expires <= :now";
/// Inserts nothing if the key has accepted another batch.
const INSERT: &str = "INSERT INTO batches (id, agent, owner, lines, created_at, body_hash, key_owner, key, key_expires) \
     VALUES (:id, :agent, :owner, :lines, :created_at, :body_hash, :key_owner, :key, :key_expires) \
     ON CONFLICT (key_owner, agent, key) WHERE key IS NOT NULL DO NOTHING";
const START_LINE: &str =
    "UPDATE batch_lines SET run = :run, body = NULL WHERE batch = :batch AND line = :line";
const REJECT_LINE: &str = "UPDATE batch_lines SET problem = :problem, body = NULL \
     WHERE batch = :batch AND line = :line AND run IS NULL";
const CANCEL: &str = "UPDATE batches SET cancel_reason = coalesce(cancel_reason, :reason) \
     WHERE id = :batch AND finished_at IS NULL";
const FINISH: &str =
    "UPDATE batches SET finished_at = coalesce(finished_at, :at) WHERE id = :batch";
/// Removes some lines of an ended batch that has no run.
const DELETE_LINES: &str = "DELETE FROM batch_lines WHERE batch = :batch AND line {IN|= ANY (ARRAY}\
     (SELECT l.line FROM batch_lines l WHERE l.batch = :batch ORDER BY l.line LIMIT :limit){|)} \
     AND EXISTS (SELECT 1 FROM batches b WHERE b.id = :batch AND b.finished_at < :before) \
     AND NOT EXISTS (SELECT 1 FROM batch_lines l JOIN runs r ON r.id = l.run WHERE l.batch = :batch)";
/// Removes an ended batch that has no line any more.
const DELETE: &str = "DELETE FROM batches WHERE id = :batch AND finished_at < :before \
     AND NOT EXISTS (SELECT 1 FROM batch_lines l WHERE l.batch = :batch)";
const DELETE_UNACCEPTED: &str = "DELETE FROM batch_lines WHERE batch = :batch \
     AND NOT EXISTS (SELECT 1 FROM batches b WHERE b.id = :batch)";
/// Looks at one line of each batch.
const DELETE_OLD_UNACCEPTED: &str = "WITH RECURSIVE ids (id) AS (SELECT (SELECT l.batch FROM batch_lines l ORDER BY l.batch LIMIT 1) UNION ALL \
     SELECT (SELECT l.batch FROM batch_lines l WHERE l.batch > ids.id ORDER BY l.batch LIMIT 1) FROM ids WHERE ids.id < :before) \
     DELETE FROM batch_lines WHERE batch {IN|= ANY (ARRAY}(SELECT ids.id FROM ids WHERE ids.id < :before \
     AND NOT EXISTS (SELECT 1 FROM batches b WHERE b.id = ids.id)){|)}";

impl<E: Engine> BatchRecords for E {
    fn add_batch_lines(
        &self,
        batch: BatchId,
        lines: Vec<BatchLine>,
    ) -> BoxFuture<'_, Result<(), StoreError>> {
        let add = |changes: Changes, line: BatchLine| {
            let line = values! {
                ":batch": batch.0, ":line": line.index, ":body": line.body.map(free_text),
                ":problem": line.problem.map(free_text),
            };
            changes.and(INSERT_LINE, line)
        };
        self.apply(lines.into_iter().fold(Changes::default(), add))
    }

    fn accept_batch(
        &self,
        batch: Batch,
        key: Option<BatchKey>,
    ) -> BoxFuture<'_, Result<bool, StoreError>> {
        let mut changes = Changes::default();
        if let Some(key) = &key {
            let owner = key.owner.clone().unwrap_or_default();
            let of_key = values! {
                ":owner": owner, ":agent": key.agent.clone(), ":key": free_text(key.key.clone()),
                ":now": now().as_millisecond(),
            };
            changes = changes.and(FORGET_KEY, of_key);
        }
        let insert = values! {
            ":id": batch.id.0,
            ":agent": batch.agent,
            ":owner": batch.owner,
            ":lines": signed(batch.lines),
            ":created_at": batch.created_at.as_millisecond(),
            ":body_hash": batch.body_hash,
            ":key_owner": key.as_ref().map(|key| key.owner.clone().unwrap_or_default()),
            ":key_expires": key.as_ref().map(|key| key.expires_at.as_millisecond()),
            ":key": key.map(|key| free_text(key.key)),
        };
        let changes = changes.and(INSERT, insert);
        let last = changes.statements.len() - 1;
        self.changes_row(changes, last)
    }

    fn remove_unaccepted_lines(&self, batch: BatchId) -> BoxFuture<'_, Result<(), StoreError>> {
        let delete = Changes::one(DELETE_UNACCEPTED, values! {":batch": batch.0});
        self.apply(delete.freeing_space())
    }

    fn batch(&self, id: BatchId) -> BoxFuture<'_, Result<Option<Batch>, StoreError>> {
        self.read(ReadMode::Statement, move |db| {
            Box::pin(async move { db.first(FIND, params! {":id": id.0}, batch).await })
        })
    }

    fn batch_with_key(&self, key: BatchKey) -> BoxFuture<'_, Result<Option<Batch>, StoreError>> {
        self.read(ReadMode::Statement, move |db| {
            Box::pin(async move {
                let params = params! {
                    ":owner": key.owner.as_deref().unwrap_or_default(), ":agent": &key.agent,
                    ":key": free_text(&key.key), ":now": now().as_millisecond(),
                };
                db.first(FIND_BY_KEY, params, batch).await
            })
        })
    }

    fn batches(&self, query: BatchQuery) -> BoxFuture<'_, Result<Vec<Batch>, StoreError>> {
        self.read(ReadMode::Statement, move |db| {
            Box::pin(async move {
                let params = params! {
                    ":owner": query.owner.as_ref(), ":before": query.before.map(|id| id.0),
                    ":limit": signed(query.limit as u64),
                };
                db.query(LIST, params, batch).await
            })
        })
    }

    fn unfinished_batches(&self) -> BoxFuture<'_, Result<Vec<Batch>, StoreError>> {
        self.read(ReadMode::Statement, |db| {
            Box::pin(db.query(UNFINISHED, &[], batch))
        })
    }

    fn batch_counts(&self, id: BatchId) -> BoxFuture<'_, Result<BatchCounts, StoreError>> {
        self.read(ReadMode::Statement, move |db| Box::pin(counts(db, id)))
    }

    fn batch_lines(&self, query: LineQuery) -> BoxFuture<'_, Result<Vec<BatchLine>, StoreError>> {
        self.read(ReadMode::Statement, move |db| Box::pin(lines(db, query)))
    }

    fn change_batch(
        &self,
        id: BatchId,
        change: BatchChange,
    ) -> BoxFuture<'_, Result<(), StoreError>> {
        let batch = id.0;
        self.apply(match change {
            BatchChange::Started { index, run } => Changes::one(
                START_LINE,
                values! {":batch": batch, ":line": index, ":run": run},
            ),
            BatchChange::Rejected { index, problem } => Changes::one(
                REJECT_LINE,
                values! {":batch": batch, ":line": index, ":problem": free_text(problem)},
            ),
            BatchChange::Cancel { reason } => Changes::one(
                CANCEL,
                values! {":batch": batch, ":reason": free_text(reason)},
            ),
            BatchChange::Finish { at } => Changes::one(
                FINISH,
                values! {":batch": batch, ":at": at.as_millisecond()},
            ),
        })
    }

    fn unused_batches(
        &self,
        before: Timestamp,
        after: Option<BatchId>,
    ) -> BoxFuture<'_, Result<UnusedBatches, StoreError>> {
        self.read(ReadMode::Statement, move |db| {
            Box::pin(unused(db, before, after))
        })
    }

    fn trim_batch(
        &self,
        id: BatchId,
        before: Timestamp,
    ) -> BoxFuture<'_, Result<bool, StoreError>> {
        let before = before.as_millisecond();
        let lines = values! {":batch": id.0, ":before": before, ":limit": MAX_TRIMMED_LINES};
        let changes = Changes::one(DELETE_LINES, lines)
            .and(DELETE, values! {":batch": id.0, ":before": before})
            .freeing_space();
        Box::pin(async move {
            let removed = self.commit(changes).await?;
            // The batch is removed after its last line.
            Ok(matches!(removed[..], [lines, 0] if lines > 0))
        })
    }

    fn trim_unaccepted_lines(&self, before: Timestamp) -> BoxFuture<'_, Result<(), StoreError>> {
        let before = values! {":before": first_id(before)};
        self.apply(Changes::one(DELETE_OLD_UNACCEPTED, before).freeing_space())
    }
}

/// Reads a page of ended batches and returns those that have no run.
async fn unused(
    db: &Reader,
    before: Timestamp,
    after: Option<BatchId>,
) -> StoreResult<UnusedBatches> {
    let params = params! {
        ":before": before.as_millisecond(),
        ":after": after.map_or(Uuid::nil(), |id| id.0),
        ":limit": signed(PAGE_ENDED_BATCHES as u64),
    };
    let ended = |row: &Row<'_>| Ok((BatchId(row.get("id")?), row.get("is_unused")?));
    let found: Vec<(BatchId, bool)> = db.query(ENDED, params, ended).await?;
    let last = found.last().map(|(id, _)| *id);
    Ok(UnusedBatches {
        next: last.filter(|_| found.len() == PAGE_ENDED_BATCHES),
        ids: found
            .into_iter()
            .filter_map(|(id, is_unused)| is_unused.then_some(id))
            .collect(),
    })
}

async fn counts(db: &Reader, id: BatchId) -> StoreResult<BatchCounts> {
    let mut counts = BatchCounts::default();
    let add = |row: &Row<'_>| {
        let field = match row.get("state")? {
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
        *field += row.get::<u64>("count")?;
        Ok(())
    };
    db.query(COUNTS, params! {":batch": id.0}, add).await?;
    Ok(counts)
}

async fn lines(db: &Reader, query: LineQuery) -> StoreResult<Vec<BatchLine>> {
    let params = params! {
        ":batch": query.batch.0, ":start": query.from, ":only_open": query.only_open,
        ":limit": signed(query.limit as u64), ":bytes": signed(PAGE_BYTES as u64),
    };
    let (mut lines, mut bytes) = (Vec::new(), 0);
    let add = |row: &Row<'_>| {
        let line = BatchLine {
            index: row.get("line")?,
            body: row.get("body")?,
            run: row.get("run")?,
            problem: row.get("problem")?,
        };
        bytes += line.body.as_ref().map_or(0, String::len);
        lines.push(line);
        Ok(match bytes >= PAGE_BYTES {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        })
    };
    db.for_each(LINES, params, add).await?;
    Ok(lines)
}

fn batch(row: &Row<'_>) -> StoreResult<Batch> {
    Ok(Batch {
        id: BatchId(row.get("id")?),
        agent: row.get("agent")?,
        owner: row.get("owner")?,
        lines: row.get("lines")?,
        created_at: row.get("created_at")?,
        finished_at: row.get("finished_at")?,
        cancel_reason: row.get("cancel_reason")?,
        body_hash: row.get("body_hash")?,
    })
}
