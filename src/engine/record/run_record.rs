//! A fresh run's record, and what goes with it for another process. Pure.

use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use tokio::time::Instant;

use crate::domain::run::{Run, now};
use crate::domain::usage::{TreeUsage, Usage};
use crate::engine::state::active_run::{ActiveRun, Deadline};
use crate::store::ResumeState;

/// The record of a run that has just been accepted; what only a root or only a child has is left empty.
pub fn new_run(run: &ActiveRun) -> Run {
    Run {
        owner: run.tree.owner.clone(),
        agent_version: run.agent.version.clone(),
        model: run.agent.model.model.clone(),
        tree: TreeUsage {
            runs: 1,
            usage: Usage::default(),
        },
        ..Run::queued(&run.scope, run.agent.name.clone())
    }
}

/// What another process needs to go on with it, as far as it is known now.
pub fn continuation(run: &ActiveRun) -> ResumeState {
    let deadline = wall_clock_deadline(run);
    ResumeState {
        definition: Arc::clone(&run.agent_json),
        deadline,
        timeout: deadline.map_or(0, |(_, seconds)| seconds),
        stream: run.tree.is_streaming,
        webhooks: match run.parent {
            None => run.tree.webhooks.clone(),
            Some(_) => Vec::new(),
        },
        waiting_since: None,
        workdir: run.workdir.id(),
    }
}

/// Its deadline on the calendar's clock, which outlives the process, with the bound that set it.
pub fn wall_clock_deadline(run: &ActiveRun) -> Option<(Timestamp, u64)> {
    run.deadline().map(to_wall_clock)
}

/// A deadline on the calendar's clock, with the bound that set it.
pub fn to_wall_clock(deadline: Deadline) -> (Timestamp, u64) {
    let remaining = deadline.at.saturating_duration_since(Instant::now());
    let remaining = SignedDuration::try_from(remaining).unwrap_or(SignedDuration::MAX);
    (
        now().checked_add(remaining).unwrap_or(Timestamp::MAX),
        deadline.seconds,
    )
}

/// What is left of a time of so many seconds: never more than all of it, where the clock was set back, and nothing where
/// it is over.
pub fn remaining_time(until_deadline: SignedDuration, seconds: u64) -> Duration {
    let remaining = Duration::try_from(until_deadline).unwrap_or_default();
    remaining.min(Duration::from_secs(seconds))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use jiff::SignedDuration;

    use super::remaining_time;

    #[test]
    fn a_recovered_deadline_is_never_longer_than_the_timeout() {
        let remaining_of_minute = |seconds| remaining_time(SignedDuration::from_secs(seconds), 60);
        assert_eq!(remaining_of_minute(59), Duration::from_secs(59));
        assert_eq!(remaining_of_minute(-1), Duration::ZERO);
        assert_eq!(remaining_of_minute(86_400), Duration::from_secs(60));
    }
}
