//! Adds ended runs to the sums of usage, in the transaction that ends them. The rows that this writer has written are cached and
//! belong to it alone, so they are written without being read.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use tokio_postgres::{Error, Row};
use uuid::Uuid;

use crate::domain::calendar::{QUARTERS_PER_DAY, quarter_of};
use crate::domain::run::RunId;
use crate::domain::usage_sums::UsageSums;
use crate::store::FinishedRun;
use crate::store::encoding::ended_runs::{
    EndedRow, EndedRun, LABEL_PREFIX, LABELS, MODEL, RootRow, SESSION, Series,
};
use crate::store::encoding::run_values;
use crate::store::postgres::connection::{Connection, Query};
use crate::store::postgres::statements::Sql;
use crate::store::sql::value::{free_text, values};
use crate::store::usage::{MAX_LABEL_NAMES, MAX_SESSIONS, MAX_VALUES, OTHER};

/// Rows, and series, that are cached.
const MAX_CACHED: usize = 16_384;
/// Rows of each table that one part of a trim removes.
const TRIM_ROWS: u32 = 256;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct RowKey {
    is_day: bool,
    start: i64,
    series: i64,
}

/// The writer's caches, which contain what its rows have after the transaction.
#[derive(Debug)]
pub struct UsageRollup {
    /// Who has written the rows. What is not cached belongs to an earlier writer, and stays as it is.
    writer: Uuid,
    rows: HashMap<RowKey, UsageSums>,
    /// Rows that the transaction has to write.
    changed: BTreeSet<RowKey>,
    /// The id of a series and the last day on which it is marked as used, by the values of runs.
    series: HashMap<Series, (i64, i64)>,
    /// The number of values, by owner and name.
    value_counts: HashMap<(String, String), u64>,
}

impl Default for UsageRollup {
    fn default() -> Self {
        Self {
            writer: RunId::new().0,
            rows: HashMap::new(),
            changed: BTreeSet::new(),
            series: HashMap::new(),
            value_counts: HashMap::new(),
        }
    }
}

/// Reads what the statement that ends a run returns.
pub fn ended_run(row: &Row, finished: &FinishedRun) -> Result<EndedRun, Error> {
    let text = |column: &str| -> Result<Option<String>, Error> {
        let bytes: Option<Vec<u8>> = row.try_get(column)?;
        Ok(bytes.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()))
    };
    let ended_row = EndedRow {
        is_child: row.try_get("child")?,
        agent: row.try_get("agent")?,
        model: text("model")?.unwrap_or_default(),
        models: row.try_get("model_usage")?,
        started_at: row.try_get("started_at")?,
        root: RootRow {
            created_at: row.try_get("created_at")?,
            owner: row.try_get("owner")?,
            session: text("session")?,
            labels: row.try_get("labels")?,
        },
    };
    Ok(ended_row.ended(finished))
}

impl UsageRollup {
    /// Discards what is cached of a transaction that was rolled back, or may have been.
    pub fn reset(&mut self) {
        *self = Self::default();
    }

    /// Adds a run that has just ended. [`UsageRollup::changes`] writes it.
    pub async fn count(&mut self, db: &Connection, ended: EndedRun) -> Result<(), Error> {
        let mut counted = Vec::new();
        let collected: Result<(), Error> = ended.for_each_sum(|quarter, series, sums| {
            counted.push((quarter, series.clone(), sums.clone()));
            Ok(())
        });
        collected?;
        for (quarter, series, sums) in counted {
            let day = quarter.div_euclid(QUARTERS_PER_DAY);
            let id = self.series_id(db, &series, day).await?;
            for (is_day, start) in [(false, quarter), (true, day)] {
                let key = RowKey {
                    is_day,
                    start,
                    series: id,
                };
                self.rows.entry(key).or_default().add(&sums);
                self.changed.insert(key);
            }
        }
        Ok(())
    }

