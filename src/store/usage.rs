//! The contract for the usage of ended runs, summed by quarter hours. The sums are written with the end of each run and
//! outlive the runs.

use futures_util::future::BoxFuture;
use jiff::Timestamp;
use jiff::civil::Date;
use jiff::tz::TimeZone;

use crate::domain::glob::Matcher;
use crate::domain::usage_sums::UsageSums;
use crate::store::StoreError;

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
