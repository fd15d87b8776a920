//! Finds ended roots for retention, from an index alone.

use rusqlite::{Connection, OptionalExtension, named_params};

use crate::domain::run::{RunId, now};
use crate::store::StoreError;
use crate::store::encoding::{clock_skew, integers};
use crate::store::retention::{Cutoff, ExpiredPage, ExpiredQuery, NthNewestQuery};
use crate::store::sqlite::error::store_error;
use crate::store::sqlite::rows;

/// Largest number of roots that one page reads.
const MAX_SCANNED_ROOTS: u32 = 256;
/// Largest number of roots that one page returns. The tree of each is searched.
const PAGE_ROOTS: usize = 64;

/// Roots with a status, oldest first.
const OLDEST_ENDED: &str = "SELECT id, finished_at FROM runs INDEXED BY runs_finished \
     WHERE finished_at IS NOT NULL AND status = :status AND child = 0 AND id > :after ORDER BY id LIMIT :limit";
/// The root with a status that has `:offset` newer ones.
const NTH_NEWEST_ENDED: &str = "SELECT id FROM runs INDEXED BY runs_finished \
     WHERE finished_at IS NOT NULL AND status = :status AND child = 0 AND id < :before \
     ORDER BY id DESC LIMIT 1 OFFSET :offset";
/// Whether a run of the tree has not ended.
const HAS_UNFINISHED_RUN: &str = "WITH RECURSIVE tree (id) AS (VALUES (:root) UNION ALL \
     SELECT c.id FROM tree JOIN runs c ON c.parent = tree.id) \
     SELECT 1 FROM tree CROSS JOIN runs r ON r.id = tree.id WHERE r.finished_at IS NULL LIMIT 1";
/// Whether a delivery of the root is pending.
const HAS_PENDING_DELIVERY: &str = "SELECT 1 FROM deliveries INDEXED BY deliveries_run \
     WHERE run = :root AND next_at IS NOT NULL LIMIT 1";

pub fn expired_roots(db: &Connection, query: ExpiredQuery) -> Result<ExpiredPage, StoreError> {
    let after = query.after.map_or([0; 16], |id| *rows::id_bytes(&id));
    let mut sql = db.prepare_cached(OLDEST_ENDED).map_err(store_error)?;
    let mut found = sql
        .query(named_params! {
            ":status": query.status.as_str(),
            ":after": after,
            ":limit": MAX_SCANNED_ROOTS,
        })
        .map_err(store_error)?;
    let mut page = ExpiredPage::default();
    let mut scanned = 0;
    let now = now().as_millisecond();
    let mut last = None;
    while let Some(row) = found.next().map_err(store_error)? {
        let id = rows::id(row, "id").map_err(store_error)?;
        let created_ms = clock_skew::created_ms(id);
        let is_expired = match query.cutoff {
            // A run that was accepted later cannot have ended before, unless the clock was set back since.
            Cutoff::EndedBefore(time)
                if (time.as_millisecond() + 1..=now).contains(&created_ms) =>
            {
                return Ok(page);
            }
            Cutoff::EndedBefore(time) => {
                row.get::<_, i64>("finished_at").map_err(store_error)? < time.as_millisecond()
            }
            Cutoff::CreatedBefore(newer) if id >= newer => return Ok(page),
            Cutoff::CreatedBefore(_) => true,
        };
        scanned += 1;
        last = Some(id);
        if is_expired && !is_pending(db, id)? {
            page.roots.push(id);
        }
        if page.roots.len() == PAGE_ROOTS {
            page.next = last;
            return Ok(page);
        }
    }
    page.next = last.filter(|_| scanned == MAX_SCANNED_ROOTS);
    Ok(page)
}

pub fn nth_newest(db: &Connection, query: NthNewestQuery) -> Result<Option<RunId>, StoreError> {
    let before = query.before.map_or([0xff; 16], |id| *rows::id_bytes(&id));
    let offset = integers::signed(query.offset as u64);
    db.prepare_cached(NTH_NEWEST_ENDED)
        .and_then(|mut sql| {
            let params = named_params! {
                ":status": query.status.as_str(),
                ":before": before,
                ":offset": offset,
            };
            sql.query_row(params, |row| rows::id(row, "id")).optional()
        })
        .map_err(store_error)
}

/// Whether a tree has a run that has not ended, or a pending delivery.
fn is_pending(db: &Connection, root: RunId) -> Result<bool, StoreError> {
    let exists = |sql| {
        db.prepare_cached(sql)
            .and_then(|mut sql| sql.exists(named_params! {":root": rows::id_bytes(&root)}))
            .map_err(store_error)
    };
    Ok(exists(HAS_UNFINISHED_RUN)? || exists(HAS_PENDING_DELIVERY)?)
}

#[cfg(test)]
mod tests {
    use super::{NTH_NEWEST_ENDED, OLDEST_ENDED};
    use crate::config::Durability;
    use crate::store::sqlite::schema;

    #[test]
    fn expired_roots_are_found_by_index_alone() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("axed.db");
        std::fs::File::create(&file).expect("a file");
        let db = schema::open_writer(&file, Durability::Process).expect("a database");
        for (sql, range) in [(OLDEST_ENDED, "id>?"), (NTH_NEWEST_ENDED, "id<?")] {
            let plan: String = db
                .query_row(&format!("EXPLAIN QUERY PLAN {sql}"), [1, 1, 1], |row| {
                    row.get("detail")
                })
                .expect("a plan");
            let wanted = format!(
                "SEARCH runs USING COVERING INDEX runs_finished (status=? AND child=? AND {range})"
            );
            assert_eq!(plan, wanted);
        }
    }
}
