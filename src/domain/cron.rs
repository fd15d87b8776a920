//! Times of schedules: five fields of cron in a time zone. A time that the zone skips is the first minute after the gap, a time
//! that it repeats is the first of both. If the minute or the hour begins with `*`, every real minute counts: nothing is moved.

use std::fmt;

use jiff::civil::{Date, DateTime, Time};
use jiff::tz::{AmbiguousOffset, TimeZone};
use jiff::{SignedDuration, Span, Timestamp};

/// Two leap days are at most 8 years apart.
const MAX_YEARS: i64 = 9;
const MINUTE: SignedDuration = SignedDuration::from_mins(1);
/// Longer texts are not read.
const MAX_LENGTH: usize = 256;
const LAST_DAYS: [u32; 12] = [31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];

/// When something happens, as five fields: minute, hour, day of the month, month, day of the week.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cron {
    text: String,
    minutes: Values,
    hours: Values,
    days: Values,
    months: Values,
    /// 0 is Sunday.
    weekdays: Values,
}

/// The values of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Values {
    bits: u64,
    /// Whether the field begins with `*`.
    has_star: bool,
}

impl Values {
    fn has(self, value: i8) -> bool {
        u32::try_from(value).is_ok_and(|value| self.bits >> value & 1 == 1)
    }
}

/// What a field may contain.
struct Field {
    name: &'static str,
    min: u32,
    max: u32,
    /// Names of the values from `min` on.
    names: &'static [&'static str],
}

const FIELDS: [Field; 5] = [
    Field::numbers("minute", 0, 59),
    Field::numbers("hour", 0, 23),
    Field::numbers("day of the month", 1, 31),
    Field {
        name: "month",
        min: 1,
        max: 12,
        names: &[
            "jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec",
        ],
    },
    Field {
        name: "day of the week",
        min: 0,
        max: 7,
        names: &["sun", "mon", "tue", "wed", "thu", "fri", "sat"],
    },
];

