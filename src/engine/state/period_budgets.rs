//! Budgets over time: how much of each is used in its current period, and which alerts are recorded. The store has the
//! amounts by quarter hours; they are read at the start, and those of other nodes again and again.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use jiff::Timestamp;

use crate::domain::calendar::{Period, quarter_of, quarter_start};
use crate::domain::period_budget::{BudgetCharge, PeriodBudget, PeriodLimit};
use crate::domain::run::Run;
use crate::domain::usage::{Cost, Usage};
use crate::engine::state::budget::Amount;
use crate::store::StoreError;
use crate::store::usage::{BudgetPeriod, BudgetUsage, SharedBudgets, UsageLog};

/// Ledgers of other periods that are kept.
const MAX_FORMER: usize = 3;
/// How often a period is read while this process charges it.
const MAX_READS: u32 = 3;

/// A used-up budget refuses new root runs. Displays as the problem of the request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the budget {name} of this {} is used up; new runs are accepted from {resets_at} on",
    per.as_str()
)]
pub struct BudgetExhausted {
    pub name: String,
    pub per: Period,
    pub resets_at: Timestamp,
}

/// How much of a budget is used.
#[derive(Clone, Debug)]
pub struct BudgetStatus {
    pub settings: PeriodBudget,
    pub used: Amount,
    pub since: Timestamp,
    pub resets_at: Timestamp,
}

/// A share of a budget that a charge reaches first in its period.
#[derive(Clone, Debug)]
pub struct BudgetAlert {
    /// In thousandths.
    pub share: u32,
    pub status: BudgetStatus,
}

/// All configured budgets.
#[derive(Debug, Default)]
pub struct PeriodBudgets(Vec<Arc<Account>>);

/// The budgets that hold for one tree. Most trees have none.
#[derive(Clone, Debug, Default)]
pub struct TreeBudgets(Vec<Arc<Account>>);

#[derive(Debug)]
struct Account {
    settings: PeriodBudget,
    ledger: Mutex<Ledger>,
    /// Has a clone for each write with charges whose outcome is open.
    in_flight: Arc<()>,
}

/// Charges whose write is under way, until they are recorded or reverted.
#[derive(Debug, Default)]
pub struct ChargesInFlight {
    _accounts: Vec<Arc<()>>,
}

#[derive(Debug)]
struct Ledger {
    period: BudgetPeriod,
    /// What this process has charged.
    own: Amount,
    /// What others have charged, earlier processes among them.
    others: Amount,
    /// The shares whose alerts are recorded, in thousandths.
    alerted: Vec<u32>,
    /// Whether `others` was read from the store.
    is_read: bool,
    /// How many charges were reverted that the store may have, since `own` was known.
    doubts: u32,
    /// Those of other periods: a clock that was wrong for a while comes back to one of them.
    former: Vec<Ledger>,
}

impl Ledger {
    /// A ledger of a period in which nothing is charged, as far as is known.
    fn new(period: BudgetPeriod) -> Self {
        Self {
            period,
            own: Amount::default(),
            others: Amount::default(),
            alerted: Vec::new(),
            is_read: false,
            doubts: 0,
            former: Vec::new(),
        }
    }

    fn contains(&self, quarter: i64) -> bool {
        (self.period.start..self.period.end).contains(&quarter)
    }
}

