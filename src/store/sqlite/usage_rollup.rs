//! Adds ended runs to the sums of usage, in the transaction that ends them. Runs of one transaction that have the same values
//! are written as one row for their quarter hour and one for their day.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use jiff::Timestamp;
use rusqlite::{Row, named_params};
use tracing::error;

use crate::domain::calendar::{QUARTERS_PER_DAY, quarter_of};
use crate::domain::run::{RunId, Status};
use crate::domain::usage::{ModelUsage, Usage};
use crate::domain::usage_sums::UsageSums;
use crate::store::FinishedRun;
use crate::store::sqlite::rows;
use crate::store::sqlite::statements::Statements;
use crate::store::usage::{MAX_LABEL_NAMES, MAX_SESSIONS, MAX_VALUES, OTHER};

/// Rows, and series, that are cached.
const MAX_CACHED: usize = 4_096;
/// Rows of each table that one part of a trim removes.
const TRIM_ROWS: u32 = 256;

/// Names in `usage_values`: sessions, models, names of labels, and, with the label's name, the values of a label.
const SESSION: &str = "session";
const MODEL: &str = "model";
const LABELS: &str = "labels";
const LABEL_PREFIX: &str = "label.";

/// What is counted of an ended run.
pub struct EndedRow {
    is_child: bool,
    agent: String,
    model: String,
    models: Option<String>,
    started_at: Option<i64>,
    root: RootRow,
}

/// What a root's row has for all runs of its tree.
struct RootRow {
    created_at: i64,
    owner: Option<String>,
    session: Option<String>,
    labels: Option<String>,
}

/// An ended run, as it is counted.
pub struct EndedRun {
    pub row: EndedRow,
    pub status: Status,
    pub finished_at: i64,
    pub usage: Usage,
}

/// What a sum is about. Empty texts stand for absent values.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Series {
    owner: String,
    session: String,
    /// A JSON object with sorted names.
    labels: String,
    agent: String,
    model: String,
}

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

impl EndedRow {
    pub fn read(row: &Row<'_>) -> rusqlite::Result<Self> {
        Ok(Self {
            root: RootRow::read(row)?,
            is_child: row.get(4)?,
            agent: row.get(5)?,
            model: row.get(6)?,
            models: row.get(7)?,
            started_at: row.get(8)?,
        })
    }

    pub fn ended(self, finished: &FinishedRun) -> EndedRun {
        EndedRun {
            row: self,
            status: finished.outcome.status(),
            finished_at: finished.finished_at.as_millisecond(),
            usage: finished.progress.usage,
        }
    }
}

impl RootRow {
    /// By position: a search for the names would take longer than the rest.
    fn read(row: &Row<'_>) -> rusqlite::Result<Self> {
        Ok(Self {
            created_at: row.get(0)?,
            owner: row.get(1)?,
            session: row.get(2)?,
            labels: row.get(3)?,
        })
    }
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
        ended: EndedRun,
    ) -> rusqlite::Result<()> {
        let EndedRun {
            row,
            status,
            finished_at,
            usage,
        } = ended;
        let root_row = match row.is_child {
            false => row.root,
            true => {
                let params = named_params! {":id": rows::id_bytes(&root)};
                match sql.usage_root.query_row(params, RootRow::read)? {
                    Some(root_row) => root_row,
                    None => return Ok(()),
                }
            }
        };
        let created_at = Timestamp::from_millisecond(root_row.created_at).unwrap_or_default();
        let quarter = quarter_of(created_at);
        let mut models = rows::model_usage(row.models.as_deref());
        let mut own = own_sums(&row.model, usage, &mut models);
        own.runs = 1;
        own.roots = i128::from(!row.is_child);
        own.failed = i128::from(status == Status::Failed);
        own.cancelled = i128::from(status == Status::Cancelled);
        if let Some(started_at) = row.started_at {
            let milliseconds = finished_at.saturating_sub(started_at);
            own.durations.add(rows::unsigned(milliseconds));
        }
        let mut series = Series {
            owner: root_row.owner.unwrap_or_default(),
            session: root_row.session.unwrap_or_default(),
            labels: root_row.labels.unwrap_or_default(),
            agent: row.agent,
            model: row.model,
        };
        self.add(sql, quarter, &series, &own)?;
        for ModelUsage { model, usage } in models {
            series.model = model;
            self.add(sql, quarter, &series, &sums_of(&usage))?;
        }
        Ok(())
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

    /// The rows that wait for [`UsageRollup::flush`].
    pub fn pending(&self) -> usize {
        self.changed.len()
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
        for (name, value) in rows::labels(Some(&series.labels)) {
            if keep(LABELS, &name, MAX_LABEL_NAMES)? == name {
                let value = keep(&format!("{LABEL_PREFIX}{name}"), &value, MAX_VALUES)?;
                labels.insert(name, value);
            }
        }
        Ok(Series {
            owner: series.owner.clone(),
            session,
            labels: rows::labels_value(&labels).unwrap_or_default(),
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

/// The sums of a run's usage without that of other models than its last. Leaves those in `models`.
fn own_sums(model: &str, usage: Usage, models: &mut Vec<ModelUsage>) -> UsageSums {
    let mut own = sums_of(&usage);
    if models.is_empty() {
        return own;
    }
    let last = models.iter().position(|it| it.model == model);
    let last = last.map(|at| models.remove(at).usage).unwrap_or_default();
    own.priced = i128::from(last.cost.is_some());
    own.reasoning_tokens = last.tokens.reasoning.into();
    for other in models.iter() {
        let others = sums_of(&other.usage);
        own.input_tokens = (own.input_tokens - others.input_tokens).max(0);
        own.output_tokens = (own.output_tokens - others.output_tokens).max(0);
        own.cache_read_tokens = (own.cache_read_tokens - others.cache_read_tokens).max(0);
        own.cache_write_tokens = (own.cache_write_tokens - others.cache_write_tokens).max(0);
        own.model_calls = (own.model_calls - others.model_calls).max(0);
        own.cost = (own.cost - others.cost).max(0);
        own.unreported = (own.unreported - others.unreported).max(0);
    }
    own
}

fn sums_of(usage: &Usage) -> UsageSums {
    // As the run's row has them.
    let number = |count: u64| i128::from(rows::signed(count));
    let tokens = &usage.tokens;
    UsageSums {
        input_tokens: number(tokens.input),
        output_tokens: number(tokens.output),
        cache_read_tokens: number(tokens.cache_read),
        cache_write_tokens: number(tokens.cache_write),
        reasoning_tokens: number(tokens.reasoning),
        model_calls: number(usage.model_calls),
        tool_calls: number(usage.tool_calls),
        cost: usage.cost.map_or(0, |cost| number(cost.0)),
        priced: i128::from(usage.cost.is_some()),
        unreported: number(usage.unreported),
        ..UsageSums::default()
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