impl Cron {
    /// # Errors
    /// The second half of a sentence that begins with the key.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.len() > MAX_LENGTH {
            return Err(format!("is longer than {MAX_LENGTH} bytes"));
        }
        if text.trim_start().starts_with('@') {
            return Err(
                "must be five fields, such as \"0 0 * * *\" for every midnight; names with @ are not supported"
                    .to_owned(),
            );
        }
        let parts: Vec<&str> = text.split_whitespace().collect();
        let [minutes, hours, days, months, weekdays] = parts[..] else {
            return Err(format!(
                "must be five fields (minute, hour, day of the month, month, day of the week), such as \"30 9 * * mon-fri\", \
                 but has {}",
                parts.len()
            ));
        };
        let [minute, hour, day, month, weekday] = &FIELDS;
        let mut weekdays = weekday.parse(weekdays)?;
        // Both 0 and 7 are Sunday.
        weekdays.bits = (weekdays.bits | weekdays.bits >> 7) & 0x7f;
        let cron = Self {
            text: parts.join(" "),
            minutes: minute.parse(minutes)?,
            hours: hour.parse(hours)?,
            days: day.parse(days)?,
            months: month.parse(months)?,
            weekdays,
        };
        match cron.can_occur() {
            true => Ok(cron),
            false => Err("never occurs: none of its months has such a day".to_owned()),
        }
    }

    pub fn as_str(&self) -> &str {
        &self.text
    }

    fn can_occur(&self) -> bool {
        // With two restricted fields of days, one of them is enough.
        if !self.weekdays.has_star {
            return true;
        }
        let first_day = self.days.bits.trailing_zeros();
        let last_days = (1..).zip(LAST_DAYS);
        let mut of_months = last_days.filter(|(month, _)| self.months.has(*month));
        of_months.any(|(_, last_day)| first_day <= last_day)
    }

    /// The first time after `after`; `None` if there is none before the end of jiff's time.
    pub fn next(&self, zone: &TimeZone, after: Timestamp) -> Option<Timestamp> {
        match self.minutes.has_star || self.hours.has_star {
            true => self.next_of_real_clock(zone, after),
            false => self.next_of_wall_clock(zone, after),
        }
    }

    /// The last time after `since` and not after `until`.
    pub fn last(&self, zone: &TimeZone, since: Timestamp, until: Timestamp) -> Option<Timestamp> {
        let first = self.next(zone, since);
        let times = std::iter::successors(first, |time| self.next(zone, *time));
        times.take_while(|time| *time <= until).last()
    }

    /// Searches the parts between two changes of the zone's offset, in each of which wall and real clock agree.
    fn next_of_real_clock(&self, zone: &TimeZone, after: Timestamp) -> Option<Timestamp> {
        let end_of_search = after.checked_add(SignedDuration::from_hours(MAX_YEARS * 366 * 24));
        let end_of_search = end_of_search.unwrap_or(Timestamp::MAX);
        let mut start = floor(after).checked_add(MINUTE).ok()?;
        while start < end_of_search {
            let offset = zone.to_offset(start);
            let change = zone.following(start).next().map(|it| it.timestamp());
            let end = change.map_or(end_of_search, |change| change.min(end_of_search));
            let found = self.next_local(ceil(offset.to_datetime(start))?, offset.to_datetime(end));
            let found = found.and_then(|local| offset.to_timestamp(local).ok());
            if let Some(time) = found.filter(|time| *time < end) {
                return Some(time);
            }
            start = end;
        }
        None
    }

    fn next_of_wall_clock(&self, zone: &TimeZone, after: Timestamp) -> Option<Timestamp> {
        let mut local = zone.to_datetime(floor(after));
        let end = local.checked_add(Span::new().years(MAX_YEARS));
        let end = end.unwrap_or(DateTime::MAX);
        loop {
            let found = self.next_local(local, end)?;
            let time = time_of(zone, found)?;
            if time > after {
                return Some(time);
            }
            local = found.checked_add(MINUTE).ok()?;
        }
    }

    /// The first match from `start`, which is a whole minute, to before `end`.
    fn next_local(&self, start: DateTime, end: DateTime) -> Option<DateTime> {
        let mut date = start.date();
        let mut from = start.time();
        while date <= end.date() {
            if !self.months.has(date.month()) {
                date = date.last_of_month().tomorrow().ok()?;
                from = Time::midnight();
                continue;
            }
            if self.has_day(date)
                && let Some(time) = self.next_time(from)
            {
                let found = date.to_datetime(time);
                return (found < end).then_some(found);
            }
            date = date.tomorrow().ok()?;
            from = Time::midnight();
        }
        None
    }

    fn has_day(&self, date: Date) -> bool {
        let is_day = self.days.has(date.day());
        let is_weekday = (self.weekdays).has(date.weekday().to_sunday_zero_offset());
        match self.days.has_star || self.weekdays.has_star {
            true => is_day && is_weekday,
            false => is_day || is_weekday,
        }
    }

    /// The first time of a day, from `from` on.
    fn next_time(&self, from: Time) -> Option<Time> {
        let hours = (from.hour()..24).filter(|hour| self.hours.has(*hour));
        let mut times = hours.flat_map(|hour| {
            let first = if hour == from.hour() {
                from.minute()
            } else {
                0
            };
            let minutes = (first..60).filter(|minute| self.minutes.has(*minute));
            minutes.map(move |minute| (hour, minute))
        });
        let (hour, minute) = times.next()?;
        Time::new(hour, minute, 0, 0).ok()
    }
}

