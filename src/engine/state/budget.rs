//! The budgets of a tree: one account for the root, and one more for every child with limits of its own. Requests in
//! progress reserve what they may use.

use std::pin::pin;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::domain::agent::Budget;
use crate::domain::usage::{CallLimit, Cost, TreeUsage};

#[derive(Debug, Default)]
pub struct Budgets {
    accounts: Mutex<Vec<Account>>,
    settled: Notify,
}

/// The accounts that one run draws on: its root's, and those of its ancestors and itself that have limits. Most trees
/// have none.
pub type AccountIds = Vec<usize>;

/// A limit that is reached. Displays as the text of the run's failure.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("budget exceeded: used {used} of {limit} {unit}")]
pub struct BudgetExceeded {
    used: String,
    limit: String,
    unit: &'static str,
}

#[derive(Debug)]
struct Account {
    limits: Budget,
    used: Amount,
    reserved: Amount,
    /// How many batches have reserved of it.
    batches: usize,
    tool_calls: u64,
    runs: u64,
}

/// A refused tool call or run. The requesting run, and those above it that draw on the same account, stop at their next
/// check; calls that were already accepted continue.
#[derive(Clone, Debug, PartialEq)]
pub struct BudgetRefusal {
    pub account: usize,
    pub limit: CallLimit,
    pub exceeded: BudgetExceeded,
}

/// Tokens and cost, which are known only after a request.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Amount {
    /// Input and output together.
    pub tokens: u64,
    /// At configured prices; zero if no price is known.
    pub cost: Cost,
}

impl Amount {
    pub fn plus(self, other: Self) -> Self {
        Self {
            tokens: self.tokens.saturating_add(other.tokens),
            cost: Cost(self.cost.0.saturating_add(other.cost.0)),
        }
    }
}

/// The reservation of one request. Dropping it releases everything.
#[derive(Debug)]
pub struct Reservation<'a> {
    budgets: &'a Budgets,
    shares: Vec<(usize, Amount)>,
    is_batch: bool,
}

enum Attempt<'a> {
    Reserved(Reservation<'a>),
    /// Others reserve all that remains of an account.
    Full {
        by_batch: bool,
    },
}

impl BudgetRefusal {
    /// `None` if less than the limit is used.
    fn of(account: usize, used: u64, limit: CallLimit) -> Option<Self> {
        let (max, unit) = match limit {
            CallLimit::ToolCalls(max) => (max, "tool calls"),
            CallLimit::Runs(max) => (max, "runs"),
        };
        (used >= max).then(|| Self {
            account,
            limit,
            exceeded: exceeded(used, max, unit),
        })
    }
}

impl Budgets {
    /// Opens an account for a run with these limits, and returns it with those of its callers. `used` is the usage of
    /// its subtree in an earlier process.
    pub fn open_account(&self, limits: &Budget, callers: &[usize], used: &TreeUsage) -> AccountIds {
        let mut account_ids = callers.to_vec();
        if *limits != Budget::default() {
            let mut accounts = self.lock();
            account_ids.push(accounts.len());
            accounts.push(Account {
                limits: *limits,
                used: Amount {
                    tokens: used.usage.tokens.total(),
                    cost: used.usage.cost.unwrap_or_default(),
                },
                reserved: Amount::default(),
                batches: 0,
                tool_calls: used.usage.tool_calls,
                runs: used.runs,
            });
        }
        account_ids
    }

    pub fn tokens_used(&self, account: usize) -> u64 {
        self.lock()
            .get(account)
            .map_or(0, |account| account.used.tokens)
    }

    /// Whether the run may continue.
    pub fn check(&self, account_ids: &[usize]) -> Result<(), BudgetExceeded> {
        if account_ids.is_empty() {
            return Ok(());
        }
        let accounts = self.lock();
        account_ids.iter().try_for_each(|&id| accounts[id].check())
    }