impl PeriodBudgets {
    /// Reads what was used before.
    pub async fn load(
        budgets: &[PeriodBudget],
        store: &dyn UsageLog,
        now: Timestamp,
    ) -> Result<Self, StoreError> {
        let mut accounts = Vec::with_capacity(budgets.len());
        for settings in budgets {
            let ledger = Ledger::new(current_period(settings, now));
            accounts.push(Arc::new(Account {
                settings: settings.clone(),
                ledger: Mutex::new(ledger),
                in_flight: Arc::default(),
            }));
        }
        read_new_periods(&accounts, store, now).await?;
        Ok(Self(accounts))
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Reads what was used in a period that has begun since: nothing, unless the clock was wrong.
    pub async fn read_new_periods(
        &self,
        store: &dyn UsageLog,
        now: Timestamp,
    ) -> Result<(), StoreError> {
        read_new_periods(&self.0, store, now).await
    }

    /// Reads again what others have charged.
    pub async fn refresh(
        &self,
        store: &dyn SharedBudgets,
        now: Timestamp,
    ) -> Result<(), StoreError> {
        for account in &self.0 {
            let period = account.ledger(now).period;
            let name = account.settings.name.clone();
            let recorded = store.budget_usage_of_others(name, period).await?;
            let mut ledger = account.lock();
            if ledger.period.start != period.start {
                continue;
            }
            ledger.others = amount(&recorded);
            let new = recorded.alerts.into_iter();
            let new: Vec<u32> = new.filter(|it| !ledger.alerted.contains(it)).collect();
            ledger.alerted.extend(new);
        }
        Ok(())
    }

    /// Reads again what this process has charged, if the outcome of a charge is unknown and no other charge is under way.
    pub async fn resolve_doubts(
        &self,
        store: &dyn UsageLog,
        shared: &dyn SharedBudgets,
        now: Timestamp,
    ) -> Result<(), StoreError> {
        for account in &self.0 {
            let (period, own, doubts) = {
                let ledger = account.ledger(now);
                (ledger.period, ledger.own, ledger.doubts)
            };
            if doubts == 0 || account.has_charges_in_flight() {
                continue;
            }
            // `own` has charges that only wait for the writer, too.
            shared.settle_charges().await?;
            let name = &account.settings.name;
            let others = shared.budget_usage_of_others(name.clone(), period).await?;
            let all = store.budget_usage(name.clone(), period).await?;
            let again = shared.budget_usage_of_others(name.clone(), period).await?;
            let others = amount(&others);
            let mut ledger = account.lock();
            // What was charged between the reads is in some of them only.
            let is_unchanged = ledger.period.start == period.start
                && (ledger.own, ledger.doubts) == (own, doubts)
                && others == amount(&again)
                && !account.has_charges_in_flight();
            if is_unchanged {
                ledger.own = Amount {
                    tokens: all.tokens.saturating_sub(others.tokens),
                    cost: Cost(all.cost.saturating_sub(others.cost.0)),
                };
                ledger.others = others;
                ledger.doubts = 0;
            }
        }
        Ok(())
    }

    /// The budgets that hold for a tree, by what its root is.
    pub fn of_root(
        &self,
        owner: Option<&str>,
        agent: &str,
        labels: &BTreeMap<String, String>,
    ) -> TreeBudgets {
        let holds = |account: &&Arc<Account>| account.settings.holds_for(owner, agent, labels);
        TreeBudgets(self.0.iter().filter(holds).cloned().collect())
    }

    /// The budgets that hold for the tree of this root.
    pub fn of_run(&self, root: &Run) -> TreeBudgets {
        self.of_root(root.owner.as_deref(), &root.agent, &root.labels)
    }

    pub fn statuses(&self, now: Timestamp) -> Vec<BudgetStatus> {
        let accounts = self.0.iter();
        accounts.map(|account| account.status(now)).collect()
    }
}

impl TreeBudgets {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The names of the budgets in USD.
    pub fn in_usd(&self) -> impl Iterator<Item = &str> {
        let accounts = self.0.iter().map(|account| &account.settings);
        let in_usd = accounts.filter(|it| matches!(it.limit, PeriodLimit::Usd(_)));
        in_usd.map(|settings| settings.name.as_str())
    }

    /// See [`PeriodBudgets::read_new_periods`].
    pub async fn read_new_periods(
        &self,
        store: &dyn UsageLog,
        now: Timestamp,
    ) -> Result<(), StoreError> {
        read_new_periods(&self.0, store, now).await
    }

    /// Whether a new root run may start. The error is that of the budget whose period ends last.
    pub fn check(&self, now: Timestamp) -> Result<(), BudgetExhausted> {
        let statuses = self.0.iter().map(|account| account.status(now));
        let used_up = statuses.filter(|status| status.share() >= 1000);
        match used_up.max_by_key(|status| status.resets_at) {
            None => Ok(()),
            Some(status) => Err(BudgetExhausted {
                name: status.settings.name,
                per: status.settings.per,
                resets_at: status.resets_at,
            }),
        }
    }

