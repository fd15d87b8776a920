//! Removes runs, and finds the ones that are old.

use std::collections::HashSet;

use futures_util::future::BoxFuture;
use jiff::Timestamp;
use uuid::Uuid;

use crate::domain::run::{RunId, Status, now};
use crate::store::StoreError;
use crate::store::encoding::clock_skew::created_ms;
use crate::store::encoding::integers::signed;
use crate::store::engine::Engine;
use crate::store::reader::{ReadMode, Reader};
use crate::store::sql::row::{Row, StoreResult};
use crate::store::sql::value::params;
use crate::store::write_queue::job::Task;

pub trait RunRetention: Send + Sync + 'static {
    /// Removes a root with its tree, its events, its deliveries and its idempotency keys. Returns false if there is no such
    /// root. The tree is hidden at once. A large one is removed in parts, between other writes and across restarts.
    fn delete(&self, root: RunId) -> BoxFuture<'_, Result<bool, StoreError>>;

    /// A page of ended roots that can be deleted, oldest first. A root with an unfinished run in its tree, or with a pending
    /// delivery, is left out.
    fn expired_roots(&self, query: ExpiredQuery) -> BoxFuture<'_, Result<ExpiredPage, StoreError>>;

    /// The ended root with a given number of newer ones; `None` if there are fewer.
    fn nth_newest_ended(
        &self,
        query: NthNewestQuery,
    ) -> BoxFuture<'_, Result<Option<RunId>, StoreError>>;

    /// Removes a few definitions that no run uses, and returns a little unused space to the file system, except for some that
    /// new runs will use. Returns true if there may be more to do, including deletions.
    fn vacuum(&self) -> BoxFuture<'_, Result<bool, StoreError>>;
}

/// Selects a page of [`RunRetention::expired_roots`].
#[derive(Clone, Copy, Debug)]
pub struct ExpiredQuery {
    pub status: Status,
    pub cutoff: Cutoff,
    /// Only roots that were created after this one (the cursor).
    pub after: Option<RunId>,
}

/// Which roots are old.
#[derive(Clone, Copy, Debug)]
pub enum Cutoff {
    EndedBefore(Timestamp),
    CreatedBefore(RunId),
}

/// A page of ended roots.
#[derive(Clone, Debug, Default)]
pub struct ExpiredPage {
    pub roots: Vec<RunId>,
    /// [`ExpiredQuery::after`] of the next page; `None` if this is the last.
    pub next: Option<RunId>,
}

/// Selects the root of [`RunRetention::nth_newest_ended`].
#[derive(Clone, Copy, Debug)]
pub struct NthNewestQuery {
    pub status: Status,
    /// Only roots that were created before this one.
    pub before: Option<RunId>,
    /// The number of newer roots. The cost grows with it; at most some thousands.
    pub offset: usize,
}

/// Largest number of roots that one page reads.
const MAX_SCANNED_ROOTS: usize = 256;
/// Largest number of roots that one page returns. The tree of each is deleted.
const PAGE_ROOTS: usize = 64;

/// Roots with a status, oldest first, from an index alone. PostgreSQL compares the columns as one: otherwise it may read all runs in
/// the order of their ids.
const OLDEST_ENDED: &str = "SELECT id, finished_at FROM runs {INDEXED BY runs_finished|} WHERE finished_at IS NOT NULL \
     AND {status = :status AND child = 0 AND id > :after ORDER BY id\
     |(status, child, id) > (:status, false, :after) \
     AND (status, child, id) <= (:status, false, 'ffffffff-ffff-ffff-ffff-ffffffffffff') \
     ORDER BY status, child, id} LIMIT :limit";
/// The root with a status that has so many newer ones.
const NTH_NEWEST_ENDED: &str = "SELECT id FROM runs {INDEXED BY runs_finished|} WHERE finished_at IS NOT NULL \
     AND {status = :status AND child = 0 AND id < :before ORDER BY id DESC\
     |(status, child, id) < (:status, false, :before) \
     AND (status, child, id) >= (:status, false, '00000000-0000-0000-0000-000000000000') \
     ORDER BY status DESC, child DESC, id DESC} LIMIT 1 OFFSET :offset";
/// Roots whose tree has a run that has not ended, or that have a pending delivery.
const PENDING: &str = "SELECT roots.root FROM {(SELECT unhex(value) AS root FROM json_each(:roots)) AS roots\
     |unnest(:roots::uuid[]) AS roots (root)} WHERE \
     EXISTS (WITH RECURSIVE tree (id) AS (SELECT roots.root UNION ALL SELECT c.id FROM tree JOIN runs c ON c.parent = tree.id) \
     SELECT 1 FROM tree {CROSS |}JOIN runs r ON r.id = tree.id WHERE r.finished_at IS NULL) \
     OR EXISTS (SELECT 1 FROM deliveries d {INDEXED BY deliveries_run|} WHERE d.run = roots.root AND d.next_at IS NOT NULL)";