    /// Reserves what a request may use, at most the remaining budget; waits while other requests reserve all of it. A
    /// single request is never refused for its size.
    pub async fn reserve(
        &self,
        account_ids: &[usize],
        requested: Amount,
        is_batch: bool,
    ) -> Result<Reservation<'_>, BudgetExceeded> {
        loop {
            // Subscribe first, then look: a settlement in between is not missed.
            let mut settled = pin!(self.settled.notified());
            settled.as_mut().enable();
            match self.try_reserve(account_ids, requested, is_batch)? {
                Attempt::Reserved(reservation) => return Ok(reservation),
                Attempt::Full { .. } => settled.await,
            }
        }
    }

    /// Like [`Budgets::reserve`], but does not wait for a batch: `None` if one has reserved a share of what is missing.
    pub async fn reserve_unless_batch(
        &self,
        account_ids: &[usize],
        requested: Amount,
        is_batch: bool,
    ) -> Result<Option<Reservation<'_>>, BudgetExceeded> {
        loop {
            let mut settled = pin!(self.settled.notified());
            settled.as_mut().enable();
            match self.try_reserve(account_ids, requested, is_batch)? {
                Attempt::Reserved(reservation) => return Ok(Some(reservation)),
                Attempt::Full { by_batch: true } => return Ok(None),
                Attempt::Full { by_batch: false } => settled.await,
            }
        }
    }

    /// Counts what a request has used.
    pub fn count_used(&self, account_ids: impl Iterator<Item = usize>, used: Amount) {
        let mut accounts = self.lock();
        for id in account_ids {
            let total = &mut accounts[id].used;
            total.tokens = total.tokens.saturating_add(used.tokens);
            total.cost.0 = total.cost.0.saturating_add(used.cost.0);
        }
    }

    /// Counts a tool call, or refuses it.
    pub fn count_tool_call(&self, account_ids: &[usize]) -> Result<(), BudgetRefusal> {
        self.count(account_ids, |account| {
            let limit = account.limits.max_tool_calls.map(CallLimit::ToolCalls);
            (&mut account.tool_calls, limit)
        })
    }

    /// Counts a run, or refuses it.
    pub fn count_run(&self, account_ids: &[usize]) -> Result<(), BudgetRefusal> {
        self.count(account_ids, |account| {
            let limit = account.limits.max_runs.map(CallLimit::Runs);
            (&mut account.runs, limit)
        })
    }

    /// The refusals of the accounts that are full now, the root's first.
    pub fn refusals(&self, account_ids: &[usize]) -> Vec<BudgetRefusal> {
        if account_ids.is_empty() {
            return Vec::new();
        }
        let accounts = self.lock();
        let full = account_ids.iter().flat_map(|&account| {
            let Account {
                limits,
                tool_calls,
                runs,
                ..
            } = &accounts[account];
            let counters = [
                (*tool_calls, limits.max_tool_calls.map(CallLimit::ToolCalls)),
                (*runs, limits.max_runs.map(CallLimit::Runs)),
            ];
            counters
                .into_iter()
                .filter_map(move |(used, limit)| BudgetRefusal::of(account, used, limit?))
        });
        full.collect()
    }

    fn count(
        &self,
        account_ids: &[usize],
        counter: impl for<'c> Fn(&'c mut Account) -> (&'c mut u64, Option<CallLimit>),
    ) -> Result<(), BudgetRefusal> {
        if account_ids.is_empty() {
            return Ok(());
        }
        let mut accounts = self.lock();
        for &account in account_ids {
            let (used, limit) = counter(&mut accounts[account]);
            if let Some(refusal) = limit.and_then(|it| BudgetRefusal::of(account, *used, it)) {
                return Err(refusal);
            }
        }
        for &id in account_ids {
            *counter(&mut accounts[id]).0 += 1;
        }
        Ok(())
    }

    fn try_reserve(
        &self,
        account_ids: &[usize],
        requested: Amount,
        is_batch: bool,
    ) -> Result<Attempt<'_>, BudgetExceeded> {
        let mut accounts = self.lock();
        let mut shares = Vec::with_capacity(account_ids.len());
        for &id in account_ids {
            accounts[id].check()?;
            match accounts[id].reservable(requested) {
                Some(share) => shares.push((id, share)),
                None => {
                    let by_batch = accounts[id].batches > 0;
                    return Ok(Attempt::Full { by_batch });
                }
            }
        }
        for &(id, share) in &shares {
            accounts[id].reserved.tokens += share.tokens;
            accounts[id].reserved.cost.0 += share.cost.0;
            accounts[id].batches += usize::from(is_batch);
        }
        Ok(Attempt::Reserved(Reservation {
            budgets: self,
            shares,
            is_batch,
        }))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Account>> {
        self.accounts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reservation<'_> {
    /// Counts the actual usage and releases the rest.
    pub fn settle(self, used: Amount) {
        let ids = self.shares.iter().map(|&(id, _)| id);
        self.budgets.count_used(ids, used);
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        if self.shares.is_empty() {
            return;
        }
        let mut accounts = self.budgets.lock();
        for &(id, share) in &self.shares {
            accounts[id].reserved.tokens -= share.tokens;
            accounts[id].reserved.cost.0 -= share.cost.0;
            accounts[id].batches -= usize::from(self.is_batch);
        }
        drop(accounts);
        self.budgets.settled.notify_waiters();
    }
}