impl fmt::Display for Cron {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The start of the UTC minute.
pub fn floor(time: Timestamp) -> Timestamp {
    let second = time.as_second().div_euclid(60) * 60;
    Timestamp::from_second(second).unwrap_or(time)
}

fn ceil(local: DateTime) -> Option<DateTime> {
    match (local.second(), local.subsec_nanosecond()) {
        (0, 0) => Some(local),
        (second, _) => {
            let rest = SignedDuration::from_secs(60 - i64::from(second));
            let next = local.with().subsec_nanosecond(0).build().ok()?;
            next.checked_add(rest).ok()
        }
    }
}

/// When the zone's clocks show a time first; if they skip it, the first minute after the gap.
fn time_of(zone: &TimeZone, local: DateTime) -> Option<Timestamp> {
    match zone.to_ambiguous_timestamp(local).offset() {
        AmbiguousOffset::Unambiguous { offset } => offset.to_timestamp(local).ok(),
        AmbiguousOffset::Fold { before, .. } => before.to_timestamp(local).ok(),
        AmbiguousOffset::Gap { after, .. } => {
            // The later offset puts a skipped time before the change.
            let before_change = after.to_timestamp(local).ok()?;
            let change = zone.following(before_change).next()?.timestamp();
            match floor(change) == change {
                true => Some(change),
                false => floor(change).checked_add(MINUTE).ok(),
            }
        }
    }
}

impl Field {
    const fn numbers(name: &'static str, min: u32, max: u32) -> Self {
        Self {
            name,
            min,
            max,
            names: &[],
        }
    }

    /// A list of `*`, values and ranges, the latter two with an optional step.
    fn parse(&self, text: &str) -> Result<Values, String> {
        let mut bits = 0;
        for part in text.split(',') {
            bits |= self.parse_part(part)?;
        }
        Ok(Values {
            bits,
            has_star: text.starts_with('*'),
        })
    }

    fn parse_part(&self, part: &str) -> Result<u64, String> {
        let name = self.name;
        let (range, step) = match part.split_once('/') {
            Some((range, step)) => {
                let step: Option<u32> = step.parse().ok();
                let step = step.filter(|step| (1..=self.max).contains(step));
                let step = step.ok_or_else(|| {
                    let max = self.max;
                    format!("has \"{part}\" as {name}: a step is a number from 1 to {max}")
                })?;
                (range, Some(step))
            }
            None => (part, None),
        };
        let (first, last) = match range.split_once('-') {
            _ if range == "*" => (self.min, self.max),
            Some((first, last)) => (self.value(part, first)?, self.value(part, last)?),
            None if step.is_some() => {
                return Err(format!(
                    "has \"{part}\" as {name}: a step needs * or a range, such as */5 or 10-30/5"
                ));
            }
            None => (self.value(part, range)?, self.value(part, range)?),
        };
        if first > last {
            return Err(format!(
                "has \"{part}\" as {name}: the range ends before it begins"
            ));
        }
        let step = usize::try_from(step.unwrap_or(1)).unwrap_or(1);
        let values = (first..=last).step_by(step);
        Ok(values.fold(0, |bits, value| bits | 1 << value))
    }

    fn value(&self, part: &str, text: &str) -> Result<u32, String> {
        let lowercase = text.to_ascii_lowercase();
        if let Some(index) = (self.min..)
            .zip(self.names)
            .find(|(_, name)| **name == lowercase)
        {
            return Ok(index.0);
        }
        let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let number = text.parse().ok().filter(|_| is_number);
        let number = number.filter(|number| (self.min..=self.max).contains(number));
        number.ok_or_else(|| {
            let Self { name, min, max, .. } = self;
            let or_names = match self.names {
                [first, .., last] => format!(", or a name from {first} to {last}"),
                _ => String::new(),
            };
            format!("has \"{part}\" as {name}: it must be a number from {min} to {max}{or_names}")
        })
    }
}

#[cfg(test)]
mod tests {
    use jiff::tz::TimeZone;
    use jiff::{SignedDuration, Timestamp};
    use proptest::prelude::*;

    use super::{Cron, MINUTE, floor};

    fn zone(name: &str) -> TimeZone {
        TimeZone::get(name).expect("a zone")
    }

