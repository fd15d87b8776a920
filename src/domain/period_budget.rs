//! Budgets over time: how much the trees of a key, of an agent or with a label may use in a day or a month.

use std::collections::BTreeMap;

use jiff::tz::TimeZone;

use crate::domain::calendar::Period;
use crate::domain::usage::Cost;
use crate::domain::webhook::Webhook;

/// The event that its webhook receives.
pub const ALERT_EVENT: &str = "budget.alert";

/// A budget over time.
#[derive(Clone, Debug)]
pub struct PeriodBudget {
    pub name: String,
    /// Only trees that this key started.
    pub key: Option<String>,
    /// Only trees whose root is a run of this agent.
    pub agent: Option<String>,
    /// Only trees whose roots have all of these labels.
    pub labels: BTreeMap<String, String>,
    pub limit: PeriodLimit,
    pub per: Period,
    pub time_zone: TimeZone,
    /// The shares of the limit that cause an alert, in thousandths, ascending.
    pub alert_at: Vec<u32>,
    /// Receives the alerts.
    pub webhook: Option<Webhook>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeriodLimit {
    Usd(Cost),
    /// Input and output together.
    Tokens(u64),
}

impl PeriodBudget {
    /// Whether it holds for a tree with such a root.
    pub fn holds_for(
        &self,
        owner: Option<&str>,
        agent: &str,
        labels: &BTreeMap<String, String>,
    ) -> bool {
        self.key.as_deref().is_none_or(|key| owner == Some(key))
            && self.agent.as_deref().is_none_or(|it| it == agent)
            && self
                .labels
                .iter()
                .all(|(name, value)| labels.get(name) == Some(value))
    }
}

/// What a recorded reply adds to a budget over time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BudgetCharge {
    pub budget: String,
    /// The quarter hour in which it is recorded.
    pub quarter: i64,
    pub tokens: u64,
    /// Picodollars.
    pub cost: u64,
    /// The first quarter hour of the budget's period.
    pub period_start: i64,
    /// The shares, in thousandths, whose alerts the same write records.
    pub alerts: Vec<u32>,
}
