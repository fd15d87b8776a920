//! The usage of ended runs, summed by quarter hours. The sums are written with the end of each run and
//! outlive the runs.

use futures_util::future::BoxFuture;
use jiff::Timestamp;
use jiff::civil::Date;
use jiff::tz::TimeZone;
use uuid::Uuid;

use crate::domain::glob::Matcher;
use crate::domain::usage_sums::UsageSums;
use crate::store::StoreError;
use crate::store::encoding::usage_report::{
    self, GroupSums, Groups, Part, ReportBuilder, SeriesRow,
};
use crate::store::engine::Engine;
use crate::store::reader::{ReadMode, Reader};
use crate::store::sql::row::{Row, StoreResult};
use crate::store::sql::value::params;
use crate::store::write_queue::job::Task;

/// Values of one label, and models, that are kept of the runs of one key; later ones are counted as [`OTHER`].
pub const MAX_VALUES: usize = 1_000;
/// Sessions that are kept of one key; later ones are counted as [`OTHER`].
pub const MAX_SESSIONS: usize = 10_000;
/// Names of labels that are kept of one key; runs are counted without the others.
pub const MAX_LABEL_NAMES: usize = 100;
/// Days of which the charges of a budget are kept: two of the longest periods.
pub const KEPT_BUDGET_DAYS: i64 = 62;
/// Old charges are removed only if there are others of at least so many days ago: a clock that is ahead for a while removes nothing.
pub const SETTLED_BUDGET_DAYS: i64 = 7;
/// Stands for all values above the limits.
pub const OTHER: &str = "(other)";

pub trait UsageLog: Send + Sync + 'static {
    /// Sums of the usage of ended runs. A run counts at the time at which its root was accepted.
    fn usage(&self, query: UsageQuery) -> BoxFuture<'_, Result<UsageReport, StoreError>>;

    /// What was charged to a budget within a period.
    fn budget_usage(
        &self,
        budget: String,
        period: BudgetPeriod,
    ) -> BoxFuture<'_, Result<BudgetUsage, StoreError>>;

    /// Removes a part of the sums of the days in UTC that ended before this time. Returns true if there may be more.
    fn trim_usage(&self, before: Timestamp) -> BoxFuture<'_, Result<bool, StoreError>>;
}

/// Budgets that several nodes charge.
pub trait SharedBudgets: Send + Sync + 'static {
    /// As [`UsageLog::budget_usage`], without what this process has charged.
    fn budget_usage_of_others(
        &self,
        budget: String,
        period: BudgetPeriod,
    ) -> BoxFuture<'_, Result<BudgetUsage, StoreError>>;

    /// Resolves once each charge that was enqueued before is recorded or has failed.
    fn settle_charges(&self) -> BoxFuture<'_, Result<(), StoreError>>;
}

/// What sums are grouped by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UsageDimension {
    /// Each run's own agent.
    Agent,
    /// The model of each reply; of a run's other numbers, the model of its last reply.
    Model,
    /// The value of the root's label with this name.
    Label(String),
    /// The root's session.
    Session,
    /// The name of the key that started the root.
    Key,
    /// The day on which the root was accepted.
    Day,
}

#[derive(Clone, Debug)]
pub struct UsageQuery {
    pub by: Vec<UsageDimension>,
    /// The zone of the days.
    pub time_zone: TimeZone,
    /// Rounded down to a quarter hour.
    pub since: Option<Timestamp>,
    /// Rounded up to a quarter hour.
    pub until: Option<Timestamp>,
    /// Only trees that this key started.
    pub owner: Option<String>,
    /// Only runs of this agent.
    pub agent: Option<String>,
    /// Only runs of agents that match; `None` means all.
    pub visible_agents: Option<Matcher>,
    /// Only trees whose roots have all of these labels.
    pub labels: Vec<(String, String)>,
    pub max_rows: usize,
}

#[derive(Clone, Debug, Default)]
pub struct UsageReport {
    /// Sorted by their values; `None` if there are more than [`UsageQuery::max_rows`].
    pub rows: Option<Vec<UsageRow>>,
    pub totals: UsageSums,
    /// The first quarter hour that is counted; `None` if nothing is kept of that time.
    pub since: Option<Timestamp>,
    /// The end of the last quarter hour that is counted.
    pub until: Option<Timestamp>,
}

/// The sums of one group.
#[derive(Clone, Debug)]
pub struct UsageRow {
    /// In the order of [`UsageQuery::by`], without the day; `None` for runs without such a value.
    pub values: Vec<Option<String>>,
    /// `None` unless the sums are by day.
    pub day: Option<Date>,
    pub sums: UsageSums,
}

/// A period of a budget, from quarter hour `start` to before `end`, both counted from 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BudgetPeriod {
    pub start: i64,
    pub end: i64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BudgetUsage {
    pub tokens: u64,
    /// Picodollars.
    pub cost: u64,
    /// The shares whose alerts are recorded, in thousandths.
    pub alerts: Vec<u32>,
}

const SERIES: &str = "SELECT id, owner, session, labels, agent, model FROM usage_series \
     WHERE (:owner::text IS NULL OR owner = :owner) AND (:agent::text IS NULL OR agent = :agent)";
const KEPT: &str = "SELECT (SELECT min(start) FROM usage_quarters) AS first, (SELECT max(start) FROM usage_quarters) AS last";

