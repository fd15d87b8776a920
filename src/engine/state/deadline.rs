//! Deadlines in process time and calendar time.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use tokio::time::Instant;

use crate::domain::run::now;

#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    pub at: Instant,
    /// The limit in seconds that set the deadline, for messages.
    pub seconds: u64,
}

impl Deadline {
    pub fn within(timeout: Duration) -> Self {
        Self {
            at: Instant::now() + timeout,
            seconds: timeout.as_secs(),
        }
    }

    /// The deadline in calendar time, which outlives the process, with the limit in seconds that set it.
    pub fn to_wall_clock(self) -> (Timestamp, u64) {
        let remaining = self.at.saturating_duration_since(Instant::now());
        let remaining = SignedDuration::try_from(remaining).unwrap_or(SignedDuration::MAX);
        (
            now().checked_add(remaining).unwrap_or(Timestamp::MAX),
            self.seconds,
        )
    }
}

/// The remaining time of a limit: at most the whole limit, even if the clock was set back, and zero if it has passed.
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