    /// The statements that write the changed rows, before the commit.
    pub fn changes(&mut self) -> Vec<Query<'static>> {
        let changed = std::mem::take(&mut self.changed);
        let query = |key: RowKey| {
            let sql = match key.is_day {
                true => Sql::UpsertUsageDay,
                false => Sql::UpsertUsageQuarter,
            };
            let sums = self.rows.get(&key)?.encode();
            let values = values! {
                ":start": key.start, ":series": key.series, ":writer": self.writer, ":sums": sums,
            };
            Some(Query::new(sql, values.into()))
        };
        changed.into_iter().filter_map(query).collect()
    }

    /// Empties full caches, after a commit.
    pub fn shrink(&mut self) {
        if self.rows.len() > MAX_CACHED || self.series.len() > MAX_CACHED {
            self.reset();
        }
    }

    /// The statements that remove a part of what is older than this time. If one of them affects a row, the caches are to be
    /// reset.
    pub fn trim(before: jiff::Timestamp) -> Vec<Query<'static>> {
        let day = quarter_of(before).div_euclid(QUARTERS_PER_DAY);
        let first_quarter = day.saturating_mul(QUARTERS_PER_DAY);
        let parts = [
            (Sql::TrimUsageQuarters, first_quarter),
            (Sql::TrimUsageDays, day),
            (Sql::TrimUsageSeries, day),
            (Sql::TrimUsageValues, day),
        ];
        let query = |(sql, before)| {
            Query::new(sql, values! {":before": before, ":limit": TRIM_ROWS}.into())
        };
        parts.into_iter().map(query).collect()
    }

    /// The id of a series, which is marked as used on this day.
    async fn series_id(
        &mut self,
        db: &Connection,
        series: &Series,
        day: i64,
    ) -> Result<i64, Error> {
        if let Some((id, last_day)) = self.series.get(series)
            && day <= *last_day
        {
            return Ok(*id);
        }
        let counted = self.counted_series(db, series, day).await?;
        let values = values! {
            ":digest": counted.digest(),
            ":owner": &counted.owner,
            ":session": free_text(&counted.session),
            ":labels": &counted.labels,
            ":agent": &counted.agent,
            ":model": free_text(&counted.model),
            ":day": day,
        };
        let query = Query::new(Sql::UpsertUsageSeries, values.into());
        let inserted = db.execute(&query).await?;
        // An insert or update of a row that exists returns it.
        let id = inserted.rows.first().map_or(Ok(0), |row| row.try_get(0))?;
        self.series.insert(series.clone(), (id, day));
        Ok(id)
    }

    /// The series with its values replaced that are above the limits.
    async fn counted_series(
        &mut self,
        db: &Connection,
        series: &Series,
        day: i64,
    ) -> Result<Series, Error> {
        let owner = &series.owner;
        let session = self.keep(db, (owner, SESSION, &series.session), MAX_SESSIONS, day);
        let session = session.await?;
        let model = self.keep(db, (owner, MODEL, &series.model), MAX_VALUES, day);
        let model = model.await?;
        let mut labels = BTreeMap::new();
        for (name, value) in run_values::labels(Some(&series.labels)) {
            let kept_name = self.keep(db, (owner, LABELS, &name), MAX_LABEL_NAMES, day);
            if kept_name.await? == name {
                let values = format!("{LABEL_PREFIX}{name}");
                let value = self.keep(db, (owner, &values, &value), MAX_VALUES, day);
                labels.insert(name, value.await?);
            }
        }
        Ok(Series {
            owner: owner.clone(),
            session,
            labels: run_values::labels_value(&labels).unwrap_or_default(),
            agent: series.agent.clone(),
            model,
        })
    }

    /// Marks a value as used on this day and returns it; [`OTHER`] if it is new and its owner has `max` others.
    async fn keep(
        &mut self,
        db: &Connection,
        (owner, name, value): (&str, &str, &str),
        max: usize,
        day: i64,
    ) -> Result<String, Error> {
        if value.is_empty() {
            return Ok(String::new());
        }
        let columns = values! {
            ":owner": owner, ":name": free_text(name), ":value": free_text(value), ":day": day,
        };
        let touch = Query::new(Sql::TouchUsageValue, columns.to_vec());
        if db.execute(&touch).await?.affected > 0 {
            return Ok(value.to_owned());
        }
        let counted = (owner.to_owned(), name.to_owned());
        let count = match self.value_counts.get(&counted) {
            Some(count) => *count,
            None => {
                let columns = values! {":owner": owner, ":name": free_text(name)};
                let count = Query::new(Sql::CountUsageValues, columns.into());
                let found = db.execute(&count).await?;
                let count: i64 = found.rows.first().map_or(Ok(0), |row| row.try_get(0))?;
                count.unsigned_abs()
            }
        };
        let is_kept = count < max as u64;
        if is_kept {
            let insert = Query::new(Sql::InsertUsageValue, columns.into());
            db.execute(&insert).await?;
        }
        self.value_counts
            .insert(counted, count + u64::from(is_kept));
        Ok(if is_kept { value } else { OTHER }.to_owned())
    }
}
