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

/// What the unnamed children of one tree have used, whoever called them.
#[derive(Debug, Default)]
pub struct Quotas {
    used: Mutex<Used>,
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
    /// Where the tokens of all of them are counted.
    counter: Option<usize>,
    /// Where they are bounded, by the bound.
    bounded: BTreeMap<u64, usize>,
}

/// One child whose time runs until this is dropped.
pub struct AtWork<'a> {
    quotas: &'a Quotas,
    run: RunId,
}

impl Quotas {
    /// Whether another child may start within all these bounds.
    ///
    /// # Errors
    /// The contract's text of the quota that is used up.
    pub fn check(&self, bounds: &[Subagent], budgets: &Budgets) -> Result<(), String> {
        let used = self.lock();
        bounds.iter().try_for_each(|it| used.check(it, budgets))
    }

    /// Counts a child, as long as the quotas hold.
    ///
    /// # Errors
    /// As [`Quotas::check`].
    pub fn take(&self, bounds: &[Subagent], budgets: &Budgets) -> Result<(), String> {
        let mut used = self.lock();
        bounds.iter().try_for_each(|it| used.check(it, budgets))?;
        used.executions += 1;
        Ok(())
    }

    /// Counts a child of an earlier process. Time and tokens of one below another unnamed run are in that one's.
    pub fn remember(&self, time: Duration, tokens: u64) {
        let mut used = self.lock();
        used.executions += 1;
        used.time += time;
        used.tokens = used.tokens.saturating_add(tokens);
    }

    /// Lets a child's time run.
    pub fn time(&self, run: RunId) -> AtWork<'_> {
        self.lock().at_work.insert(run, Some(Instant::now()));
        AtWork { quotas: self, run }
    }

    /// Has the time of a child stand still, or go on; of one whose time is in another's nothing changes.
    pub fn stand_still(&self, run: RunId, stands: bool) {
        let mut used = self.lock();
        if let Some(since) = used.at_work.get_mut(&run) {
            let next = (!stands).then(Instant::now);
            if let Some(before) = std::mem::replace(since, next) {
                used.time += before.elapsed();
            }
        }
    }

    /// The accounts that a child within these bounds draws on: where the tokens of all unnamed ones are counted, and where
    /// they are bounded.
    pub fn accounts(&self, bounds: &[Subagent], budgets: &Budgets) -> Vec<usize> {
        let mut used = self.lock();
        let counter = used.counter(budgets);
        let mut accounts = vec![counter];
        for most in bounds.iter().filter_map(|it| it.max_total_tokens) {
            let before = budgets.tokens(counter);
            let bounded = used.bounded.entry(most);
            accounts.push(*bounded.or_insert_with(|| open(budgets, most, before)));
        }
        accounts
    }

    fn lock(&self) -> MutexGuard<'_, Used> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An account for at most so many tokens, of which these are used.
fn open(budgets: &Budgets, most: u64, before: u64) -> usize {
    let limits = Budget {
        max_tokens: Some(most),
        ..Budget::default()
    };
    let tokens = TokenUsage {
        input: before,
        ..TokenUsage::default()
    };
    let usage = Usage {
        tokens,
        ..Usage::default()
    };
    let opened = budgets.open(&limits, &[], &TreeUsage { runs: 0, usage });
    opened[0]
}

impl Used {
    fn counter(&mut self, budgets: &Budgets) -> usize {
        let before = self.tokens;
        *self
            .counter
            .get_or_insert_with(|| open(budgets, u64::MAX, before))
    }

    fn check(&self, settings: &Subagent, budgets: &Budgets) -> Result<(), String> {
        let exceeded = |what: String| Err(format!("Resource quota exceeded: {what}"));
        let executions = self.executions;
        if let Some(most) = settings.max_executions.filter(|most| executions >= *most) {
            return exceeded(format!("Execution limit reached: {executions}/{most}"));
        }
        if let Some(most) = settings.max_total_tokens {
            let tokens = self
                .counter
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
        let mut used = self.quotas.lock();
        if let Some(Some(since)) = used.at_work.remove(&self.run) {
            used.time += since.elapsed();
        }
    }
}