    /// To be called before [`TreeBudgets::charge`], and kept until the charges are recorded or reverted.
    pub fn begin_charges(&self) -> ChargesInFlight {
        let accounts = self.0.iter().map(|account| Arc::clone(&account.in_flight));
        ChargesInFlight {
            _accounts: accounts.collect(),
        }
    }

    /// Counts what is about to be recorded. Returns what the write has to record, and the alerts that it causes.
    pub fn charge(&self, used: Amount, now: Timestamp) -> (Vec<BudgetCharge>, Vec<BudgetAlert>) {
        let mut alerts = Vec::new();
        let charges = self.0.iter().map(|account| {
            let mut ledger = account.ledger(now);
            ledger.own = ledger.own.plus(used);
            let status = account.status_of(&ledger);
            let reached = account.settings.alert_at.iter().copied();
            let reached = reached.filter(|share| status.share() >= u64::from(*share));
            let new: Vec<u32> = reached.filter(|it| !ledger.alerted.contains(it)).collect();
            ledger.alerted.extend(&new);
            alerts.extend(new.iter().map(|share| BudgetAlert {
                share: *share,
                status: status.clone(),
            }));
            BudgetCharge {
                budget: account.settings.name.clone(),
                quarter: quarter_of(now),
                tokens: used.tokens,
                cost: used.cost.0,
                period_start: ledger.period.start,
                alerts: new,
            }
        });
        let charges = charges.collect();
        (charges, alerts)
    }

    /// Takes back what could not be recorded, or what may be recorded: then nobody knows until the store is read.
    pub fn revert(&self, charges: &[BudgetCharge], may_be_recorded: bool) {
        for (account, charge) in self.0.iter().zip(charges) {
            let mut current = account.lock();
            let is_of = |ledger: &Ledger| ledger.period.start == charge.period_start;
            let ledger = match is_of(&current) {
                true => Some(&mut *current),
                false => current.former.iter_mut().find(|it| is_of(it)),
            };
            let Some(ledger) = ledger else {
                continue;
            };
            ledger.doubts = ledger.doubts.saturating_add(u32::from(may_be_recorded));
            ledger.own.tokens = ledger.own.tokens.saturating_sub(charge.tokens);
            ledger.own.cost.0 = ledger.own.cost.0.saturating_sub(charge.cost);
            ledger
                .alerted
                .retain(|share| !charge.alerts.contains(share));
        }
    }
}

/// What was used since an earlier record of the same run.
pub fn amount_since(before: &Usage, now: &Usage) -> Amount {
    let cost = |usage: &Usage| usage.cost.unwrap_or_default().0;
    Amount {
        tokens: now.tokens.total().saturating_sub(before.tokens.total()),
        cost: Cost(cost(now).saturating_sub(cost(before))),
    }
}

impl Account {
    fn status(&self, now: Timestamp) -> BudgetStatus {
        self.status_of(&self.ledger(now))
    }

    fn status_of(&self, ledger: &Ledger) -> BudgetStatus {
        BudgetStatus {
            settings: self.settings.clone(),
            used: ledger.own.plus(ledger.others),
            since: quarter_start(ledger.period.start),
            resets_at: quarter_start(ledger.period.end),
        }
    }

    fn has_charges_in_flight(&self) -> bool {
        Arc::strong_count(&self.in_flight) > 1
    }

    /// The ledger of the period that contains this time.
    fn ledger(&self, now: Timestamp) -> MutexGuard<'_, Ledger> {
        let mut ledger = self.lock();
        let quarter = quarter_of(now);
        if !ledger.contains(quarter) {
            let mut former = std::mem::take(&mut ledger.former);
            let known = former.iter().position(|it| it.contains(quarter));
            let next = match known {
                Some(at) => former.remove(at),
                None => Ledger::new(current_period(&self.settings, now)),
            };
            former.push(std::mem::replace(&mut *ledger, next));
            if former.len() > MAX_FORMER {
                former.remove(0);
            }
            ledger.former = former;
        }
        ledger
    }

