//! Times and durations as people read them.

use jiff::{SpanRelativeTo, Timestamp};

/// How long ago it was, such as `3m ago`.
pub fn ago(then: Timestamp, now: Timestamp) -> String {
    let seconds = now.as_second().saturating_sub(then.as_second()).max(0);
    match seconds {
        0..60 => format!("{seconds}s ago"),
        60..3_600 => format!("{}m ago", seconds / 60),
        3_600..172_800 => format!("{}h ago", seconds / 3_600),
        _ => format!("{}d ago", seconds / 86_400),
    }
}

/// Milliseconds as seconds.
pub fn seconds(milliseconds: u64) -> String {
    format!("{}.{:02} s", milliseconds / 1000, milliseconds % 1000 / 10)
}

/// Reads whole seconds from a text such as `90`, `2m` or `1h30m`.
pub fn parse_seconds(text: &str) -> Result<u64, String> {
    const EXAMPLES: &str = "use seconds or units, such as 90, 90s, 2m or 1h30m";
    let text = text.trim();
    if let Ok(seconds) = text.parse() {
        return Ok(seconds);
    }
    let duration: jiff::SignedDuration = text
        .parse()
        .map_err(|_| format!("not a duration: {EXAMPLES}"))?;
    match u64::try_from(duration.as_secs()) {
        Ok(seconds) if duration.subsec_nanos() == 0 => Ok(seconds),
        Ok(_) => Err(format!("not in whole seconds: {EXAMPLES}")),
        Err(_) => Err(format!("cannot be negative: {EXAMPLES}")),
    }
}

/// The time that an age such as `7d` means; other texts as they are, because the daemon knows them.
pub fn absolute_time(text: &str) -> String {
    let age = text.trim().parse::<jiff::Span>().ok();
    let age = age.and_then(|age| age.to_duration(SpanRelativeTo::days_are_24_hours()).ok());
    let time = age.and_then(|age| Timestamp::now().checked_sub(age.abs()).ok());
    time.map_or(text.to_owned(), |time| time.to_string())
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;

    use super::{absolute_time, ago, parse_seconds};

    #[test]
    fn ages_have_one_unit() {
        let at = |second| Timestamp::from_second(second).expect("a time");
        for (seconds, text) in [
            (-5, "0s ago"),
            (59, "59s ago"),
            (180, "3m ago"),
            (7_300, "2h ago"),
            (172_800, "2d ago"),
        ] {
            assert_eq!(ago(at(1_000_000), at(1_000_000 + seconds)), text);
        }
    }

    #[test]
    fn ages_become_times_and_other_texts_stay() {
        for (text, hours) in [("7d", 168), ("12h", 12), ("2w", 336), ("1d12h", 36)] {
            let time: Timestamp = absolute_time(text).parse().expect(text);
            let age = Timestamp::now().duration_since(time).as_secs();
            assert!((hours * 3600..hours * 3600 + 60).contains(&age), "{text}");
        }
        for text in ["2026-01-31", "2026-01-31T00:00:00Z", "yesterday", ""] {
            assert_eq!(absolute_time(text), text);
        }
    }

    #[test]
    fn durations_have_units() {
        for (text, seconds) in [
            ("90", 90),
            ("90s", 90),
            (" 2m", 120),
            ("1h30m", 5_400),
            ("24h", 86_400),
        ] {
            assert_eq!(parse_seconds(text), Ok(seconds), "{text}");
        }
        for text in ["", "x", "-1m", "500ms", "1.5", "2 monkeys"] {
            assert!(parse_seconds(text).is_err(), "{text}");
        }
    }
}
