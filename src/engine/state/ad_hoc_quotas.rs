//! Quotas of a tree's children without a name: how many there were, how long they took, what they used. Pure but for
//! the clock; knows no run's record.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::OnceCell;
use tokio::time::Instant;

use crate::domain::agent::{Budget, SubagentSettings};
use crate::domain::run::RunId;
use crate::domain::usage::{TokenUsage, TreeUsage, Usage};
use crate::engine::state::budget::Budgets;

/// What the unnamed children of one tree have used, whoever called them.
#[derive(Debug, Default)]
pub struct AdHocQuotas {
    usage: Mutex<QuotaUsage>,
    /// What an earlier process used is read once, when somebody first asks.
    pub restored: OnceCell<()>,
}

#[derive(Debug, Default)]
struct QuotaUsage {
    executions: u64,
    /// Of those that have ended or come to rest.
    elapsed: Duration,
    /// Since when; none while it waits for a person's word.
    running_since: BTreeMap<RunId, Option<Instant>>,
    /// In an earlier process.
    restored_tokens: u64,
    /// Where the tokens of all of them are counted.
    token_account: Option<usize>,
    /// Where they are bounded, by the bound.
    limited_accounts: BTreeMap<u64, usize>,
}

/// One child whose time runs until this is dropped.
pub struct ChildTimer<'a> {
    quotas: &'a AdHocQuotas,
    run: RunId,
}

impl AdHocQuotas {
    /// Whether another child may start within all these bounds.
    ///
    /// # Errors
    /// The contract's text of the quota that is used up.
    pub fn check(&self, limits: &[SubagentSettings], budgets: &Budgets) -> Result<(), String> {
        let usage = self.lock();
        limits.iter().try_for_each(|it| usage.check(it, budgets))
    }

    /// Counts a child, as long as the quotas hold.
    ///
    /// # Errors
    /// As [`Quotas::check`].
    pub fn try_add_child(
        &self,
        limits: &[SubagentSettings],
        budgets: &Budgets,
    ) -> Result<(), String> {
        let mut usage = self.lock();
        limits.iter().try_for_each(|it| usage.check(it, budgets))?;
        usage.executions += 1;
        Ok(())
    }

    /// Counts a child of an earlier process. Time and tokens of one below another unnamed run are in that one's.
    pub fn restore_child(&self, time: Duration, tokens: u64) {
        let mut usage = self.lock();
        usage.executions += 1;
        usage.elapsed += time;
        usage.restored_tokens = usage.restored_tokens.saturating_add(tokens);
    }

    /// Lets a child's time run.
    pub fn start_timer(&self, run: RunId) -> ChildTimer<'_> {
        self.lock().running_since.insert(run, Some(Instant::now()));
        ChildTimer { quotas: self, run }
    }

    /// Has the time of a child stand still, or go on; of one whose time is in another's nothing changes.
    pub fn set_paused(&self, run: RunId, is_paused: bool) {
        let mut usage = self.lock();
        if let Some(since) = usage.running_since.get_mut(&run) {
            let next = (!is_paused).then(Instant::now);
            if let Some(started) = std::mem::replace(since, next) {
                usage.elapsed += started.elapsed();
            }
        }
    }

    /// The accounts that a child within these bounds draws on: where the tokens of all unnamed ones are counted, and where
    /// they are bounded.
    pub fn accounts(&self, limits: &[SubagentSettings], budgets: &Budgets) -> Vec<usize> {
        let mut usage = self.lock();
        let token_account = usage.token_account(budgets);
        let mut accounts = vec![token_account];
        for max_tokens in limits.iter().filter_map(|it| it.max_total_tokens) {
            let used_tokens = budgets.tokens_used(token_account);
            let entry = usage.limited_accounts.entry(max_tokens);
            accounts.push(
                *entry.or_insert_with(|| open_token_account(budgets, max_tokens, used_tokens)),
            );
        }
        accounts
    }

    fn lock(&self) -> MutexGuard<'_, QuotaUsage> {
        self.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An account for at most so many tokens, of which these are used.
fn open_token_account(budgets: &Budgets, max_tokens: u64, used_tokens: u64) -> usize {
    let limits = Budget {
        max_tokens: Some(max_tokens),
        ..Budget::default()
    };
    let tokens = TokenUsage {
        input: used_tokens,
        ..TokenUsage::default()
    };
    let usage = Usage {
        tokens,
        ..Usage::default()
    };
    let account_ids = budgets.open_account(&limits, &[], &TreeUsage { runs: 0, usage });
    account_ids[0]
}

impl QuotaUsage {
    fn token_account(&mut self, budgets: &Budgets) -> usize {
        let used_tokens = self.restored_tokens;
        *self
            .token_account
            .get_or_insert_with(|| open_token_account(budgets, u64::MAX, used_tokens))
    }

    fn check(&self, settings: &SubagentSettings, budgets: &Budgets) -> Result<(), String> {
        let exceeded = |what: String| Err(format!("Resource quota exceeded: {what}"));
        let executions = self.executions;
        if let Some(limit) = settings.max_executions.filter(|most| executions >= *most) {
            return exceeded(format!("Execution limit reached: {executions}/{limit}"));
        }
        if let Some(limit) = settings.max_total_tokens {
            let tokens = self
                .token_account
                .map_or(self.restored_tokens, |account| budgets.tokens_used(account));
            if tokens >= limit {
                return exceeded(format!("Token limit exceeded: {tokens}/{limit}"));
            }
        }
        if let Some(limit) = settings.max_total_time {
            let running: Duration = self
                .running_since
                .values()
                .flatten()
                .map(Instant::elapsed)
                .sum();
            let time = self.elapsed + running;
            if time >= limit {
                return exceeded(format!(
                    "Time limit exceeded: {}s >= {}s",
                    time.as_secs(),
                    limit.as_secs()
                ));
            }
        }
        Ok(())
    }
}

impl Drop for ChildTimer<'_> {
    fn drop(&mut self) {
        let mut usage = self.quotas.lock();
        if let Some(Some(since)) = usage.running_since.remove(&self.run) {
            usage.elapsed += since.elapsed();
        }
    }
}
