//! Pages of runs.

use std::sync::LazyLock;

use tokio_postgres::Row;
use tracing::error;
use uuid::Uuid;

use crate::domain::run::{Run, RunId};
use crate::domain::run_excerpt;
use crate::store::StoreError;
use crate::store::encoding::integers::signed;
use crate::store::postgres::rows::{self, StoreResult};
use crate::store::postgres::run_rows;
use crate::store::postgres::search;
use crate::store::reader::Reader;
use crate::store::runs::{PAGE_BYTES, RunFilter, RunPage, SessionQuery};
use crate::store::sql::value::{free_text, params};

/// Runs with these ids, newest first, until the stored texts of those before have so many bytes.
static PAGE: LazyLock<String> = LazyLock::new(|| {
    let begins_early = "r.id IN (SELECT p.id FROM (SELECT q.id, sum(octet_length(q.input) + coalesce(octet_length(q.task), 0) + \
         coalesce(octet_length(q.content), 0) + coalesce(octet_length(q.partial_content), 0)) \
         OVER (ORDER BY q.id DESC ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS bytes_before \
         FROM runs q WHERE q.id = ANY(:ids)) p WHERE coalesce(p.bytes_before, 0) < :bytes)";
    run_rows::select_with_approvals(begins_early) + " ORDER BY r.id DESC"
});

/// What happens to a page with a run whose record is damaged.
#[derive(Clone, Copy, PartialEq, Eq)]
enum IfDamaged {
    LeaveOut,
    Fail,
}

/// A page of runs, newest first.
pub async fn list(db: &Reader, filter: &RunFilter) -> StoreResult<RunPage> {
    let matches = search::search(db, filter).await?;
    let last = matches.ids.last().copied();
    let mut runs = load_page(db, &matches.ids, filter.cut_texts, IfDamaged::LeaveOut).await?;
    let ends_early = runs.last().map(|run| run.id).filter(|id| Some(*id) != last);
    let next = ends_early.or(matches.next);
    if let Some(min_cost) = filter.min_cost {
        runs.retain(|run| run.tree.usage.cost.is_some_and(|cost| cost >= min_cost));
    }
    Ok(RunPage { runs, next })
}

/// Runs of a session, newest first.
pub async fn session_runs(db: &Reader, query: &SessionQuery) -> StoreResult<Vec<Run>> {
    let if_damaged = match query.skip_damaged {
        true => IfDamaged::LeaveOut,
        false => IfDamaged::Fail,
    };
    let mut query = query.clone();
    let limit = query.limit;
    let mut page: Vec<Run> = Vec::new();
    loop {
        let ids = session_ids(db, &query).await?;
        page.extend(load_page(db, &ids, query.cut_texts, if_damaged).await?);
        let bytes = page.iter().map(Run::text_bytes).sum::<usize>();
        if ids.len() < query.limit || page.len() >= limit || bytes >= PAGE_BYTES {
            return Ok(page);
        }
        // Older runs take the places of those that were left out.
        query.limit = limit - page.len();
        query.before = ids.last().copied();
    }
}

/// Only roots have sessions.
async fn session_ids(db: &Reader, query: &SessionQuery) -> StoreResult<Vec<RunId>> {
    // As one comparison, so that the server does not read all runs in the order of their ids. There is none with null.
    let (names, values, is_owner) = match query.owner {
        Some(_) => ("r.owner, r.session, r.id", ":owner, :session", "true"),
        None => (
            "r.session, r.id",
            ":session",
            "r.owner IS NULL AND :owner::text IS NULL",
        ),
    };
    let order = names.replace(',', " DESC,");
    let sql = format!(
        "SELECT r.id FROM runs r WHERE r.session IS NOT NULL AND ({names}) < ({values}, :before) \
         AND ({names}) >= ({values}, '00000000-0000-0000-0000-000000000000') AND {is_owner} \
         AND (:agent::text IS NULL OR r.agent = :agent) AND (:status::text IS NULL OR r.status = :status) \
         AND NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = r.id) ORDER BY {order} DESC LIMIT :limit"
    );
    let params = params! {
        ":session": free_text(&query.name),
        ":owner": query.owner.as_deref(),
        ":before": query.before.map_or(Uuid::max(), |id| id.0),
        ":agent": query.agent.as_deref(),
        ":status": query.status.map(|status| status.as_str()),
        ":limit": signed(query.limit as u64),
    };
    let found = db.rows(&sql, params).await?;
    found.iter().map(|row| rows::id(row, "id")).collect()
}

/// Reads runs, which are sorted from the newest, until the page has [`PAGE_BYTES`].
async fn load_page(
    db: &Reader,
    ids: &[RunId],
    cut_texts: bool,
    if_damaged: IfDamaged,
) -> StoreResult<Vec<Run>> {
    let mut page = Vec::with_capacity(ids.len());
    let mut bytes = 0;
    let mut remaining: Vec<Uuid> = ids.iter().map(|id| id.0).collect();
    while !remaining.is_empty() && bytes < PAGE_BYTES {
        let params = params! {":ids": remaining.clone(), ":bytes": signed(PAGE_BYTES as u64)};
        let found = db.rows(&PAGE, params).await?;
        let Some(last) = found.last().map(run_rows::run_id).transpose()? else {
            break;
        };
        for row in &found {
            let Some(mut run) = readable(row, if_damaged)? else {
                continue;
            };
            if cut_texts {
                run_excerpt::cut_texts(&mut run);
            }
            bytes += run.text_bytes();
            page.push(run);
            if bytes >= PAGE_BYTES {
                break;
            }
        }
        remaining.retain(|id| *id < last.0);
    }
    Ok(page)
}

/// A run; `None` if its record is damaged and it may be left out.
fn readable(row: &Row, if_damaged: IfDamaged) -> StoreResult<Option<Run>> {
    match run_rows::run_with_approvals(row) {
        Err(error @ StoreError::Corrupt(_)) if if_damaged == IfDamaged::LeaveOut => {
            let id = run_rows::run_id(row)?;
            error!(run.id = %id, error = %error, "{id} is left out of a list: {error}");
            Ok(None)
        }
        found => found.map(Some),
    }
}
