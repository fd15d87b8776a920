//! The quotas of a tree's ad-hoc sub-agents: their number, their time and their tokens.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::OnceCell;
use tokio::time::Instant;

use crate::domain::agent::{Budget, SubagentSettings};
use crate::domain::run::RunId;
use crate::domain::usage::{TokenUsage, TreeUsage, Usage};
use crate::engine::state::budget::Budgets;

/// The usage of all ad-hoc sub-agents of one tree.
#[derive(Debug, Default)]
pub struct AdHocQuotas {
    usage: Mutex<QuotaUsage>,
    /// Set once the usage of an earlier process was read.
    pub restored: OnceCell<()>,
}

#[derive(Debug, Default)]
struct QuotaUsage {
    executions: u64,
    /// The time of runs that have ended or are paused.
    elapsed: Duration,
    /// `None` while the run is paused.
    running_since: BTreeMap<RunId, Option<Instant>>,
    /// Used in an earlier process.
    restored_tokens: u64,
    /// Counts the tokens of all ad-hoc sub-agents.
    token_account: Option<usize>,
    /// The accounts with a limit, by limit.
    limited_accounts: BTreeMap<u64, usize>,
}

/// Measures the time of a child until it is dropped.
pub struct ChildTimer<'a> {
    quotas: &'a AdHocQuotas,
    run: RunId,
}

impl AdHocQuotas {
    /// Whether another child may start within these limits.
    ///
    /// # Errors
    ///
    /// The text for the model that names the exhausted quota.
    pub fn check(&self, limits: &[SubagentSettings], budgets: &Budgets) -> Result<(), String> {
        let usage = self.lock();
        limits.iter().try_for_each(|it| usage.check(it, budgets))
    }

    /// Counts a child if the quotas allow it.
    ///
    /// # Errors
    ///
    /// See [`AdHocQuotas::check`].
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

    /// Reverts [`AdHocQuotas::try_add_child`] for a child that was not started.
    pub fn uncount_child(&self) {
        let mut usage = self.lock();
        usage.executions = usage.executions.saturating_sub(1);
    }

    /// Counts a child of an earlier process. A child below another ad-hoc sub-agent adds no time and no tokens of its
    /// own.
    pub fn restore_child(&self, time: Duration, tokens: u64) {
        let mut usage = self.lock();
        usage.executions += 1;
        usage.elapsed += time;
        usage.restored_tokens = usage.restored_tokens.saturating_add(tokens);
    }

    pub fn start_timer(&self, run: RunId) -> ChildTimer<'_> {
        self.lock().running_since.insert(run, Some(Instant::now()));
        ChildTimer { quotas: self, run }
    }

    /// Pauses or resumes a child's time. Does nothing for a child below another ad-hoc sub-agent.
    pub fn set_paused(&self, run: RunId, is_paused: bool) {
        let mut usage = self.lock();
        if let Some(since) = usage.running_since.get_mut(&run) {
            let next = (!is_paused).then(Instant::now);
            if let Some(started) = std::mem::replace(since, next) {
                usage.elapsed += started.elapsed();
            }
        }
    }

    /// The accounts that a child within these limits draws on: the one that counts the tokens of all, and those with a
    /// limit.
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

/// Opens an account with this limit, of which `used` tokens are used.
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
