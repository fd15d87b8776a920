//! The money box of a tree: one shared account for the root and one more for every child with limits of its own.
//! Requests in flight reserve what they may use. Knows no provider and no conversation.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::domain::agent::Budget;
use crate::domain::usage::{Cost, TreeUsage};

/// All accounts of one tree.
#[derive(Debug, Default)]
pub struct Budgets {
    accounts: Mutex<Vec<Account>>,
    settled: Notify,
}

/// The accounts that one run draws on: its root's, and those of ancestors with limits and its own. Most trees have
/// none at all, and then nothing here costs anything.
pub type Accounts = Vec<usize>;

/// A limit that is reached. Displays as the contract's text.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("budget exceeded: used {used} of {limit} {unit}")]
pub struct Exceeded {
    used: String,
    limit: String,
    unit: &'static str,
}

#[derive(Debug)]
struct Account {
    limits: Budget,
    used: Amount,
    reserved: Amount,
    tool_calls: u64,
    runs: u64,
}

/// A tool call or a run that was refused. The run that wished for it stops at its next check, and with it those above
/// it that draw on the same account; who was let in before goes on.
#[derive(Clone, Debug, PartialEq)]
pub struct Refused {
    /// The account that is full.
    pub account: usize,
    /// Its limit.
    pub exceeded: Exceeded,
}

/// Tokens and money, the two things that are known only after a request.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Amount {
    /// Input and output together.
    pub tokens: u64,
    /// At configured prices; zero where no price is known.
    pub cost: Cost,
}

/// What one request in flight has set aside. Dropping it gives everything back.
#[derive(Debug)]
pub struct Reservation<'a> {
    budgets: &'a Budgets,
    parts: Vec<(usize, Amount)>,
}

impl Budgets {
    /// Opens an account for a run whose limits are these, beside those that its caller draws on. `used` is what its
    /// subtree has used before, in another process.
    pub fn open(&self, limits: &Budget, callers: &[usize], used: &TreeUsage) -> Accounts {
        let mut drawn = callers.to_vec();
        if *limits != Budget::default() {
            let mut accounts = self.lock();
            drawn.push(accounts.len());
            accounts.push(Account {
                limits: *limits,
                used: Amount {
                    tokens: used.usage.tokens.total(),
                    cost: used.usage.cost.unwrap_or_default(),
                },
                reserved: Amount::default(),
                tool_calls: used.usage.tool_calls,
                runs: used.runs,
            });
        }
        drawn
    }

    /// Tokens used of an account.
    pub fn tokens(&self, account: usize) -> u64 {
        self.lock()
            .get(account)
            .map_or(0, |account| account.used.tokens)
    }

    /// Whether the run may go on.
    pub fn check(&self, drawn: &[usize]) -> Result<(), Exceeded> {
        if drawn.is_empty() {
            return Ok(());
        }
        let accounts = self.lock();
        drawn.iter().try_for_each(|&at| accounts[at].check())
    }

