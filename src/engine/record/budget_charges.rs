//! Charges budgets over time with the write that records a reply, and adds the alerts that this causes.

use jiff::Timestamp;
use serde::Serialize;

use crate::domain::calendar::quarter_of;
use crate::domain::event::EventKind;
use crate::domain::period_budget::{ALERT_EVENT, BudgetCharge, PeriodLimit};
use crate::domain::run::{RunId, now};
use crate::domain::timestamp_text;
use crate::domain::usage::Cost;
use crate::engine::record::webhook_message;
use crate::engine::state::active_run::ActiveRun;
use crate::engine::state::budget::Amount;
use crate::engine::state::period_budgets::{BudgetAlert, ChargesInFlight};
use crate::record::entry::Entry;
use crate::store::{BudgetAlertId, Change, NewDelivery, StoreError};

/// Charges that a write is about to record. Most writes have none.
#[derive(Debug, Default)]
pub struct PendingCharge {
    amount: Amount,
    charges: Vec<BudgetCharge>,
    alerts: Vec<BudgetAlert>,
    root: Option<RunId>,
    in_flight: ChargesInFlight,
}

/// Adds the run's new usage to the change, and the events of its alerts before the run's last event.
pub fn charge(run: &ActiveRun, change: &mut Change, entries: &mut Vec<Entry>) -> PendingCharge {
    let progress = match change {
        Change::Progress(progress) => progress,
        Change::Finish(finished) => &mut finished.progress,
        _ => return PendingCharge::default(),
    };
    let budgets = &run.tree.period_budgets;
    if budgets.is_empty() {
        return PendingCharge::default();
    }
    let amount = run.take_uncharged(&progress.usage);
    if amount == Amount::default() {
        return PendingCharge::default();
    }
    let in_flight = budgets.begin_charges();
    let (charges, alerts) = budgets.charge(amount, now());
    progress.charges.clone_from(&charges);
    let is_end = |it: &Entry| matches!(it, Entry::Event(kind) if kind.name().is_terminal());
    let at = entries.iter().position(is_end).unwrap_or(entries.len());
    let alert_entries = alerts.iter().map(|alert| {
        Entry::Event(EventKind::BudgetAlert {
            budget: alert.status.settings.name.clone(),
            share: share(alert.share),
            resets_at: alert.status.resets_at,
        })
    });
    entries.splice(at..at, alert_entries);
    PendingCharge {
        amount,
        charges,
        alerts,
        root: Some(run.scope.root),
        in_flight,
    }
}

/// Takes the charges back if they could not be recorded. After an error of the store they may be recorded nevertheless.
pub fn settle(run: &ActiveRun, charge: PendingCharge, error: Option<&StoreError>) {
    if let Some(error) = error
        && !charge.charges.is_empty()
    {
        run.tree
            .period_budgets
            .revert(&charge.charges, error.may_be_recorded());
        run.restore_uncharged(charge.amount);
    }
    // Last, so that the amounts are not read from the store before.
    drop(charge.in_flight);
}

impl PendingCharge {
    /// The deliveries of its alerts to the budgets' webhooks.
    pub fn deliveries(&self) -> impl Iterator<Item = NewDelivery> {
        let root = self.root;
        self.alerts.iter().filter_map(move |alert| {
            let settings = &alert.status.settings;
            let created_at = now();
            let (in_usd, in_tokens) = match settings.limit {
                PeriodLimit::Usd(limit) => (Some(limit), None),
                PeriodLimit::Tokens(limit) => (None, Some(limit)),
            };
            let used = alert.status.used;
            let data = AlertData {
                budget: &settings.name,
                per: settings.per.as_str(),
                share: share(alert.share),
                limit_usd: in_usd.map(Cost::to_usd),
                used_usd: in_usd.map(|_| used.cost.to_usd()),
                limit_tokens: in_tokens,
                used_tokens: in_tokens.map(|_| used.tokens),
                since: alert.status.since,
                resets_at: alert.status.resets_at,
                run: root?,
            };
            let webhook = settings.webhook.clone()?.into();
            Some(NewDelivery {
                alert: Some(BudgetAlertId {
                    budget: settings.name.clone(),
                    period_start: quarter_of(alert.status.since),
                    share: alert.share,
                }),
                ..webhook_message::delivery(webhook, ALERT_EVENT, created_at, data)
            })
        })
    }
}

fn share(thousandths: u32) -> f64 {
    f64::from(thousandths) / 1000.0
}

#[derive(Serialize)]
struct AlertData<'a> {
    budget: &'a str,
    per: &'static str,
    share: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    limit_usd: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    used_usd: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    limit_tokens: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    used_tokens: Option<u64>,
    #[serde(serialize_with = "timestamp_text::serialize")]
    since: Timestamp,
    #[serde(serialize_with = "timestamp_text::serialize")]
    resets_at: Timestamp,
    /// The root run with which the share was reached.
    run: RunId,
}
