//! Adds ended runs to the sums of usage, in the transaction that ends them. Runs of one transaction that have the same values
//! are written as one row for their quarter hour and one for their day.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use jiff::Timestamp;
use rusqlite::{Row, named_params};
use tracing::error;

use crate::domain::calendar::{QUARTERS_PER_DAY, quarter_of};
use crate::domain::run::RunId;
use crate::domain::usage_sums::UsageSums;
use crate::store::encoding::ended_runs::{
    EndedRow, EndedRun, LABEL_PREFIX, LABELS, MODEL, RootRow, SESSION, Series,
};
use crate::store::encoding::run_values;
use crate::store::sqlite::rows;
use crate::store::sqlite::statements::Statements;
use crate::store::usage::{MAX_LABEL_NAMES, MAX_SESSIONS, MAX_VALUES, OTHER};

/// Rows, and series, that are cached.
const MAX_CACHED: usize = 4_096;
/// Rows of each table that one part of a trim removes.
const TRIM_ROWS: u32 = 256;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct RowKey {
    is_day: bool,
    start: i64,
    series: i64,
}

/// The writer's caches, which contain what is in the tables after the transaction.
#[derive(Debug, Default)]
pub struct UsageRollup {
    rows: HashMap<RowKey, UsageSums>,
    /// Rows that the transaction has to write.
    changed: BTreeSet<RowKey>,
    /// The id of a series and the last day on which it is marked as used, by the values of runs.
    series: HashMap<Series, (i64, i64)>,
    /// The number of values, by owner and name.
    value_counts: HashMap<(String, String), usize>,
}

impl UsageRollup {
    /// Discards what is cached of a transaction that was rolled back.
    pub fn reset(&mut self) {
        *self = Self::default();
    }

    /// Adds a run that has just ended. [`UsageRollup::flush`] writes it.
    pub fn count(
        &mut self,
        sql: &mut Statements<'_>,
        root: RunId,
        mut ended: EndedRun,
    ) -> rusqlite::Result<()> {
        if ended.row.is_child {
            let params = named_params! {":id": rows::id_bytes(&root)};
            match sql.usage_root.query_row(params, read_root_row)? {
                Some(root_row) => ended.row.root = root_row,
                None => return Ok(()),
            }
        }
        ended.for_each_sum(|quarter, series, sums| self.add(sql, quarter, series, sums))
    }

    fn add(
        &mut self,
        sql: &mut Statements<'_>,
        quarter: i64,
        series: &Series,
        sums: &UsageSums,
    ) -> rusqlite::Result<()> {
        let day = quarter.div_euclid(QUARTERS_PER_DAY);
        let id = self.series_id(sql, series, day)?;
        for (is_day, start) in [(false, quarter), (true, day)] {
            let key = RowKey {
                is_day,
                start,
                series: id,
            };
            let row = match self.rows.get_mut(&key) {
                Some(row) => row,
                None => {
                    let stored = read_row(sql, key)?;
                    self.rows.entry(key).or_insert(stored)
                }
            };
            row.add(sums);
            self.changed.insert(key);
        }
        Ok(())
    }

    /// Writes the changed rows. Called before the commit.
    pub fn flush(&mut self, sql: &mut Statements<'_>) -> rusqlite::Result<()> {
        for key in std::mem::take(&mut self.changed) {
            let Some(sums) = self.rows.get(&key) else {
                continue;
            };
            let statement = match key.is_day {
                true => &mut sql.upsert_usage_day,
                false => &mut sql.upsert_usage_quarter,
            };
            let sums = sums.encode();
            statement.execute(
                named_params! {":start": key.start, ":series": key.series, ":sums": sums},
            )?;
        }
        if self.rows.len() > MAX_CACHED {
            self.rows.clear();
        }
        if self.series.len() > MAX_CACHED {
            self.series.clear();
            self.value_counts.clear();
        }
        Ok(())
    }

    /// Removes a part of what is older than this day. Returns whether there may be more.
    pub fn trim(&mut self, sql: &mut Statements<'_>, before: Timestamp) -> rusqlite::Result<bool> {
        self.flush(sql)?;
        let day = quarter_of(before).div_euclid(QUARTERS_PER_DAY);
        let first_quarter = day.saturating_mul(QUARTERS_PER_DAY);
        let mut removed = 0;
        for (statement, before) in [
            (&mut sql.trim_usage_quarters, first_quarter),
            (&mut sql.trim_usage_days, day),
            (&mut sql.trim_usage_series, day),
            (&mut sql.trim_usage_values, day),
        ] {
            removed += statement.execute(named_params! {":before": before, ":limit": TRIM_ROWS})?;
        }
        if removed > 0 {
            self.reset();
        }
        Ok(removed > 0)
    }

