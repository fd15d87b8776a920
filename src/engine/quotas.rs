//! Quotas of a tree's children without a name: how many there were, how long they took, what they used. Pure but for
//! the clock; knows no run's record.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::OnceCell;
use tokio::time::Instant;

use crate::domain::agent::{Budget, Subagent};
use crate::domain::run::RunId;
use crate::domain::usage::{TokenUsage, TreeUsage, Usage};
use crate::engine::budget::Budgets;

/// What the unnamed children of one tree have used, by the agent's name that they share with their caller.
#[derive(Debug, Default)]
pub struct Quotas {
    used: Mutex<BTreeMap<String, Used>>,
    /// What an earlier process used is read once, when somebody first asks.
    pub read: OnceCell<()>,
}

#[derive(Debug, Default)]
struct Used {
    executions: u64,
    /// Of those that have ended or come to rest.
    time: Duration,
    /// Since when; none while it waits for a person's word.
    at_work: BTreeMap<RunId, Option<Instant>>,
    /// In an earlier process.
    tokens: u64,
    /// Where tokens are counted and bounded.
    account: Option<usize>,
}

/// One child whose time runs until this is dropped.
pub struct AtWork<'a> {
    quotas: &'a Quotas,
    agent: &'a str,
    run: RunId,
}

impl Quotas {
    /// Whether another child of this agent's may start.
    ///
    /// # Errors
    /// The contract's text of the quota that is used up.
    pub fn check(&self, agent: &str, settings: &Subagent, budgets: &Budgets) -> Result<(), String> {
        match self.lock().get(agent) {
            Some(used) => used.check(settings, budgets),
            None => Used::default().check(settings, budgets),
        }
    }

    /// Counts a child, as long as the quotas hold.
    ///
    /// # Errors
    /// As [`Quotas::check`].
    pub fn take(&self, agent: &str, settings: &Subagent, budgets: &Budgets) -> Result<(), String> {
        let mut all = self.lock();
        let used = all.entry(agent.to_owned()).or_default();
        used.check(settings, budgets)?;
        used.executions += 1;
        Ok(())
    }

    /// Counts a child of an earlier process. Time and tokens of one that another unnamed run called are in that one's.
    pub fn remember(&self, agent: &str, time: Duration, tokens: u64) {
        let mut all = self.lock();
        let used = all.entry(agent.to_owned()).or_default();
        used.executions += 1;
        used.time += time;
        used.tokens = used.tokens.saturating_add(tokens);
    }

    /// Lets a child's time run.
    pub fn time<'a>(&'a self, agent: &'a str, run: RunId) -> AtWork<'a> {
        let mut all = self.lock();
        let used = all.entry(agent.to_owned()).or_default();
        used.at_work.insert(run, Some(Instant::now()));
        AtWork {
            quotas: self,
            agent,
            run,
        }
    }

    /// Has the time of a child stand still, or go on; of one whose time is in another's nothing changes.
    pub fn stand_still(&self, agent: &str, run: RunId, stands: bool) {
        let mut all = self.lock();
        if let Some(used) = all.get_mut(agent)
            && let Some(since) = used.at_work.get_mut(&run)
        {
            let next = (!stands).then(Instant::now);
            if let Some(before) = std::mem::replace(since, next) {
                used.time += before.elapsed();
            }
        }
    }

    /// The account that all unnamed children of this agent's draw on, where their tokens are bounded.
    pub fn account(&self, agent: &str, settings: &Subagent, budgets: &Budgets) -> Option<usize> {
        let limits = Budget {
            max_tokens: Some(settings.max_total_tokens?),
            ..Budget::default()
        };
        let mut all = self.lock();
        let used = all.entry(agent.to_owned()).or_default();
        if used.account.is_none() {
            let input = used.tokens;
            let before = Usage {
                tokens: TokenUsage {
                    input,
                    ..TokenUsage::default()
                },
                ..Usage::default()
            };
            let before = TreeUsage {
                runs: 0,
                usage: before,
            };
            used.account = budgets.open(&limits, &[], &before).first().copied();
        }
        used.account
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Used>> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Used {
    fn check(&self, settings: &Subagent, budgets: &Budgets) -> Result<(), String> {
        let exceeded = |what: String| Err(format!("Resource quota exceeded: {what}"));
        let executions = self.executions;
        if let Some(most) = settings.max_executions.filter(|most| executions >= *most) {
            return exceeded(format!("Execution limit reached: {executions}/{most}"));
        }
        if let Some(most) = settings.max_total_tokens {
            let tokens = self
                .account
                .map_or(self.tokens, |account| budgets.tokens(account));
            if tokens >= most {
                return exceeded(format!("Token limit exceeded: {tokens}/{most}"));
            }
        }
        if let Some(most) = settings.max_total_time {
            let at_work: Duration = self.at_work.values().flatten().map(Instant::elapsed).sum();
            let time = self.time + at_work;
            if time >= most {
                return exceeded(format!(
                    "Time limit exceeded: {}s >= {}s",
                    time.as_secs(),
                    most.as_secs()
                ));
            }
        }
        Ok(())
    }
}

impl Drop for AtWork<'_> {
    fn drop(&mut self) {
        let mut all = self.quotas.lock();
        if let Some(used) = all.get_mut(self.agent)
            && let Some(Some(since)) = used.at_work.remove(&self.run)
        {
            used.time += since.elapsed();
        }
    }
}