/// The sums of several parts, which are numbered from 1.
macro_rules! sums {
    ($table:literal) => {
        concat!(
            "SELECT {p.key + 1, u.series, u.sums FROM json_each(:starts) p CROSS JOIN json_each(:ends) e ON e.key = p.key \
             CROSS JOIN ", $table, " u ON u.start >= p.value AND u.start < e.value\
             |p.number, u.series, u.sums FROM unnest(:starts::bigint[], :ends::bigint[]) WITH ORDINALITY p (first, past, number) \
             CROSS JOIN LATERAL (SELECT series, sums FROM ", $table, " WHERE start >= p.first AND start < p.past OFFSET 0) u}"
        )
    };
}
const QUARTERS: &str = sums!("usage_quarters");
const DAYS: &str = sums!("usage_days");

/// The amounts of a period, to be added up, and a row with the shares whose alerts are recorded.
const BUDGET: &str = "SELECT {tokens, cost|least(coalesce(sum(tokens), 0), 9223372036854775807)::bigint AS tokens, \
     least(coalesce(sum(cost), 0), 9223372036854775807)::bigint AS cost}, NULL::text AS alerts FROM budget_usage \
     WHERE budget = :budget AND quarter >= :start AND quarter < :end {|AND writer IS DISTINCT FROM :left_out::uuid} \
     UNION ALL SELECT 0, 0, {json_group_array(share)|json_agg(share)::text} \
     FROM (SELECT share FROM budget_alerts WHERE budget = :budget AND period = :start ORDER BY share) a";

impl<E: Engine> UsageLog for E {
    fn usage(&self, query: UsageQuery) -> BoxFuture<'_, Result<UsageReport, StoreError>> {
        self.read(ReadMode::LongSnapshot, move |db| {
            Box::pin(async move { report(db, &query).await })
        })
    }

    fn budget_usage(
        &self,
        budget: String,
        period: BudgetPeriod,
    ) -> BoxFuture<'_, Result<BudgetUsage, StoreError>> {
        self.read(ReadMode::Statement, move |db| {
            Box::pin(async move { budget_usage(db, &budget, period, None).await })
        })
    }

    fn trim_usage(&self, before: Timestamp) -> BoxFuture<'_, Result<bool, StoreError>> {
        self.queue().is_positive(Task::TrimUsage(before))
    }
}

/// `left_out` is a writer whose charges do not count.
pub async fn budget_usage(
    db: &Reader,
    budget: &str,
    period: BudgetPeriod,
    left_out: Option<Uuid>,
) -> StoreResult<BudgetUsage> {
    let params = params! {
        ":budget": budget, ":start": period.start, ":end": period.end, ":left_out": left_out,
    };
    let mut usage = BudgetUsage::default();
    let add = |row: &Row<'_>| {
        let amount = |column| Ok(row.get::<Option<u64>>(column)?.unwrap_or_default());
        usage.tokens = usage.tokens.saturating_add(amount("tokens")?);
        usage.cost = usage.cost.saturating_add(amount("cost")?);
        let shares: Option<Vec<u32>> = row.json("alerts")?;
        usage.alerts.extend(shares.unwrap_or_default());
        Ok(())
    };
    db.query(BUDGET, params, add).await?;
    Ok(usage)
}

async fn report(db: &Reader, query: &UsageQuery) -> StoreResult<UsageReport> {
    let kept = db.first(KEPT, &[], |row| Ok((row.get("first")?, row.get("last")?)));
    let (first, last): (Option<i64>, Option<i64>) = kept.await?.unwrap_or_default();
    let kept = first.zip(last);
    let Some(period) = kept.and_then(|(first, last)| usage_report::period(query, first, last))
    else {
        return Ok(usage_report::empty_report());
    };
    let mut groups = Groups::default();
    let add = |row: &Row<'_>| {
        let series = SeriesRow {
            id: row.get("id")?,
            owner: row.get("owner")?,
            session: row.get("session")?,
            labels: row.get("labels")?,
            agent: row.get("agent")?,
            model: row.get("model")?,
        };
        groups.add(query, &series);
        Ok(())
    };
    let params = params! {":owner": query.owner.as_ref(), ":agent": query.agent.as_ref()};
    db.query(SERIES, params, add).await?;
    let segments = usage_report::segments(query, period);
    let mut parts = Vec::new();
    for (number, segment) in segments.iter().enumerate() {
        parts.extend(segment.parts().into_iter().map(|part| (number, part)));
    }
    let (days, quarters): (Vec<_>, Vec<_>) = parts.into_iter().partition(|(_, part)| part.is_day);
    let mut sums = vec![GroupSums::new(&groups); segments.len()];
    add_parts(db, QUARTERS, &quarters, &groups, &mut sums).await?;
    add_parts(db, DAYS, &days, &groups, &mut sums).await?;
    let mut builder = ReportBuilder::new(period);
    for (segment, sums) in segments.iter().zip(sums) {
        if !builder.add(query, &groups, segment, sums) {
            break;
        }
    }
    Ok(builder.finish(query))
}

/// Adds the sums of parts, each with the number of its segment, to those of their segments, in one statement.
async fn add_parts(
    db: &Reader,
    sql: &str,
    parts: &[(usize, Part)],
    groups: &Groups,
    sums: &mut [GroupSums],
) -> StoreResult<()> {
    if parts.is_empty() {
        return Ok(());
    }
    let starts: Vec<i64> = parts.iter().map(|(_, part)| part.start).collect();
    let ends: Vec<i64> = parts.iter().map(|(_, part)| part.end).collect();
    let add = |row: &Row<'_>| {
        // By position: a search for the names would take longer than the rest.
        let (segment, part) = &parts[row.get::<usize>(0)? - 1];
        let (series, stored) = (row.get(1)?, row.get(2).ok());
        groups.apply(&mut sums[*segment], part, series, stored)
    };
    let params = params! {":starts": starts, ":ends": ends};
    db.query(sql, params, add).await.map(drop)
}
