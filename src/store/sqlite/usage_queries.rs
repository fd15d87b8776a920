//! Reads sums of usage.

use rusqlite::{Connection, Row, named_params};

use crate::store::StoreError;
use crate::store::encoding::usage_report::{
    self, GroupSums, Groups, Part, ReportBuilder, Segment, SeriesRow,
};
use crate::store::sqlite::error::store_error;
use crate::store::usage::{UsageQuery, UsageReport};

type StoreResult<T> = Result<T, StoreError>;

const QUARTERS: &str =
    "SELECT series, sums FROM usage_quarters WHERE start >= :start AND start < :end";
const DAYS: &str = "SELECT series, sums FROM usage_days WHERE start >= :start AND start < :end";

pub fn report(db: &Connection, query: &UsageQuery) -> StoreResult<UsageReport> {
    let Some(period) = period(db, query)? else {
        return Ok(usage_report::empty_report());
    };
    let groups = groups(db, query).map_err(store_error)?;
    let mut report = ReportBuilder::new(period);
    for segment in usage_report::segments(query, period) {
        let sums = sum(db, &groups, &segment)?;
        if !report.add(query, &groups, &segment, sums) {
            break;
        }
    }
    Ok(report.finish(query))
}

/// The quarter hours that are read; `None` if nothing is kept of that time.
fn period(db: &Connection, query: &UsageQuery) -> StoreResult<Option<(i64, i64)>> {
    let bound = |sql: &str| {
        let mut sql = db.prepare_cached(sql)?;
        sql.query_row([], |row| row.get::<_, Option<i64>>("start"))
    };
    let first = bound("SELECT min(start) AS start FROM usage_quarters").map_err(store_error)?;
    let last = bound("SELECT max(start) AS start FROM usage_quarters").map_err(store_error)?;
    let kept = first.zip(last);
    Ok(kept.and_then(|(first, last)| usage_report::period(query, first, last)))
}

fn groups(db: &Connection, query: &UsageQuery) -> rusqlite::Result<Groups> {
    let mut sql = db.prepare_cached(
        "SELECT id, owner, session, labels, agent, model FROM usage_series \
         WHERE (:owner IS NULL OR owner = :owner) AND (:agent IS NULL OR agent = :agent)",
    )?;
    let mut found = sql.query(named_params! {":owner": query.owner, ":agent": query.agent})?;
    let mut groups = Groups::default();
    while let Some(row) = found.next()? {
        groups.add(query, &series(row)?);
    }
    Ok(groups)
}

fn series<'r>(row: &'r Row<'_>) -> rusqlite::Result<SeriesRow<'r>> {
    Ok(SeriesRow {
        id: row.get("id")?,
        owner: row.get_ref("owner")?.as_str()?,
        session: row.get_ref("session")?.as_str()?,
        labels: row.get_ref("labels")?.as_str()?,
        agent: row.get_ref("agent")?.as_str()?,
        model: row.get_ref("model")?.as_str()?,
    })
}

fn sum(db: &Connection, groups: &Groups, segment: &Segment) -> StoreResult<GroupSums> {
    let mut sums = GroupSums::new(groups);
    for part in segment.parts() {
        read(db, groups, &part, &mut sums)?;
    }
    Ok(sums)
}

fn read(db: &Connection, groups: &Groups, part: &Part, sums: &mut GroupSums) -> StoreResult<()> {
    let sql = if part.is_day { DAYS } else { QUARTERS };
    let mut sql = db.prepare_cached(sql).map_err(store_error)?;
    let (series, bytes) = sql
        .column_index("series")
        .and_then(|series| Ok((series, sql.column_index("sums")?)))
        .map_err(store_error)?;
    let mut found = sql
        .query(named_params! {":start": part.start, ":end": part.end})
        .map_err(store_error)?;
    while let Some(row) = found.next().map_err(store_error)? {
        let series: i64 = row.get(series).map_err(store_error)?;
        let stored = row.get_ref(bytes).map_err(store_error)?;
        groups.apply(sums, part, series, stored.as_blob().ok())?;
    }
    Ok(())
}