    fn lock(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BudgetStatus {
    /// The used part of the limit in thousandths, rounded down; of a limit of 0 all is used.
    pub fn share(&self) -> u64 {
        let (used, limit) = match self.settings.limit {
            PeriodLimit::Usd(limit) => (self.used.cost.0, limit.0),
            PeriodLimit::Tokens(limit) => (self.used.tokens, limit),
        };
        let share = (u128::from(used) * 1000).checked_div(u128::from(limit));
        share.map_or(1000, |share| u64::try_from(share).unwrap_or(u64::MAX))
    }
}

async fn read_new_periods(
    accounts: &[Arc<Account>],
    store: &dyn UsageLog,
    now: Timestamp,
) -> Result<(), StoreError> {
    for account in accounts {
        for attempt in 1..=MAX_READS {
            let (period, own) = {
                let ledger = account.ledger(now);
                if ledger.is_read {
                    break;
                }
                (ledger.period, ledger.own)
            };
            let recorded = store.budget_usage(account.settings.name.clone(), period);
            let recorded = recorded.await?;
            let mut ledger = account.lock();
            if ledger.period.start != period.start {
                break;
            }
            // What this process charges meanwhile may be in it, or not.
            if ledger.own != own && attempt < MAX_READS {
                continue;
            }
            ledger.others = Amount {
                tokens: recorded.tokens.saturating_sub(ledger.own.tokens),
                cost: Cost(recorded.cost.saturating_sub(ledger.own.cost.0)),
            };
            let new = recorded.alerts.into_iter();
            let new: Vec<u32> = new.filter(|it| !ledger.alerted.contains(it)).collect();
            ledger.alerted.extend(new);
            ledger.is_read = true;
        }
    }
    Ok(())
}

fn amount(recorded: &BudgetUsage) -> Amount {
    Amount {
        tokens: recorded.tokens,
        cost: Cost(recorded.cost),
    }
}

fn current_period(settings: &PeriodBudget, now: Timestamp) -> BudgetPeriod {
    let (start, end) = settings.per.quarters(&settings.time_zone, now);
    BudgetPeriod { start, end }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::atomic::{AtomicU64, Ordering};

    use futures_util::FutureExt;
    use futures_util::future::BoxFuture;
    use jiff::Timestamp;
    use jiff::tz::TimeZone;

    use super::{Amount, PeriodBudgets};
    use crate::domain::calendar::{Period, quarter_of};
    use crate::domain::period_budget::{PeriodBudget, PeriodLimit};
    use crate::store::StoreError;
    use crate::store::usage::{
        BudgetPeriod, BudgetUsage, SharedBudgets, UsageLog, UsageQuery, UsageReport,
    };

    /// Has tokens that were charged on one day.
    struct Charged {
        at: Timestamp,
        tokens: AtomicU64,
        /// Those of charges that wait for the writer.
        enqueued: AtomicU64,
    }

    fn charged(at: Timestamp, tokens: u64) -> Charged {
        Charged {
            at,
            tokens: AtomicU64::new(tokens),
            enqueued: AtomicU64::default(),
        }
    }

    impl UsageLog for Charged {
        fn usage(&self, _: UsageQuery) -> BoxFuture<'_, Result<UsageReport, StoreError>> {
            async { Err(StoreError::Closed) }.boxed()
        }

        fn budget_usage(
            &self,
            _: String,
            period: BudgetPeriod,
        ) -> BoxFuture<'_, Result<BudgetUsage, StoreError>> {
            let is_in = (period.start..period.end).contains(&quarter_of(self.at));
            let tokens = match is_in {
                true => self.tokens.load(Ordering::Relaxed),
                false => 0,
            };
            let usage = BudgetUsage {
                tokens,
                ..BudgetUsage::default()
            };
            async { Ok(usage) }.boxed()
        }

        fn trim_usage(&self, _: Timestamp) -> BoxFuture<'_, Result<bool, StoreError>> {
            async { Err(StoreError::Closed) }.boxed()
        }
    }

    /// Others have charged nothing.
    impl SharedBudgets for Charged {
        fn budget_usage_of_others(
            &self,
            _: String,
            _: BudgetPeriod,
        ) -> BoxFuture<'_, Result<BudgetUsage, StoreError>> {
            async { Ok(BudgetUsage::default()) }.boxed()
        }

        fn settle_charges(&self) -> BoxFuture<'_, Result<(), StoreError>> {
            let enqueued = self.enqueued.swap(0, Ordering::Relaxed);
            self.tokens.fetch_add(enqueued, Ordering::Relaxed);
            async { Ok(()) }.boxed()
        }
    }

    fn at(time: &str) -> Timestamp {
        time.parse().expect("a time")
    }

    fn daily() -> PeriodBudget {
        PeriodBudget {
            name: "all".to_owned(),
            key: None,
            agent: None,
            labels: BTreeMap::new(),
            limit: PeriodLimit::Tokens(100),
            per: Period::Day,
            time_zone: TimeZone::UTC,
            alert_at: Vec::new(),
            webhook: None,
        }
    }

    #[tokio::test]
    async fn a_clock_that_comes_back_finds_what_was_used() {
        let (today, ahead) = (at("2026-05-05T10:00:00Z"), at("2026-07-07T10:00:00Z"));
        let store = charged(today, 60);
        let budgets = PeriodBudgets::load(&[daily()], &store, today).await;
        let budgets = budgets.expect("a read");
        let tree = budgets.of_root(None, "solo", &BTreeMap::new());
        let used = |tokens| Amount {
            tokens,
            ..Amount::default()
        };
        tree.charge(used(50), today);
        assert!(tree.check(today).is_err());
        assert!(tree.check(ahead).is_ok());
        tree.charge(used(1), ahead);
        assert!(tree.check(today).is_err(), "nothing is forgotten");
        assert_eq!(budgets.statuses(ahead)[0].used.tokens, 1);
    }

    #[tokio::test]
    async fn a_process_that_started_with_a_wrong_clock_reads_what_was_used() {
        let (today, past) = (at("2026-05-05T10:00:00Z"), at("1970-01-01T00:00:10Z"));
        let store = charged(today, 60);
        let budgets = PeriodBudgets::load(&[daily()], &store, past).await;
        let budgets = budgets.expect("a read");
        let tree = budgets.of_root(None, "solo", &BTreeMap::new());
        let used = Amount {
            tokens: 40,
            ..Amount::default()
        };
        tree.charge(used, today);
        store.tokens.fetch_add(40, Ordering::Relaxed);
        tree.read_new_periods(&store, today).await.expect("a read");
        assert_eq!(budgets.statuses(today)[0].used.tokens, 100);
        assert!(tree.check(today).is_err());
    }

    #[tokio::test]
    async fn a_charge_whose_answer_was_lost_counts_once_the_store_is_read() {
        let today = at("2026-05-05T10:00:00Z");
        let store = charged(today, 0);
        let budgets = PeriodBudgets::load(&[daily()], &store, today).await;
        let budgets = budgets.expect("a read");
        let tree = budgets.of_root(None, "solo", &BTreeMap::new());
        let used = Amount {
            tokens: 40,
            ..Amount::default()
        };
        let read_tokens = async || {
            let read = budgets.resolve_doubts(&store, &store, today).await;
            read.expect("a read");
            budgets.statuses(today)[0].used.tokens
        };
        let (charges, _) = tree.charge(used, today);
        store.tokens.fetch_add(40, Ordering::Relaxed);
        tree.revert(&charges, true);
        let in_flight = tree.begin_charges();
        assert_eq!(read_tokens().await, 0, "another charge may be in the store");
        drop(in_flight);
        assert_eq!(read_tokens().await, 40);
        let (charges, _) = tree.charge(used, today);
        tree.revert(&charges, false);
        assert_eq!(read_tokens().await, 40);
        let (charges, _) = tree.charge(used, today);
        tree.charge(used, today);
        store.enqueued.fetch_add(40, Ordering::Relaxed);
        tree.revert(&charges, true);
        assert_eq!(read_tokens().await, 80, "the other one is enqueued");
    }
}
