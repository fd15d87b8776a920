//! Pages of runs.

use std::sync::LazyLock;

use tracing::error;
use uuid::Uuid;

use crate::domain::run::{Run, RunId, Status};
use crate::domain::run_excerpt;
use crate::domain::run_ref::IdPart;
use crate::store::encoding::integers::signed;
use crate::store::postgres;
use crate::store::reader::Reader;
use crate::store::runs::{
    MAX_SCANNED_IDS, MAX_SCANNED_ROWS, Matches, PAGE_BYTES, RunFilter, RunPage, SessionQuery,
    StatusCount,
};
use crate::store::sql::dialect::{Dialect, Texts};
use crate::store::sql::row::{Row, StoreResult};
use crate::store::sql::value::{free_text, params};
use crate::store::sqlite;
use crate::store::{StoreError, run_queries, run_rows};

/// Whether a run `r` has one of these ids, and the stored texts of the newer ones have fewer bytes than this.
pub const WITHIN_BYTES: &str = "r.id IN (SELECT p.id FROM (SELECT q.id, sum(octet_length(q.input) + coalesce(octet_length(q.task), 0) + \
     coalesce(octet_length(q.content), 0) + coalesce(octet_length(q.partial_content), 0)) \
     OVER (ORDER BY q.id DESC ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS bytes_before \
     FROM runs q WHERE q.id = ANY(:ids)) p WHERE coalesce(p.bytes_before, 0) < :bytes)";

static PAGE: LazyLock<Texts> =
    LazyLock::new(|| run_rows::select_with_inputs(&format!("{WITHIN_BYTES} ORDER BY r.id DESC")));

/// Runs whose ids begin or end so. SQLite's rows are sorted by id, but with all their columns, so that the ids to look
/// through come from its small indexes: one range for each way to end. It compares whole bytes first.
static NAMED: LazyLock<Texts> = LazyLock::new(|| {
    let ended = Status::ALL
        .into_iter()
        .filter(|status| status.is_terminal());
    let ranges = ended.flat_map(|status| [(status, 0), (status, 1)]);
    let ranges = ranges.map(|(status, child)| {
        format!(
            " UNION ALL SELECT * FROM (SELECT id FROM runs INDEXED BY runs_finished WHERE finished_at IS NOT NULL \
             AND status = '{}' AND child = {child} ORDER BY id DESC LIMIT :ids)",
            status.as_str()
        )
    });
    let ranges: String = ranges.collect();
    let visible = "(:owner::text IS NULL OR r.owner = :owner) \
         AND NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = r.root)";
    Texts::new(&format!(
        "SELECT id FROM (SELECT * FROM (SELECT r.id FROM \
         (SELECT id, owner, root FROM runs WHERE id >= :first AND id <= :last ORDER BY id DESC LIMIT :rows) r \
         WHERE {visible} ORDER BY r.id DESC LIMIT :limit) b \
         UNION SELECT * FROM (SELECT r.id FROM \
         ({{SELECT id FROM runs INDEXED BY runs_unfinished WHERE finished_at IS NULL{ranges}\
         |SELECT id FROM runs ORDER BY id DESC LIMIT :ids}}) s JOIN runs r ON r.id = s.id WHERE :end::text IS NOT NULL \
         AND {{substr(s.id, -length(:end_bytes)) = :end_bytes AND substr(lower(hex(s.id)), -length(:end))\
         |right(replace(s.id::text, '-', ''), length(:end::text))}} = :end::text \
         AND {visible} LIMIT :limit) e) n ORDER BY id DESC LIMIT :limit"
    ))
});

/// What happens to a page with a run whose record is damaged.
#[derive(Clone, Copy, PartialEq, Eq)]
enum IfDamaged {
    LeaveOut,
    Fail,
}

/// A page of runs, newest first.
pub async fn list(db: &Reader, filter: &RunFilter) -> StoreResult<RunPage> {
    let matches = find(db, filter).await?;
    load(db, filter, matches).await
}

/// How many runs of these statuses match, each counted up to the limit.
pub async fn count(
    db: &Reader,
    mut filter: RunFilter,
    statuses: &[Status],
) -> StoreResult<Vec<StatusCount>> {
    let mut counts = Vec::with_capacity(statuses.len());
    for status in statuses.iter().copied() {
        filter.status = Some(status);
        let Matches { ids, next } = find(db, &filter).await?;
        counts.push(StatusCount {
            status,
            runs: ids.len(),
            is_minimum: next.is_some(),
        });
    }
    Ok(counts)
}

/// The runs that match a filter, without what [`RunFilter::compares_rows`].
pub async fn find(db: &Reader, filter: &RunFilter) -> StoreResult<Matches> {
    match db {
        Reader::Sqlite(reader) => reader.with(|db| sqlite::search::search(db, filter)),
        Reader::Postgres(_) => postgres::search::search(db, filter).await,
    }
}

/// Reads the runs of a page.
pub async fn load(db: &Reader, filter: &RunFilter, matches: Matches) -> StoreResult<RunPage> {
    let Matches { ids, next } = matches;
    let runs = load_page(db, &ids, filter.cut_texts, IfDamaged::LeaveOut).await?;
    let last = runs.last().map(|run| run.id);
    let ends_early = last.filter(|id| Some(id) != ids.last());
    Ok(RunPage {
        runs,
        next: ends_early.or(next),
    })
}