impl Account {
    fn check(&self) -> Result<(), BudgetExceeded> {
        if let Some(limit) = self
            .limits
            .max_tokens
            .filter(|limit| self.used.tokens >= *limit)
        {
            return Err(exceeded(self.used.tokens, limit, "tokens"));
        }
        if let Some(limit) = self
            .limits
            .max_cost
            .filter(|limit| self.used.cost >= *limit)
        {
            return Err(exceeded(self.used.cost.to_usd(), limit.to_usd(), "USD"));
        }
        Ok(())
    }

    /// How much can be reserved now; `None` if others reserve all that remains.
    fn reservable(&self, requested: Amount) -> Option<Amount> {
        let available = |limit: Option<u64>, used: u64, reserved: u64, requested: u64| match limit {
            None => Some(0),
            Some(limit) => match limit.saturating_sub(used + reserved) {
                0 if reserved > 0 => None,
                remaining => Some(requested.min(remaining)),
            },
        };
        Some(Amount {
            tokens: available(
                self.limits.max_tokens,
                self.used.tokens,
                self.reserved.tokens,
                requested.tokens,
            )?,
            cost: Cost(available(
                self.limits.max_cost.map(|cost| cost.0),
                self.used.cost.0,
                self.reserved.cost.0,
                requested.cost.0,
            )?),
        })
    }
}

/// The error of a reached limit.
pub fn exceeded(used: impl ToString, limit: impl ToString, unit: &'static str) -> BudgetExceeded {
    BudgetExceeded {
        used: used.to_string(),
        limit: limit.to_string(),
        unit,
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::{Amount, Budgets};
    use crate::domain::agent::Budget;
    use crate::domain::usage::{Cost, TreeUsage};

    fn tokens(tokens: u64) -> Amount {
        Amount {
            tokens,
            cost: Cost(0),
        }
    }

    #[test]
    fn reservations_make_the_next_request_wait_until_settled() {
        let budgets = Budgets::default();
        let account_ids = budgets.open_account(
            &Budget {
                max_tokens: Some(100),
                ..Budget::default()
            },
            &[],
            &TreeUsage::default(),
        );
        // A request larger than the whole budget is accepted.
        let first = budgets
            .reserve(&account_ids, tokens(4000), false)
            .now_or_never()
            .expect("at once")
            .expect("within");
        let mut second = Box::pin(budgets.reserve(&account_ids, tokens(10), false));
        assert!(second.as_mut().now_or_never().is_none());
        first.settle(tokens(60));
        let second = second.now_or_never().expect("woken").expect("within");
        second.settle(tokens(50));
        let error = budgets.check(&account_ids).expect_err("spent");
        assert_eq!(error.to_string(), "budget exceeded: used 110 of 100 tokens");
    }

    #[test]
    fn a_request_learns_that_a_batch_has_reserved_the_budget() {
        let budgets = Budgets::default();
        let limits = Budget {
            max_tokens: Some(100),
            ..Budget::default()
        };
        let account_ids = budgets.open_account(&limits, &[], &TreeUsage::default());
        let reserve = |is_batch| {
            let reserved = budgets.reserve_unless_batch(&account_ids, tokens(200), is_batch);
            Box::pin(reserved)
        };
        let request = reserve(false).now_or_never().expect("at once");
        let request = request.expect("within").expect("free");
        let mut second = reserve(false);
        assert!(second.as_mut().now_or_never().is_none(), "no batch has it");
        drop(request);
        let batch = reserve(true).now_or_never().expect("at once");
        let batch = batch.expect("within").expect("free");
        let refused = second.now_or_never().expect("woken").expect("within");
        assert!(refused.is_none());
        drop(batch);
        let free = reserve(false).now_or_never().expect("at once");
        assert!(free.expect("within").is_some());
    }

    #[test]
    fn calls_and_runs_are_refused_past_the_limit() {
        let budgets = Budgets::default();
        let root = budgets.open_account(
            &Budget {
                max_tool_calls: Some(2),
                ..Budget::default()
            },
            &[],
            &TreeUsage::default(),
        );
        let child = budgets.open_account(
            &Budget {
                max_tool_calls: Some(1),
                ..Budget::default()
            },
            &root,
            &TreeUsage::default(),
        );
        assert!(budgets.count_tool_call(&child).is_ok());
        let refused = budgets
            .count_tool_call(&child)
            .expect_err("the child's own limit");
        assert_eq!(
            refused.exceeded.to_string(),
            "budget exceeded: used 1 of 1 tool calls"
        );
        assert!(
            !root.contains(&refused.account),
            "a child's budget bounds only its subtree"
        );
        assert!(budgets.count_tool_call(&root).is_ok());
        let refused = budgets
            .count_tool_call(&root)
            .expect_err("the root's limit");
        assert_eq!(vec![refused.account], root);
    }
}
