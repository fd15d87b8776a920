//! Reads sums of usage. A long period is read by days in UTC; what begins or ends within a day is corrected by its quarter
//! hours, which are added or subtracted.

use std::collections::HashMap;

use jiff::civil::Date;
use rusqlite::{Connection, Row, named_params};

use crate::domain::calendar::{self, QUARTERS_PER_DAY, quarter_from, quarter_of, quarter_start};
use crate::domain::usage_sums::{DamagedSums, UsageSums};
use crate::store::StoreError;
use crate::store::encoding::run_values;
use crate::store::sqlite::error::store_error;
use crate::store::usage::{UsageDimension, UsageQuery, UsageReport, UsageRow};

/// Shorter periods are read by quarter hours only.
const MIN_QUARTERS_BY_DAY: i64 = 80;
/// A series that the query leaves out.
const NO_GROUP: u32 = u32::MAX;

type StoreResult<T> = Result<T, StoreError>;
type Values = Vec<Option<String>>;

pub fn report(db: &Connection, query: &UsageQuery) -> StoreResult<UsageReport> {
    let Some((start, end)) = period(db, query)? else {
        return Ok(UsageReport {
            rows: Some(Vec::new()),
            ..UsageReport::default()
        });
    };
    let groups = Groups::load(db, query)?;
    let by_day = query.by.contains(&UsageDimension::Day);
    let segments: Vec<(Option<Date>, i64, i64)> = match by_day {
        true => calendar::days(&query.time_zone, start, end)
            .iter()
            .map(|day| (Some(day.date), day.start, day.end))
            .collect(),
        false => vec![(None, start, end)],
    };
    let mut report = UsageReport {
        rows: None,
        totals: UsageSums::default(),
        since: Some(quarter_start(start)),
        until: Some(quarter_start(end)),
    };
    let mut found = Vec::new();
    for (day, start, end) in segments {
        for (group, sums) in groups.sum(db, start, end)? {
            report.totals.add(&sums);
            found.push(UsageRow {
                values: groups.values[group as usize].clone(),
                day,
                sums,
            });
        }
        if found.len() > query.max_rows {
            return Ok(report);
        }
    }
    sort(&mut found, &query.by);
    report.rows = Some(found);
    Ok(report)
}

/// The quarter hours that are read; `None` if nothing is kept of that time.
fn period(db: &Connection, query: &UsageQuery) -> StoreResult<Option<(i64, i64)>> {
    let bound = |sql: &str| {
        let mut sql = db.prepare_cached(sql)?;
        sql.query_row([], |row| row.get::<_, Option<i64>>("start"))
    };
    let first = bound("SELECT min(start) AS start FROM usage_quarters").map_err(store_error)?;
    let last = bound("SELECT max(start) AS start FROM usage_quarters").map_err(store_error)?;
    let Some((first, last)) = first.zip(last) else {
        return Ok(None);
    };
    let start = query
        .since
        .map_or(first, |since| quarter_of(since).max(first));
    let end = query
        .until
        .map_or(last + 1, |until| quarter_from(until).min(last + 1));
    Ok((start < end).then_some((start, end)))
}

/// The groups of a query.
struct Groups {
    values: Vec<Values>,
    /// The group of each series, by its id.
    of_series: Vec<u32>,
}

impl Groups {
    fn load(db: &Connection, query: &UsageQuery) -> StoreResult<Self> {
        let mut sql = db
            .prepare_cached(
                "SELECT id, owner, session, labels, agent, model FROM usage_series \
                 WHERE (:owner IS NULL OR owner = :owner) AND (:agent IS NULL OR agent = :agent)",
            )
            .map_err(store_error)?;
        let mut found = sql
            .query(named_params! {":owner": query.owner, ":agent": query.agent})
            .map_err(store_error)?;
        let mut groups = Self {
            values: Vec::new(),
            of_series: Vec::new(),
        };
        let mut known: HashMap<Values, u32> = HashMap::new();
        while let Some(row) = found.next().map_err(store_error)? {
            let Some(values) = series_values(row, query).map_err(store_error)? else {
                continue;
            };
            let group = match known.get(&values) {
                Some(group) => *group,
                None => {
                    let group = u32::try_from(groups.values.len()).unwrap_or(NO_GROUP);
                    groups.values.push(values.clone());
                    known.insert(values, group);
                    group
                }
            };
            let id: i64 = row.get("id").map_err(store_error)?;
            let index = usize::try_from(id).unwrap_or(0);
            if groups.of_series.len() <= index {
                groups.of_series.resize(index + 1, NO_GROUP);
            }
            groups.of_series[index] = group;
        }
        Ok(groups)
    }