    /// The id of a series, which is marked as used on this day.
    fn series_id(
        &mut self,
        sql: &mut Statements<'_>,
        series: &Series,
        day: i64,
    ) -> rusqlite::Result<i64> {
        if let Some((id, last_day)) = self.series.get(series)
            && day <= *last_day
        {
            return Ok(*id);
        }
        let counted = self.counted_series(sql, series, day)?;
        let params = named_params! {
            ":owner": counted.owner,
            ":session": counted.session,
            ":labels": counted.labels,
            ":agent": counted.agent,
            ":model": counted.model,
            ":day": day,
        };
        let id = sql
            .upsert_usage_series
            .query_row(params, |row| row.get("id"))?;
        let id = id.ok_or(rusqlite::Error::QueryReturnedNoRows)?;
        self.series.insert(series.clone(), (id, day));
        Ok(id)
    }

    /// The series with its values replaced that are above the limits.
    fn counted_series(
        &mut self,
        sql: &mut Statements<'_>,
        series: &Series,
        day: i64,
    ) -> rusqlite::Result<Series> {
        let mut keep = |name: &str, value: &str, max| {
            let kept =
                value.is_empty() || self.keep(sql, (&series.owner, name, value), max, day)?;
            Ok::<_, rusqlite::Error>(if kept { value } else { OTHER }.to_owned())
        };
        let session = keep(SESSION, &series.session, MAX_SESSIONS)?;
        let model = keep(MODEL, &series.model, MAX_VALUES)?;
        let mut labels = BTreeMap::new();
        for (name, value) in run_values::labels(Some(&series.labels)) {
            if keep(LABELS, &name, MAX_LABEL_NAMES)? == name {
                let value = keep(&format!("{LABEL_PREFIX}{name}"), &value, MAX_VALUES)?;
                labels.insert(name, value);
            }
        }
        Ok(Series {
            owner: series.owner.clone(),
            session,
            labels: run_values::labels_value(&labels).unwrap_or_default(),
            agent: series.agent.clone(),
            model,
        })
    }

    /// Marks a value as used on this day; false if it is new and its owner has `max` others.
    fn keep(
        &mut self,
        sql: &mut Statements<'_>,
        (owner, name, value): (&str, &str, &str),
        max: usize,
        day: i64,
    ) -> rusqlite::Result<bool> {
        let params = named_params! {":owner": owner, ":name": name, ":value": value, ":day": day};
        if sql.touch_usage_value.execute(params)? > 0 {
            return Ok(true);
        }
        let counted = (owner.to_owned(), name.to_owned());
        let count = match self.value_counts.get(&counted) {
            Some(count) => *count,
            None => {
                let params = named_params! {":owner": owner, ":name": name};
                let count = sql.count_usage_values.query_row(params, |row| {
                    row.get::<_, i64>("count")
                        .map(|count| usize::try_from(count).unwrap_or(0))
                })?;
                count.unwrap_or(0)
            }
        };
        let is_kept = count < max;
        if is_kept {
            sql.insert_usage_value.execute(params)?;
        }
        self.value_counts
            .insert(counted, count + usize::from(is_kept));
        Ok(is_kept)
    }
}

/// A row as stored, empty if there is none.
fn read_row(sql: &mut Statements<'_>, key: RowKey) -> rusqlite::Result<UsageSums> {
    let statement = match key.is_day {
        true => &mut sql.find_usage_day,
        false => &mut sql.find_usage_quarter,
    };
    let params = named_params! {":start": key.start, ":series": key.series};
    let stored: Option<Vec<u8>> = statement.query_row(params, |row| row.get("sums"))?;
    Ok(match stored.map(|bytes| UsageSums::decode(&bytes)) {
        None => UsageSums::default(),
        Some(Ok(sums)) => sums,
        Some(Err(error)) => {
            // A damaged sum must not keep runs from ending.
            error!(error = %error, "The usage of a quarter hour or day is damaged, it is counted from zero: {error}");
            UsageSums::default()
        }
    })
}

/// Reads what is counted of an ended run, by position: a search for the names would take longer than the rest.
pub fn read_ended_row(row: &Row<'_>) -> rusqlite::Result<EndedRow> {
    Ok(EndedRow {
        root: read_root_row(row)?,
        is_child: row.get(4)?,
        agent: row.get(5)?,
        model: row.get(6)?,
        models: row.get(7)?,
        started_at: row.get(8)?,
    })
}

fn read_root_row(row: &Row<'_>) -> rusqlite::Result<RootRow> {
    Ok(RootRow {
        created_at: row.get(0)?,
        owner: row.get(1)?,
        session: row.get(2)?,
        labels: row.get(3)?,
    })
}
