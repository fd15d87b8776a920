//! What retention reads: ended roots, along the index that they stand in and not by their rows. Knows no writes.

use rusqlite::{Connection, OptionalExtension, params};

use crate::domain::run::{RunId, now};
use crate::store::sqlite::readers::failed;
use crate::store::sqlite::{removal, rows};
use crate::store::{EndedBefore, NewestEnded, Outlived, OutlivedPage, StoreError};

/// Ended roots that one page looks at.
const LOOKED_AT: u32 = 256;
/// Roots of a page: each one's tree is looked through.
const PAGE: usize = 64;

/// Roots in the state `?1`, made after `?2`, oldest first, `?3` of them.
const OLDEST: &str = "SELECT id, finished_at FROM runs INDEXED BY runs_finished \
     WHERE finished_at IS NOT NULL AND status = ?1 AND child = 0 AND id > ?2 ORDER BY id LIMIT ?3";
/// The root in the state `?1` that is the newest but `?3` of those made before `?2`.
const NEWEST: &str = "SELECT id FROM runs INDEXED BY runs_finished \
     WHERE finished_at IS NOT NULL AND status = ?1 AND child = 0 AND id < ?2 ORDER BY id DESC LIMIT 1 OFFSET ?3";
/// Whether a run of the tree of `?1` has not ended.
const UNFINISHED: &str = "WITH RECURSIVE tree (id) AS (VALUES (?1) UNION ALL \
     SELECT c.id FROM tree JOIN runs c ON c.parent = tree.id) \
     SELECT 1 FROM tree CROSS JOIN runs r ON r.id = tree.id WHERE r.finished_at IS NULL LIMIT 1";
/// Whether a delivery of the root `?1` is still to be made.
const PENDING: &str = "SELECT 1 FROM deliveries INDEXED BY deliveries_run \
     WHERE run = ?1 AND next_at IS NOT NULL LIMIT 1";

/// A page of roots that can go.
pub fn outlived(db: &Connection, query: Outlived) -> Result<OutlivedPage, StoreError> {
    let after = query.after.map_or([0; 16], |id| *rows::bytes(&id));
    let mut sql = db.prepare_cached(OLDEST).map_err(failed)?;
    let mut found = sql
        .query(params![query.status.as_str(), after, LOOKED_AT])
        .map_err(failed)?;
    let mut page = OutlivedPage::default();
    let mut looked_at = 0;
    let now = now().as_millisecond();
    let mut last = None;
    while let Some(row) = found.next().map_err(failed)? {
        let id = rows::id(row, 0).map_err(failed)?;
        let made = removal::made_at(id);
        let goes = match query.before {
            // Whoever was made later cannot have ended before, unless the clock has been set back since.
            EndedBefore::Time(time) if (time.as_millisecond() + 1..=now).contains(&made) => {
                return Ok(page);
            }
            EndedBefore::Time(time) => {
                row.get::<_, i64>(1).map_err(failed)? < time.as_millisecond()
            }
            EndedBefore::Run(newer) if id >= newer => return Ok(page),
            EndedBefore::Run(_) => true,
        };
        looked_at += 1;
        last = Some(id);
        if goes && !is_awaited(db, id)? {
            page.roots.push(id);
        }
        if page.roots.len() == PAGE {
            page.next = last;
            return Ok(page);
        }
    }
    page.next = last.filter(|_| looked_at == LOOKED_AT);
    Ok(page)
}

/// The root that so many newer ones follow.
pub fn newest(db: &Connection, query: NewestEnded) -> Result<Option<RunId>, StoreError> {
    let before = query.before.map_or([0xff; 16], |id| *rows::bytes(&id));
    let skipped = rows::signed(query.but as u64);
    db.prepare_cached(NEWEST)
        .and_then(|mut sql| {
            sql.query_row(params![query.status.as_str(), before, skipped], |row| {
                rows::id(row, 0)
            })
            .optional()
        })
        .map_err(failed)
}

/// Whether a tree still has something to come: a run that has not ended, or a delivery that has not arrived.
fn is_awaited(db: &Connection, root: RunId) -> Result<bool, StoreError> {
    let finds = |sql| {
        db.prepare_cached(sql)
            .and_then(|mut sql| sql.exists(params![rows::bytes(&root)]))
            .map_err(failed)
    };
    Ok(finds(UNFINISHED)? || finds(PENDING)?)
}

#[cfg(test)]
mod tests {
    use super::{NEWEST, OLDEST};
    use crate::config::Durability;
    use crate::store::sqlite::schema;

    #[test]
    fn no_runs_row_is_touched_to_find_what_is_old() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("axed.db");
        std::fs::File::create(&file).expect("a file");
        let db = schema::open_writer(&file, Durability::Process).expect("a database");
        for (sql, range) in [(OLDEST, "id>?"), (NEWEST, "id<?")] {
            let plan: String = db
                .query_row(&format!("EXPLAIN QUERY PLAN {sql}"), [1, 1, 1], |row| {
                    row.get(3)
                })
                .expect("a plan");
            let wanted = format!(
                "SEARCH runs USING COVERING INDEX runs_finished (status=? AND child=? AND {range})"
            );
            assert_eq!(plan, wanted);
        }
    }
}