    /// The next times in the zone, each as its wall clock shows it.
    fn times(cron: &str, zone_name: &str, after: &str, count: usize) -> Vec<String> {
        let (cron, zone) = (Cron::parse(cron).expect("a cron"), zone(zone_name));
        let after: Timestamp = after.parse().expect("a time");
        let first = cron.next(&zone, after);
        let times = std::iter::successors(first, |time| cron.next(&zone, *time));
        let times = times.take(count);
        times
            .map(|time| {
                time.to_zoned(zone.clone())
                    .strftime("%m-%d %H:%M%:z")
                    .to_string()
            })
            .collect()
    }

    #[test]
    fn fields_have_values_ranges_steps_and_names() {
        for (cron, after, expected) in [
            (
                "30 9 * * mon-fri",
                "2026-03-06T10:00:00Z",
                "03-09 09:30+00:00",
            ),
            ("0 0 29 2 *", "2026-03-01T00:00:00Z", "02-29 00:00+00:00"),
            (
                "5-20/15,59 * * * *",
                "2026-03-01T00:05:00Z",
                "03-01 00:20+00:00",
            ),
            (
                "*/25 8 * JAN,jul 7",
                "2026-03-01T00:00:00Z",
                "07-05 08:00+00:00",
            ),
            // Both fields of days are restricted: one of them is enough.
            ("0 12 13 * 5", "2026-03-07T00:00:00Z", "03-13 12:00+00:00"),
            ("0 12 20 * 5", "2026-03-14T00:00:00Z", "03-20 12:00+00:00"),
            ("0 12 1 * sun", "2026-03-02T00:00:00Z", "03-08 12:00+00:00"),
            ("0 0 1 1 *", "2026-01-01T00:00:00Z", "01-01 00:00+00:00"),
        ] {
            assert_eq!(times(cron, "UTC", after, 1), [expected], "{cron}");
        }
    }

    #[test]
    fn a_time_that_is_skipped_is_the_first_minute_after_the_gap() {
        for (cron, zone, after, expected) in [
            (
                "30 2 * * *",
                "Europe/Berlin",
                "2026-03-28T12:00:00Z",
                ["03-29 03:00+02:00", "03-30 02:30+02:00"],
            ),
            (
                "15,45 2 * * *",
                "Europe/Berlin",
                "2026-03-28T12:00:00Z",
                ["03-29 03:00+02:00", "03-30 02:15+02:00"],
            ),
            (
                "15 2 * * *",
                "Australia/Lord_Howe",
                "2026-10-02T20:00:00Z",
                ["10-04 02:30+11:00", "10-05 02:15+11:00"],
            ),
            (
                "0 12 30 12 *",
                "Pacific/Apia",
                "2011-12-01T00:00:00Z",
                ["12-31 00:00+14:00", "12-30 12:00+14:00"],
            ),
        ] {
            assert_eq!(times(cron, zone, after, 2), expected, "{cron} {zone}");
        }
    }

    #[test]
    fn a_time_that_occurs_twice_is_the_first_of_both() {
        assert_eq!(
            times("30 2 * * *", "Europe/Berlin", "2026-10-24T12:00:00Z", 2),
            ["10-25 02:30+02:00", "10-26 02:30+01:00"]
        );
        // Also when the search begins between both.
        assert_eq!(
            times("30 2 * * *", "Europe/Berlin", "2026-10-25T00:40:00Z", 1),
            ["10-26 02:30+01:00"]
        );
    }

    #[test]
    fn a_star_follows_the_real_clock() {
        assert_eq!(
            times("30 * * * *", "Europe/Berlin", "2026-10-24T23:45:00Z", 3),
            [
                "10-25 02:30+02:00",
                "10-25 02:30+01:00",
                "10-25 03:30+01:00"
            ]
        );
        assert_eq!(
            times("*/30 * * * *", "Europe/Berlin", "2026-03-29T00:30:00Z", 3),
            [
                "03-29 03:00+02:00",
                "03-29 03:30+02:00",
                "03-29 04:00+02:00"
            ]
        );
    }

