//! Decides which time of a schedule is due. Pure.

use jiff::{SignedDuration, Timestamp};

use crate::domain::cron;
use crate::domain::schedule::{Missed, Schedule};
use crate::store::schedules::ScheduleRecord;

/// A time is missed if nothing could start for this long.
const GRACE: SignedDuration = SignedDuration::from_secs(60);
/// Times that are older are never started.
const MAX_AGE: SignedDuration = SignedDuration::from_hours(24);
const SECOND: SignedDuration = SignedDuration::from_secs(1);

/// A time of a schedule at which nothing has started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// A run is to start, if no other prevents that.
    Start(Timestamp),
    /// It is too late for a run.
    Missed(Timestamp),
}

impl Due {
    fn time(self) -> Timestamp {
        match self {
            Self::Start(at) | Self::Missed(at) => at,
        }
    }
}

/// The latest time that is not handled.
pub fn due(schedule: &Schedule, record: &ScheduleRecord, now: Timestamp) -> Option<Due> {
    let since = match record.handled_at > now {
        // The clock was set back. What has started for this minute is found by its idempotency key.
        true => cron::floor(now).checked_sub(SECOND).ok()?,
        false => record.handled_at.max(now.checked_sub(MAX_AGE).ok()?),
    };
    let time = schedule.cron.last(&schedule.zone, since, now)?;
    let is_late = now.duration_since(time) >= GRACE;
    match is_late && schedule.missed == Missed::Skip {
        true => Some(Due::Missed(time)),
        false => Some(Due::Start(time)),
    }
}

/// Up to when times are handled after that of `at`: a held time is earlier than those that were skipped meanwhile.
pub fn handled_at(record: &ScheduleRecord, at: Timestamp, now: Timestamp) -> Timestamp {
    match record.handled_at > now {
        // The clock was set back.
        true => at,
        false => record.handled_at.max(at),
    }
}

/// Whether a time whose start failed is not due any more, and is not recorded: a later one is due instead, or it is too old.
pub fn is_given_up(
    failed_at: Timestamp,
    due: Option<Due>,
    record: &ScheduleRecord,
    now: Timestamp,
) -> bool {
    let is_due = due.is_some_and(|due| due.time() == failed_at);
    // After `now` if the clock was set back.
    !is_due && failed_at > record.handled_at && failed_at <= now
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use jiff::tz::TimeZone;

    use super::{Due, due, handled_at, is_given_up};
    use crate::domain::cron::Cron;
    use crate::domain::schedule::{Missed, Overlap, Schedule};
    use crate::store::schedules::{ScheduleId, ScheduleRecord};

    fn time(text: &str) -> Timestamp {
        format!("2026-03-{text}Z").parse().expect("a time")
    }

    fn schedule(missed: Missed) -> Schedule {
        Schedule {
            name: "morning".to_owned(),
            cron: Cron::parse("30 9 * * *").expect("a cron"),
            timezone: "UTC".to_owned(),
            zone: TimeZone::UTC,
            input: None,
            eval: None,
            overlap: Overlap::Skip,
            missed,
            labels: Default::default(),
            key: None,
        }
    }

    fn record(schedule: &Schedule, handled_at: &str) -> ScheduleRecord {
        ScheduleRecord {
            id: ScheduleId {
                agent: "a".to_owned(),
                name: "morning".to_owned(),
            },
            times: schedule.times(),
            handled_at: time(handled_at),
            held_at: None,
            is_paused: false,
            last: None,
            error: None,
        }
    }

    /// What is due of a schedule at half past nine.
    fn due_at(missed: Missed, handled_at: &str, now: &str) -> Option<Due> {
        let schedule = schedule(missed);
        due(&schedule, &record(&schedule, handled_at), time(now))
    }

    #[test]
    fn a_time_is_due_within_its_minute() {
        let slot = Some(Due::Start(time("02T09:30:00")));
        for missed in [Missed::Skip, Missed::Once] {
            assert_eq!(due_at(missed, "01T12:00:00", "02T09:29:59"), None);
            assert_eq!(due_at(missed, "01T12:00:00", "02T09:30:00"), slot);
            assert_eq!(due_at(missed, "01T12:00:00", "02T09:30:59"), slot);
            assert_eq!(due_at(missed, "02T09:30:00", "02T09:30:59"), None);
        }
    }

    #[test]
    fn only_the_latest_missed_time_of_a_day_is_due() {
        let late = ("01T12:00:00", "04T09:00:00");
        let slot = time("03T09:30:00");
        assert_eq!(
            due_at(Missed::Skip, late.0, late.1),
            Some(Due::Missed(slot))
        );
        assert_eq!(due_at(Missed::Once, late.0, late.1), Some(Due::Start(slot)));
        assert_eq!(due_at(Missed::Once, "03T09:30:00", late.1), None);
    }

    #[test]
    fn a_clock_that_was_set_back_stops_no_schedule() {
        let slot = Some(Due::Start(time("02T09:30:00")));
        assert_eq!(due_at(Missed::Skip, "29T00:00:00", "02T09:30:20"), slot);
        assert_eq!(due_at(Missed::Once, "29T00:00:00", "02T09:31:20"), None);
    }

    #[test]
    fn the_start_of_a_held_time_makes_no_later_time_due_again() {
        let schedule = schedule(Missed::Once);
        for (recorded, at, expected) in [
            ("02T12:00:00", "02T10:00:00", "02T12:00:00"),
            ("02T10:00:00", "02T10:00:00", "02T10:00:00"),
            ("02T09:00:00", "02T12:00:00", "02T12:00:00"),
            // The clock was set back.
            ("29T00:00:00", "02T10:00:00", "02T10:00:00"),
        ] {
            let record = record(&schedule, recorded);
            let handled = handled_at(&record, time(at), time("02T12:30:00"));
            assert_eq!(handled, time(expected), "{recorded} {at}");
        }
    }

    #[test]
    fn a_time_is_given_up_if_another_is_due_and_nothing_is_recorded_for_it() {
        let schedule = schedule(Missed::Skip);
        let (at, later) = (time("02T09:30:00"), time("03T09:30:00"));
        let now = time("03T09:30:20");
        let before = record(&schedule, "01T12:00:00");
        assert!(is_given_up(at, Some(Due::Start(later)), &before, now));
        assert!(is_given_up(at, None, &before, now));
        assert!(!is_given_up(at, Some(Due::Start(at)), &before, now));
        assert!(!is_given_up(at, Some(Due::Missed(at)), &before, now));
        let handled = record(&schedule, "02T09:30:00");
        assert!(!is_given_up(at, Some(Due::Start(later)), &handled, now));
        // The clock was set back.
        assert!(!is_given_up(at, None, &before, time("02T09:00:00")));
    }
}