    /// Sets aside what a request may use, at most what is left; waits while other requests hold all that is left.
    /// A single request is never refused for its size.
    pub async fn reserve(
        &self,
        drawn: &[usize],
        wanted: Amount,
    ) -> Result<Reservation<'_>, Exceeded> {
        if drawn.is_empty() {
            return Ok(Reservation {
                budgets: self,
                parts: Vec::new(),
            });
        }
        loop {
            // Subscribe first, then look: a settlement between the two is not missed.
            let mut settled = std::pin::pin!(self.settled.notified());
            settled.as_mut().enable();
            if let Some(parts) = self.try_reserve(drawn, wanted)? {
                return Ok(Reservation {
                    budgets: self,
                    parts,
                });
            }
            settled.await;
        }
    }

    /// Counts a tool call, or refuses it.
    pub fn take_tool_call(&self, drawn: &[usize]) -> Result<(), Refused> {
        self.take(drawn, |account| {
            (
                &mut account.tool_calls,
                account.limits.max_tool_calls,
                "tool calls",
            )
        })
    }

    /// Counts a run, or refuses it.
    pub fn take_run(&self, drawn: &[usize]) -> Result<(), Refused> {
        self.take(drawn, |account| {
            (&mut account.runs, account.limits.max_runs, "runs")
        })
    }

    /// The refusals of whatever is counted and full now, the nearest to the root first.
    pub fn refusals(&self, drawn: &[usize]) -> Vec<Refused> {
        if drawn.is_empty() {
            return Vec::new();
        }
        let accounts = self.lock();
        let full = drawn.iter().flat_map(|&account| {
            let Account {
                limits,
                tool_calls,
                runs,
                ..
            } = &accounts[account];
            let counted = [
                (*tool_calls, limits.max_tool_calls, "tool calls"),
                (*runs, limits.max_runs, "runs"),
            ];
            counted.into_iter().filter_map(move |(used, limit, unit)| {
                let limit = limit.filter(|limit| used >= *limit)?;
                let exceeded = exceeded(used, limit, unit);
                Some(Refused { account, exceeded })
            })
        });
        full.collect()
    }

    fn take(
        &self,
        drawn: &[usize],
        counter: impl for<'c> Fn(&'c mut Account) -> (&'c mut u64, Option<u64>, &'static str),
    ) -> Result<(), Refused> {
        if drawn.is_empty() {
            return Ok(());
        }
        let mut accounts = self.lock();
        for &account in drawn {
            let (used, limit, unit) = counter(&mut accounts[account]);
            if let Some(limit) = limit.filter(|limit| *used >= *limit) {
                let exceeded = exceeded(*used, limit, unit);
                return Err(Refused { account, exceeded });
            }
        }
        for &at in drawn {
            *counter(&mut accounts[at]).0 += 1;
        }
        Ok(())
    }

    fn try_reserve(
        &self,
        drawn: &[usize],
        wanted: Amount,
    ) -> Result<Option<Vec<(usize, Amount)>>, Exceeded> {
        let mut accounts = self.lock();
        let mut parts = Vec::with_capacity(drawn.len());
        for &at in drawn {
            accounts[at].check()?;
            match accounts[at].share(wanted) {
                Some(share) => parts.push((at, share)),
                None => return Ok(None),
            }
        }
        for &(at, share) in &parts {
            accounts[at].reserved.tokens += share.tokens;
            accounts[at].reserved.cost.0 += share.cost.0;
        }
        Ok(Some(parts))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Account>> {
        self.accounts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reservation<'_> {
    /// Books what the request really used and gives the rest back.
    pub fn settle(self, used: Amount) {
        let mut accounts = self.budgets.lock();
        for &(at, _) in &self.parts {
            accounts[at].used.tokens = accounts[at].used.tokens.saturating_add(used.tokens);
            accounts[at].used.cost.0 = accounts[at].used.cost.0.saturating_add(used.cost.0);
        }
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        if self.parts.is_empty() {
            return;
        }
        let mut accounts = self.budgets.lock();
        for &(at, share) in &self.parts {
            accounts[at].reserved.tokens -= share.tokens;
            accounts[at].reserved.cost.0 -= share.cost.0;
        }
        drop(accounts);
        self.budgets.settled.notify_waiters();
    }
}

impl Account {
    fn check(&self) -> Result<(), Exceeded> {
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
            return Err(exceeded(self.used.cost.usd(), limit.usd(), "USD"));
        }
        Ok(())
    }

    /// How much of `wanted` can be set aside now; none where others hold all that is left.
    fn share(&self, wanted: Amount) -> Option<Amount> {
        let part = |limit: Option<u64>, used: u64, reserved: u64, wanted: u64| match limit {
            None => Some(0),
            Some(limit) => match limit.saturating_sub(used + reserved) {
                0 if reserved > 0 => None,
                left => Some(wanted.min(left)),
            },
        };
        Some(Amount {
            tokens: part(
                self.limits.max_tokens,
                self.used.tokens,
                self.reserved.tokens,
                wanted.tokens,
            )?,
            cost: Cost(part(
                self.limits.max_cost.map(|cost| cost.0),
                self.used.cost.0,
                self.reserved.cost.0,
                wanted.cost.0,
            )?),
        })
    }
}

/// A limit that is reached, of something that no account counts.
pub fn exceeded(used: impl ToString, limit: impl ToString, unit: &'static str) -> Exceeded {
    Exceeded {
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
    fn requests_in_flight_hold_what_is_left_and_the_next_waits_for_them() {
        let budgets = Budgets::default();
        let drawn = budgets.open(
            &Budget {
                max_tokens: Some(100),
                ..Budget::default()
            },
            &[],
            &TreeUsage::default(),
        );
        // A request larger than the whole budget is let through.
        let first = budgets
            .reserve(&drawn, tokens(4000))
            .now_or_never()
            .expect("at once")
            .expect("within");
        let mut second = Box::pin(budgets.reserve(&drawn, tokens(10)));
        assert!(second.as_mut().now_or_never().is_none());
        first.settle(tokens(60));
        let second = second.now_or_never().expect("woken").expect("within");
        second.settle(tokens(50));
        let error = budgets.check(&drawn).expect_err("spent");
        assert_eq!(error.to_string(), "budget exceeded: used 110 of 100 tokens");
    }

    #[test]
    fn counted_things_are_refused_past_the_limit() {
        let budgets = Budgets::default();
        let root = budgets.open(
            &Budget {
                max_tool_calls: Some(2),
                ..Budget::default()
            },
            &[],
            &TreeUsage::default(),
        );
        let child = budgets.open(
            &Budget {
                max_tool_calls: Some(1),
                ..Budget::default()
            },
            &root,
            &TreeUsage::default(),
        );
        assert!(budgets.take_tool_call(&child).is_ok());
        let refused = budgets
            .take_tool_call(&child)
            .expect_err("the child's own limit");
        assert_eq!(
            refused.exceeded.to_string(),
            "budget exceeded: used 1 of 1 tool calls"
        );
        assert!(
            !root.contains(&refused.account),
            "a child's budget bounds only its subtree"
        );
        assert!(budgets.take_tool_call(&root).is_ok());
        let refused = budgets.take_tool_call(&root).expect_err("the root's limit");
        assert_eq!(vec![refused.account], root);
    }
}