impl<E: Engine> RunRetention for E {
    fn delete(&self, root: RunId) -> BoxFuture<'_, Result<bool, StoreError>> {
        self.queue().is_positive(Task::Delete(root))
    }

    fn expired_roots(&self, query: ExpiredQuery) -> BoxFuture<'_, Result<ExpiredPage, StoreError>> {
        self.read(ReadMode::Snapshot, move |db| {
            Box::pin(expired_roots(db, query))
        })
    }

    fn nth_newest_ended(
        &self,
        query: NthNewestQuery,
    ) -> BoxFuture<'_, Result<Option<RunId>, StoreError>> {
        self.read(ReadMode::Statement, move |db| {
            Box::pin(async move {
                let params = params! {
                    ":status": query.status.as_str(),
                    ":before": query.before.map_or(Uuid::max(), |id| id.0),
                    ":offset": signed(query.offset as u64),
                };
                db.first(NTH_NEWEST_ENDED, params, |row| row.get("id"))
                    .await
            })
        })
    }

    fn vacuum(&self) -> BoxFuture<'_, Result<bool, StoreError>> {
        self.queue().is_positive(Task::Vacuum)
    }
}

async fn expired_roots(db: &Reader, query: ExpiredQuery) -> StoreResult<ExpiredPage> {
    let params = params! {
        ":status": query.status.as_str(),
        ":after": query.after.map_or(Uuid::nil(), |id| id.0),
        ":limit": signed(MAX_SCANNED_ROOTS as u64),
    };
    let root = |row: &Row<'_>| Ok((row.get("id")?, row.get("finished_at")?));
    let found: Vec<(RunId, i64)> = db.query(OLDEST_ENDED, params, root).await?;
    let now = now().as_millisecond();
    let is_beyond = |id: RunId| match query.cutoff {
        // A run that was accepted later cannot have ended before, unless the clock was set back since.
        Cutoff::EndedBefore(time) => (time.as_millisecond() + 1..=now).contains(&created_ms(id)),
        Cutoff::CreatedBefore(newer) => id >= newer,
    };
    let is_expired = |ended: i64| match query.cutoff {
        Cutoff::EndedBefore(time) => ended < time.as_millisecond(),
        Cutoff::CreatedBefore(_) => true,
    };
    let end = found.iter().position(|(id, _)| is_beyond(*id));
    let is_last = found.len() < MAX_SCANNED_ROOTS || end.is_some();
    let scanned = &found[..end.unwrap_or(found.len())];
    let expired = scanned.iter().filter(|(_, ended)| is_expired(*ended));
    let expired: Vec<RunId> = expired.map(|(id, _)| *id).collect();
    let pending = pending(db, &expired).await?;
    let mut roots = expired;
    roots.retain(|id| !pending.contains(id));
    let next = match roots.get(PAGE_ROOTS - 1) {
        Some(last) => Some(*last),
        None => scanned.last().map(|(id, _)| *id).filter(|_| !is_last),
    };
    roots.truncate(PAGE_ROOTS);
    Ok(ExpiredPage { roots, next })
}

async fn pending(db: &Reader, roots: &[RunId]) -> StoreResult<HashSet<RunId>> {
    if roots.is_empty() {
        return Ok(HashSet::new());
    }
    let ids: Vec<Uuid> = roots.iter().map(|root| root.0).collect();
    let params = params! {":roots": ids};
    let found = db.query(PENDING, params, |row| row.get("root")).await?;
    Ok(found.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::{NTH_NEWEST_ENDED, OLDEST_ENDED};
    use crate::config::Durability;
    use crate::store::sql::dialect::Dialect;
    use crate::store::sqlite::schema;

    #[test]
    fn expired_roots_are_found_by_index_alone() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("axed.db");
        std::fs::File::create(&file).expect("a file");
        let db = schema::open_writer(&file, Durability::Process).expect("a database");
        for (sql, range) in [(OLDEST_ENDED, "id>?"), (NTH_NEWEST_ENDED, "id<?")] {
            let explain = format!("EXPLAIN QUERY PLAN {}", Dialect::Sqlite.text(sql));
            let plan: String = db
                .query_row(&explain, [1, 1, 1], |row| row.get("detail"))
                .expect("a plan");
            let wanted = format!(
                "SEARCH runs USING COVERING INDEX runs_finished (status=? AND child=? AND {range})"
            );
            assert_eq!(plan, wanted);
        }
    }
}
