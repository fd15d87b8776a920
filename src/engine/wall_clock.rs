//! Whether the wall clock may be wrong: what is deleted by age does not come back when the clock does.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use tokio::time::Instant;

/// How far the wall clock may be from the monotonic one between two readings.
const MAX_DRIFT: SignedDuration = SignedDuration::from_mins(5);
/// How far the first reading may be after the newest record.
const MAX_GAP: SignedDuration = SignedDuration::from_hours(24);
/// How long both clocks have to agree until a clock is trusted again.
pub const PROBATION: Duration = Duration::from_secs(3600);

/// The last reading of the wall clock, and of the monotonic one. The latter stops while the machine is suspended, so
/// that a suspended machine counts as a jump.
#[derive(Clone, Copy, Debug)]
pub struct WallClock {
    time: Timestamp,
    at: Instant,
    /// When the wall clock is trusted again, if it is not.
    trusted_from: Option<Instant>,
}

impl WallClock {
    /// The first reading. `newest` is the time of the newest record, by a clock that was right then.
    pub fn new(time: Timestamp, at: Instant, newest: Option<Timestamp>) -> Self {
        let mut clock = Self {
            time,
            at,
            trusted_from: None,
        };
        let gap = newest.map(|newest| time.duration_since(newest));
        if let Some(gap) = gap.filter(|gap| *gap > MAX_GAP) {
            let seconds = gap.as_secs();
            clock.distrust(format_args!(
                "is {seconds} s after the newest run at the start of the daemon"
            ));
        }
        clock
    }

    /// Takes a later reading. Returns whether the wall clock is trusted.
    pub fn read(&mut self, time: Timestamp, at: Instant) -> bool {
        let elapsed = SignedDuration::try_from(at.duration_since(self.at));
        let elapsed = elapsed.unwrap_or(SignedDuration::MAX);
        let drift = time.duration_since(self.time).saturating_sub(elapsed);
        (self.time, self.at) = (time, at);
        if drift.abs() > MAX_DRIFT {
            self.distrust(format_args!("has jumped by {} s", drift.as_secs()));
        }
        self.trusted_from = self.trusted_from.filter(|from| at < *from);
        self.trusted_from.is_none()
    }

    fn distrust(&mut self, why: std::fmt::Arguments<'_>) {
        if self.trusted_from.replace(self.at + PROBATION).is_none() {
            tracing::warn!(
                "The clock {why}, and may be wrong: nothing is deleted by its age until the clock has been steady for \
                 an hour"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use jiff::{SignedDuration, Timestamp};
    use tokio::time::Instant;

    use super::WallClock;

    const YEAR: i64 = 365 * 24 * 60;

    /// Readings by minutes since the first one, which says the same on both clocks.
    struct Readings {
        time: Timestamp,
        at: Instant,
    }

    impl Readings {
        fn new() -> Self {
            Self {
                time: "2026-05-05T10:00:00Z".parse().expect("a time"),
                at: Instant::now(),
            }
        }

        fn wall(&self, minutes: i64) -> Timestamp {
            self.time + SignedDuration::from_mins(minutes)
        }

        fn monotonic(&self, minutes: u64) -> Instant {
            self.at + Duration::from_secs(60 * minutes)
        }

        /// The first reading, an hour after the newest run.
        fn start(&self) -> WallClock {
            WallClock::new(self.time, self.at, Some(self.wall(-60)))
        }
    }

    #[test]
    fn a_steady_clock_is_trusted() {
        let readings = Readings::new();
        let mut clock = readings.start();
        for minute in [0_i64, 1, 2, 300, 10_000] {
            let at = readings.monotonic(minute.unsigned_abs());
            assert!(clock.read(readings.wall(minute + 4), at), "{minute}");
        }
    }

    #[test]
    fn a_clock_that_was_ahead_for_a_minute_is_trusted_after_an_hour() {
        let readings = Readings::new();
        let mut clock = readings.start();
        let mut is_trusted =
            |wall, at: u64| clock.read(readings.wall(wall), readings.monotonic(at));
        assert!(is_trusted(1, 1));
        assert!(!is_trusted(YEAR, 2));
        assert!(!is_trusted(YEAR + 1, 3));
        assert!(!is_trusted(4, 4), "it has come back just now");
        assert!(!is_trusted(63, 63));
        assert!(is_trusted(64, 64));
        assert!(is_trusted(65, 65));
    }

    #[test]
    fn a_clock_that_was_set_for_good_is_trusted_after_an_hour() {
        let readings = Readings::new();
        let mut clock = readings.start();
        let mut is_trusted =
            |wall, at: u64| clock.read(readings.wall(wall), readings.monotonic(at));
        assert!(!is_trusted(YEAR, 1));
        assert!(!is_trusted(YEAR + 59, 60));
        assert!(is_trusted(YEAR + 60, 61));
    }

    #[test]
    fn a_clock_that_is_ahead_at_the_start_is_trusted_after_an_hour() {
        let readings = Readings::new();
        let old = Some(readings.wall(-YEAR));
        let mut clock = WallClock::new(readings.time, readings.at, old);
        assert!(!clock.read(readings.time, readings.at));
        assert!(!clock.read(readings.wall(59), readings.monotonic(59)));
        assert!(clock.read(readings.wall(60), readings.monotonic(60)));
        // Without a record there is nothing to lose.
        let mut clock = WallClock::new(readings.time, readings.at, None);
        assert!(clock.read(readings.time, readings.at));
    }
}