    #[test]
    fn errors_name_the_field() {
        for (cron, expected) in [
            ("", "but has 0"),
            ("* * * *", "but has 4"),
            ("0 * * * * *", "but has 6"),
            ("@daily", "names with @ are not supported"),
            (
                "60 * * * *",
                "has \"60\" as minute: it must be a number from 0 to 59",
            ),
            ("0 24 * * *", "has \"24\" as hour"),
            ("0 0 0 * *", "has \"0\" as day of the month"),
            (
                "0 0 * foo *",
                "has \"foo\" as month: it must be a number from 1 to 12, or a name from jan to dec",
            ),
            ("0 0 * * 8", "has \"8\" as day of the week"),
            ("5-1 * * * *", "the range ends before it begins"),
            ("*/0 * * * *", "a step is a number from 1 to 59"),
            ("5/2 * * * *", "a step needs * or a range"),
            ("1,,2 * * * *", "has \"\" as minute"),
            ("+5 * * * *", "has \"+5\" as minute"),
            ("0 0 30 2 *", "never occurs"),
            ("0 0 31 4,6 *", "never occurs"),
        ] {
            let error = Cron::parse(cron).expect_err(cron);
            assert!(error.contains(expected), "{cron}: {error}");
        }
        assert!(Cron::parse("0 0 31 2 1").is_ok(), "Mondays in February");
    }

    /// A field of one or two values, or of steps.
    fn field(min: u32, max: u32) -> impl Strategy<Value = String> {
        let value = min..=max;
        prop_oneof![
            Just("*".to_owned()),
            (1..=max).prop_map(|step| format!("*/{step}")),
            value.clone().prop_map(|value| value.to_string()),
            (value.clone(), value).prop_map(|(a, b)| format!("{a},{b}")),
        ]
    }

    const ZONES: [&str; 5] = [
        "UTC",
        "Europe/Berlin",
        "America/New_York",
        "Australia/Lord_Howe",
        "Asia/Kathmandu",
    ];

    proptest! {
        /// Compares the search with a look at each minute of three days around a change of the clocks.
        #[test]
        fn the_next_time_is_the_first_minute_that_matches(
            minute in field(0, 59),
            hour in field(0, 23),
            weekday in field(0, 6),
            zone_name in prop::sample::select(&ZONES[..]),
            start in prop::sample::select(&["2026-03-07", "2026-03-28", "2026-04-04", "2026-10-03", "2026-10-24", "2026-10-31"][..]),
            offset in 0..1440_i64,
        ) {
            let cron = Cron::parse(&format!("{minute} {hour} * * {weekday}")).expect("a cron");
            let zone = zone(zone_name);
            let after: Timestamp = format!("{start}T00:00:30Z").parse().expect("a time");
            let after = after + SignedDuration::from_mins(offset);
            let minutes = (1..4320).map(|count| floor(after) + MINUTE * count);
            let expected = minutes.into_iter().find(|time| occurs_at(&cron, &zone, *time));
            if let Some(expected) = expected {
                prop_assert_eq!(cron.next(&zone, after), Some(expected));
            }
        }
    }

    /// Whether one of the wall clock's minutes for which this one stands matches.
    fn occurs_at(cron: &Cron, zone: &TimeZone, time: Timestamp) -> bool {
        let local = zone.to_datetime(time);
        let matches = |local| {
            cron.next_local(local, local + SignedDuration::from_secs(1))
                .is_some()
        };
        if cron.minutes.has_star || cron.hours.has_star {
            return matches(local);
        }
        let before = zone.to_datetime(time - MINUTE);
        let skipped = (1..).map(|count| before + MINUTE * count);
        let mut shown = skipped.take_while(|it| *it < local).chain([local]);
        // The first time that the clocks show it.
        let is_first = (1..=180).all(|count| zone.to_datetime(time - MINUTE * count) != local);
        match before < local {
            true => shown.any(matches) && is_first,
            false => is_first && matches(local),
        }
    }
}
