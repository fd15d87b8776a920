//! Quarter hours in UTC, and the days of time zones as ranges of them.

use jiff::Timestamp;
use jiff::civil::Date;
use jiff::tz::TimeZone;

/// Quarter hours of a day in UTC.
pub const QUARTERS_PER_DAY: i64 = 96;
const QUARTER_SECONDS: i64 = 900;
/// No name of a time zone is longer.
const MAX_ZONE_NAME: usize = 64;

/// The number of the quarter hour that contains this time, counted from 1970.
pub fn quarter_of(time: Timestamp) -> i64 {
    time.as_second().div_euclid(QUARTER_SECONDS)
}

/// The first quarter hour that does not begin before this time.
pub fn quarter_from(time: Timestamp) -> i64 {
    let quarter = quarter_of(time);
    quarter + i64::from(quarter_start(quarter) < time)
}

pub fn quarter_start(quarter: i64) -> Timestamp {
    let second = quarter.saturating_mul(QUARTER_SECONDS);
    Timestamp::from_second(second).unwrap_or(if second < 0 {
        Timestamp::MIN
    } else {
        Timestamp::MAX
    })
}

/// A time zone by its IANA name, such as `Europe/Berlin`.
pub fn time_zone(name: &str) -> Option<TimeZone> {
    match name.len() <= MAX_ZONE_NAME {
        true => TimeZone::get(name).ok(),
        false => None,
    }
}

/// A day of a time zone, from quarter hour `start` to before `end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Day {
    pub date: Date,
    pub start: i64,
    pub end: i64,
}

/// The days of the zone that have quarter hours from `start` to before `end`; the first and the last may be parts of days.
pub fn days(zone: &TimeZone, start: i64, end: i64) -> Vec<Day> {
    let mut days = Vec::new();
    let mut next = start;
    let mut date = date_of(zone, start);
    while next < end {
        let Some(tomorrow) = date.tomorrow().ok() else {
            break;
        };
        let day_end = first_quarter(zone, tomorrow).map_or(end, |first| first.min(end));
        if day_end > next {
            days.push(Day {
                date,
                start: next,
                end: day_end,
            });
            next = day_end;
        }
        date = tomorrow;
    }
    days
}

/// The date in the zone at the start of a quarter hour.
pub fn date_of(zone: &TimeZone, quarter: i64) -> Date {
    zone.to_datetime(quarter_start(quarter)).date()
}

/// The quarter hour with which a date begins.
pub fn first_quarter(zone: &TimeZone, date: Date) -> Option<i64> {
    let start = date.to_zoned(zone.clone()).ok()?;
    Some(quarter_of(start.timestamp()))
}

/// The length of a period that recurs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Period {
    Day,
    Month,
}

impl Period {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Day => "day",
            Self::Month => "month",
        }
    }

    /// The quarter hours of the period that contains this time: the first, and the first after it.
    pub fn quarters(self, zone: &TimeZone, now: Timestamp) -> (i64, i64) {
        let today = zone.to_datetime(now).date();
        let (first, next) = match self {
            Self::Day => (today, today.tomorrow()),
            Self::Month => (today.first_of_month(), today.last_of_month().tomorrow()),
        };
        let quarter = quarter_of(now);
        let start = first_quarter(zone, first).unwrap_or(quarter);
        let end = next.ok().and_then(|next| first_quarter(zone, next));
        (start, end.unwrap_or(quarter + 1))
    }
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;

    use super::{days, quarter_from, quarter_of, time_zone};

    fn at(text: &str) -> Timestamp {
        text.parse().expect("a time")
    }

    #[test]
    fn days_follow_the_zone_and_its_clock_changes() {
        let berlin = time_zone("Europe/Berlin").expect("a zone");
        let start = quarter_of(at("2026-03-27T12:00:00Z"));
        let end = quarter_from(at("2026-03-30T12:00:01Z"));
        let lengths: Vec<_> = days(&berlin, start, end)
            .iter()
            .map(|day| (day.date.to_string(), day.end - day.start))
            .collect();
        let expected = [
            ("2026-03-27", 44),
            ("2026-03-28", 96),
            ("2026-03-29", 92),
            ("2026-03-30", 57),
        ];
        assert_eq!(lengths, expected.map(|(date, n)| (date.to_owned(), n)));
        assert_eq!(lengths.iter().map(|it| it.1).sum::<i64>(), end - start);
    }

    #[test]
    fn only_zones_that_exist_have_a_name() {
        for name in ["UTC", "Asia/Kathmandu"] {
            assert!(time_zone(name).is_some(), "{name}");
        }
        for name in ["", "Berlin", "../../etc/passwd", &"x".repeat(100)] {
            assert!(time_zone(name).is_none(), "{name}");
        }
    }
}
