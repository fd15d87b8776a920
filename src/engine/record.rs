//! A fresh run's record, and what goes with it for another process. Pure.

use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use tokio::time::Instant;

use crate::domain::run::{Run, now};
use crate::domain::usage::{TreeUsage, Usage};
use crate::engine::live::{Deadline, LiveRun};
use crate::store::Continuation;

/// The record of a run that has just been accepted; what only a root or only a child has is left empty.
pub fn new(live: &LiveRun) -> Run {
    Run {
        owner: live.tree.owner.clone(),
        agent_version: live.agent.version.clone(),
        model: live.agent.model.model.clone(),
        tree: TreeUsage {
            runs: 1,
            usage: Usage::default(),
        },
        ..Run::queued(&live.scope, live.agent.name.clone())
    }
}

/// What another process needs to go on with it, as far as it is known now.
pub fn continuation(live: &LiveRun) -> Continuation {
    let deadline = deadline(live);
    Continuation {
        definition: Arc::clone(&live.definition),
        deadline,
        timeout: deadline.map_or(0, |(_, seconds)| seconds),
        stream: live.tree.stream,
        webhooks: match live.parent {
            None => live.tree.webhooks.clone(),
            Some(_) => Vec::new(),
        },
        waiting_since: None,
        workdir: live.workdir.id(),
    }
}

/// Its deadline on the calendar's clock, which outlives the process, with the bound that set it.
pub fn deadline(live: &LiveRun) -> Option<(Timestamp, u64)> {
    live.deadline().map(on_the_calendar)
}

/// A deadline on the calendar's clock, with the bound that set it.
pub fn on_the_calendar(deadline: Deadline) -> (Timestamp, u64) {
    let left = deadline.at.saturating_duration_since(Instant::now());
    let left = SignedDuration::try_from(left).unwrap_or(SignedDuration::MAX);
    (
        now().checked_add(left).unwrap_or(Timestamp::MAX),
        deadline.seconds,
    )
}

/// What is left of a time of so many seconds: never more than all of it, where the clock was set back, and nothing where
/// it is over.
pub fn time_left(until_end: SignedDuration, seconds: u64) -> Duration {
    let left = Duration::try_from(until_end).unwrap_or_default();
    left.min(Duration::from_secs(seconds))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use jiff::SignedDuration;

    use super::time_left;

    #[test]
    fn a_recovered_deadline_is_never_longer_than_the_timeout() {
        let of_a_minute = |seconds| time_left(SignedDuration::from_secs(seconds), 60);
        assert_eq!(of_a_minute(59), Duration::from_secs(59));
        assert_eq!(of_a_minute(-1), Duration::ZERO);
        assert_eq!(of_a_minute(86_400), Duration::from_secs(60));
    }
}