    /// The sums of the groups from quarter hour `start` to before `end`, without empty ones.
    fn sum(&self, db: &Connection, start: i64, end: i64) -> StoreResult<Vec<(u32, UsageSums)>> {
        let mut sums = GroupSums {
            positions: vec![NO_GROUP; self.values.len()],
            found: Vec::new(),
        };
        let (add, subtract) = (UsageSums::add_encoded, UsageSums::subtract_encoded);
        if end - start < MIN_QUARTERS_BY_DAY {
            self.read(db, QUARTERS, (start, end), add, &mut sums)?;
        } else {
            let (first, last) = (nearest_day(start), nearest_day(end));
            self.read(db, DAYS, (first, last), add, &mut sums)?;
            let (first, last) = (first * QUARTERS_PER_DAY, last * QUARTERS_PER_DAY);
            self.read(db, QUARTERS, (start, first), add, &mut sums)?;
            self.read(db, QUARTERS, (last, end), add, &mut sums)?;
            self.read(db, QUARTERS, (first, start), subtract, &mut sums)?;
            self.read(db, QUARTERS, (end, last), subtract, &mut sums)?;
        }
        sums.found.retain(|(_, sums)| !sums.is_empty());
        Ok(sums.found)
    }

    fn read(
        &self,
        db: &Connection,
        sql: &str,
        (start, end): (i64, i64),
        apply: fn(&mut UsageSums, &[u8]) -> Result<(), DamagedSums>,
        sums: &mut GroupSums,
    ) -> StoreResult<()> {
        if start >= end {
            return Ok(());
        }
        let mut sql = db.prepare_cached(sql).map_err(store_error)?;
        let (series, bytes) = sql
            .column_index("series")
            .and_then(|series| Ok((series, sql.column_index("sums")?)))
            .map_err(store_error)?;
        let mut found = sql
            .query(named_params! {":start": start, ":end": end})
            .map_err(store_error)?;
        while let Some(row) = found.next().map_err(store_error)? {
            let series: i64 = row.get(series).map_err(store_error)?;
            let group = usize::try_from(series)
                .ok()
                .and_then(|id| self.of_series.get(id));
            let Some(group) = group.filter(|group| **group != NO_GROUP) else {
                continue;
            };
            let bytes = row.get_ref(bytes).map_err(store_error)?;
            let bytes = bytes.as_blob().map_err(|_| DamagedSums);
            bytes
                .and_then(|bytes| apply(sums.of(*group), bytes))
                .map_err(|_| StoreError::Corrupt("a sum of usage".to_owned()))?;
        }
        Ok(())
    }
}

/// The sums of the groups that have any.
struct GroupSums {
    /// By group, its position in `found`.
    positions: Vec<u32>,
    found: Vec<(u32, UsageSums)>,
}

impl GroupSums {
    fn of(&mut self, group: u32) -> &mut UsageSums {
        let position = &mut self.positions[group as usize];
        if *position == NO_GROUP {
            *position = self.found.len() as u32;
            self.found.push((group, UsageSums::default()));
        }
        &mut self.found[*position as usize].1
    }
}

const QUARTERS: &str =
    "SELECT series, sums FROM usage_quarters WHERE start >= :start AND start < :end";
const DAYS: &str = "SELECT series, sums FROM usage_days WHERE start >= :start AND start < :end";

/// The day in UTC whose beginning is nearest.
fn nearest_day(quarter: i64) -> i64 {
    (quarter + QUARTERS_PER_DAY / 2).div_euclid(QUARTERS_PER_DAY)
}

/// The values of a series in the order of the query's dimensions; `None` if the query leaves it out.
fn series_values(row: &Row<'_>, query: &UsageQuery) -> rusqlite::Result<Option<Values>> {
    if let Some(visible) = &query.visible_agents
        && !visible.is_match(row.get_ref("agent")?.as_str()?)
    {
        return Ok(None);
    }
    let is_label = |by: &UsageDimension| matches!(by, UsageDimension::Label(_));
    let labels = match query.labels.is_empty() && !query.by.iter().any(is_label) {
        true => run_values::labels(None),
        false => run_values::labels(row.get_ref("labels")?.as_str().ok()),
    };
    let has_label = |(name, value): &(String, String)| labels.get(name) == Some(value);
    if !query.labels.iter().all(has_label) {
        return Ok(None);
    }
    let text = |column| {
        let text: String = row.get(column)?;
        Ok::<_, rusqlite::Error>(Some(text).filter(|text| !text.is_empty()))
    };
    let mut values = Vec::with_capacity(query.by.len());
    for dimension in &query.by {
        values.push(match dimension {
            UsageDimension::Agent => text("agent")?,
            UsageDimension::Model => text("model")?,
            UsageDimension::Session => text("session")?,
            UsageDimension::Key => text("owner")?,
            UsageDimension::Label(name) => labels.get(name).cloned(),
            UsageDimension::Day => continue,
        });
    }
    Ok(Some(values))
}

/// Sorts by the values in the order of the dimensions, absent ones last.
fn sort(rows: &mut [UsageRow], by: &[UsageDimension]) {
    let day_position = by.iter().position(|it| *it == UsageDimension::Day);
    let before_day = day_position.unwrap_or(by.len());
    rows.sort_by_cached_key(|row| {
        let (first, last) = row.values.split_at(before_day.min(row.values.len()));
        let sortable = |values: &[Option<String>]| {
            let values = values.iter().map(|it| (it.is_none(), it.clone()));
            values.collect::<Vec<_>>()
        };
        (sortable(first), row.day, sortable(last))
    });
}
