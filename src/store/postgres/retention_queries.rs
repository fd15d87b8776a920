//! Finds ended roots for retention.

use std::collections::HashSet;

use uuid::Uuid;

use crate::domain::run::{RunId, now};
use crate::store::encoding::clock_skew::created_ms;
use crate::store::encoding::integers::signed;
use crate::store::postgres::rows::{self, StoreResult};
use crate::store::reader::Reader;
use crate::store::retention::{Cutoff, ExpiredPage, ExpiredQuery, NthNewestQuery};
use crate::store::sql::value::params;

/// Largest number of roots that one page reads.
const MAX_SCANNED_ROOTS: i64 = 256;
/// Largest number of roots that one page returns. The tree of each is deleted.
const PAGE_ROOTS: usize = 64;

/// Roots with a status, oldest first. The columns are compared as one: otherwise the server may read all runs in the order of
/// their ids.
const OLDEST_ENDED: &str = "SELECT id, finished_at FROM runs WHERE finished_at IS NOT NULL \
     AND (status, child, id) > (:status, false, :after) \
     AND (status, child, id) <= (:status, false, 'ffffffff-ffff-ffff-ffff-ffffffffffff') \
     ORDER BY status, child, id LIMIT :limit";
/// The root with a status that has so many newer ones.
const NTH_NEWEST_ENDED: &str = "SELECT id FROM runs WHERE finished_at IS NOT NULL \
     AND (status, child, id) < (:status, false, :before) \
     AND (status, child, id) >= (:status, false, '00000000-0000-0000-0000-000000000000') \
     ORDER BY status DESC, child DESC, id DESC LIMIT 1 OFFSET :offset";
/// Roots whose tree has a run that has not ended, or that have a pending delivery.
const PENDING: &str = "SELECT root FROM unnest(:roots::uuid[]) AS roots (root) WHERE \
     EXISTS (WITH RECURSIVE tree (id) AS (SELECT root UNION ALL SELECT c.id FROM tree JOIN runs c ON c.parent = tree.id) \
     SELECT 1 FROM tree JOIN runs r ON r.id = tree.id WHERE r.finished_at IS NULL) \
     OR EXISTS (SELECT 1 FROM deliveries d WHERE d.run = root AND d.next_at IS NOT NULL)";

pub async fn expired_roots(db: &Reader, query: ExpiredQuery) -> StoreResult<ExpiredPage> {
    let params = params! {
        ":status": query.status.as_str(),
        ":after": query.after.map_or(Uuid::nil(), |id| id.0),
        ":limit": MAX_SCANNED_ROOTS,
    };
    let found = db.rows(OLDEST_ENDED, params).await?;
    let mut scanned = Vec::with_capacity(found.len());
    let mut is_last = signed(found.len() as u64) < MAX_SCANNED_ROOTS;
    let now = now().as_millisecond();
    for row in &found {
        let id = rows::id(row, "id")?;
        let is_expired = match query.cutoff {
            // A run that was accepted later cannot have ended before, unless the clock was set back since.
            Cutoff::EndedBefore(time)
                if (time.as_millisecond() + 1..=now).contains(&created_ms(id)) =>
            {
                is_last = true;
                break;
            }
            Cutoff::EndedBefore(time) => {
                rows::get::<i64>(row, "finished_at")? < time.as_millisecond()
            }
            Cutoff::CreatedBefore(newer) if id >= newer => {
                is_last = true;
                break;
            }
            Cutoff::CreatedBefore(_) => true,
        };
        scanned.push((id, is_expired));
    }
    let expired = scanned.iter().filter(|(_, is_expired)| *is_expired);
    let pending = pending(db, expired.map(|(id, _)| id.0).collect()).await?;
    let mut page = ExpiredPage::default();
    for (id, is_expired) in &scanned {
        if *is_expired && !pending.contains(id) {
            page.roots.push(*id);
        }
        if page.roots.len() == PAGE_ROOTS {
            page.next = Some(*id);
            return Ok(page);
        }
    }
    page.next = scanned.last().map(|(id, _)| *id).filter(|_| !is_last);
    Ok(page)
}

pub async fn nth_newest(db: &Reader, query: NthNewestQuery) -> StoreResult<Option<RunId>> {
    let params = params! {
        ":status": query.status.as_str(),
        ":before": query.before.map_or(Uuid::max(), |id| id.0),
        ":offset": signed(query.offset as u64),
    };
    let found = db.row(NTH_NEWEST_ENDED, params).await?;
    found.map(|row| rows::id(&row, "id")).transpose()
}

async fn pending(db: &Reader, roots: Vec<Uuid>) -> StoreResult<HashSet<RunId>> {
    if roots.is_empty() {
        return Ok(HashSet::new());
    }
    let found = db.rows(PENDING, params! {":roots": roots}).await?;
    found.iter().map(|row| rows::id(row, "root")).collect()
}