/// See [`RunRecords::runs_named`](crate::store::runs::RunRecords::runs_named).
pub async fn runs_named(
    db: &Reader,
    part: &IdPart,
    owner: Option<&str>,
    limit: usize,
) -> StoreResult<Vec<RunId>> {
    let (first, last) = part.range();
    let end = part.end();
    let params = params! {
        ":first": first, ":last": last, ":end": end, ":end_bytes": end.map(whole_bytes), ":owner": owner,
        ":ids": i64::from(MAX_SCANNED_IDS), ":rows": i64::from(MAX_SCANNED_ROWS), ":limit": signed(limit as u64),
    };
    db.query(NAMED.of(db.dialect()), params, |row| row.get("id"))
        .await
}

/// The last bytes of hexadecimal digits, without the half of one.
fn whole_bytes(digits: &str) -> Vec<u8> {
    let pairs = digits.as_bytes()[digits.len() % 2..].chunks(2);
    let pairs = pairs.map(|pair| std::str::from_utf8(pair).unwrap_or_default());
    pairs
        .filter_map(|pair| u8::from_str_radix(pair, 16).ok())
        .collect()
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
    // PostgreSQL gets one comparison, so that it does not read all runs in the order of their ids. There is none with null.
    let (names, values, is_owner) = match query.owner {
        Some(_) => ("r.owner, r.session, r.id", ":owner, :session", "true"),
        None => ("r.session, r.id", ":session", "r.owner IS NULL"),
    };
    let order = names.replace(',', " DESC,");
    let mut sql = match db.dialect() {
        Dialect::Sqlite => {
            "SELECT r.id FROM runs r INDEXED BY runs_session WHERE r.session IS NOT NULL \
             AND r.session = :session AND r.owner IS :owner AND r.id < :before"
                .to_owned()
        }
        Dialect::Postgres => format!(
            "SELECT r.id FROM runs r WHERE r.session IS NOT NULL AND ({names}) < ({values}, :before) \
             AND ({names}) >= ({values}, '00000000-0000-0000-0000-000000000000') AND {is_owner}"
        ),
    };
    if query.agent.is_some() {
        sql += " AND r.agent = :agent";
    }
    if query.status.is_some() {
        sql += " AND r.status = :status";
    }
    sql += " AND NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = r.id) ORDER BY ";
    sql += &format!("{{r.id|{order}}} DESC LIMIT :limit");
    let params = params! {
        ":session": free_text(&query.name),
        ":owner": query.owner.as_deref(),
        ":before": query.before.map_or(Uuid::max(), |id| id.0),
        ":agent": query.agent.as_deref(),
        ":status": query.status.map(|status| status.as_str()),
        ":limit": signed(query.limit as u64),
    };
    db.query(&sql, params, |row| row.get("id")).await
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
    let mut remaining = ids;
    while let Some(next) = remaining.first()
        && bytes < PAGE_BYTES
    {
        let found = match db {
            // One by one: SQLite may be unable to read one of them.
            Reader::Sqlite(_) => {
                remaining = &remaining[1..];
                let found = run_queries::run(db, *next).await;
                found
                    .map(|run| (*next, run))
                    .or_else(|error| leave_out(db, *next, error, if_damaged))
                    .map(|found| vec![found])?
            }
            Reader::Postgres(_) => {
                let found = load_part(db, remaining, if_damaged).await?;
                let Some((last, _)) = found.last() else {
                    break;
                };
                let read = remaining.partition_point(|id| id >= last);
                remaining = &remaining[read..];
                found
            }
        };
        for mut run in found.into_iter().filter_map(|(_, run)| run) {
            if bytes >= PAGE_BYTES {
                break;
            }
            if cut_texts {
                run_excerpt::cut_texts(&mut run);
            }
            bytes += run.text_bytes();
            page.push(run);
        }
    }
    Ok(page)
}

/// The first of these runs, with their ids.
async fn load_part(
    db: &Reader,
    ids: &[RunId],
    if_damaged: IfDamaged,
) -> StoreResult<Vec<(RunId, Option<Run>)>> {
    let ids: Vec<Uuid> = ids.iter().map(|id| id.0).collect();
    let params = params! {":ids": ids, ":bytes": signed(PAGE_BYTES as u64)};
    let read = |row: &Row<'_>| {
        let id = run_rows::run_id(row)?;
        match run_rows::run_with_inputs(row) {
            Ok(run) => Ok((id, Some(run))),
            Err(error) => leave_out(db, id, error, if_damaged),
        }
    };
    db.query(PAGE.of(db.dialect()), params, read).await
}

/// No run if it may be left out.
fn leave_out(
    db: &Reader,
    id: RunId,
    error: StoreError,
    if_damaged: IfDamaged,
) -> StoreResult<(RunId, Option<Run>)> {
    if if_damaged == IfDamaged::Fail || !db.leaves_out(&error) {
        return Err(error);
    }
    error!(run.id = %id, error = %error, "{id} is left out of a list: {error}");
    Ok((id, None))
}
