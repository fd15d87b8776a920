//! How numbers, times and texts are shown.

use jiff::Timestamp;
use maud::{Markup, html};

use crate::domain::run::Status;
use crate::domain::terminal_text;
use crate::domain::usage::Cost;

/// `1.2 s`, `3 min 04 s`, `2 h 10 min`.
pub fn duration(milliseconds: u64) -> String {
    let seconds = milliseconds / 1000;
    match seconds {
        0 => format!("{milliseconds} ms"),
        1..=9 => format!("{}.{} s", seconds, milliseconds % 1000 / 100),
        10..=59 => format!("{seconds} s"),
        60..=3599 => format!("{} min {:02} s", seconds / 60, seconds % 60),
        _ => format!("{} h {:02} min", seconds / 3600, seconds / 60 % 60),
    }
}

/// A mark of a time axis: `0`, `200 ms`, `15 s`, `2 min`, `1 h`.
pub fn tick(milliseconds: u64) -> String {
    match milliseconds {
        0 => "0".to_owned(),
        1..1_000 => format!("{milliseconds} ms"),
        1_000..60_000 => format!("{} s", milliseconds as f64 / 1e3),
        60_000..3_600_000 => format!("{} min", milliseconds as f64 / 6e4),
        _ => format!("{} h", milliseconds as f64 / 3.6e6),
    }
}

/// `950`, `12,345`.
pub fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `950`, `12.3k`, `4.5M`.
pub fn count(number: u64) -> String {
    match number {
        0..1_000 => number.to_string(),
        1_000..1_000_000 => format!("{:.1}k", number as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1}M", number as f64 / 1e6),
        _ => format!("{:.1}G", number as f64 / 1e9),
    }
}

/// `950 bytes`, `12.3 kB`, `4.5 MB`.
pub fn bytes(number: u64) -> String {
    match number {
        0..1_000 => format!("{number} bytes"),
        1_000..1_000_000 => format!("{:.1} kB", number as f64 / 1e3),
        _ => format!("{:.1} MB", number as f64 / 1e6),
    }
}

/// `0 %`, `0.4 %`, `12 %`.
pub fn percent(part: u64, whole: u64) -> String {
    let share = part as f64 * 100.0 / whole.max(1) as f64;
    match share {
        0.0 => "0 %".to_owned(),
        share if share < 10.0 => format!("{share:.1} %"),
        share => format!("{share:.0} %"),
    }
}

/// Dollars with as many digits as small amounts need; a dash without a price.
pub fn cost(cost: Option<Cost>) -> String {
    usd(cost.map(Cost::to_usd))
}

pub fn usd(usd: Option<f64>) -> String {
    match usd {
        None => "–".to_owned(),
        Some(0.0) => "$0".to_owned(),
        Some(usd) if usd < 0.01 => format!("${usd:.5}"),
        Some(usd) if usd < 1.0 => format!("${usd:.3}"),
        Some(usd) => format!("${usd:.2}"),
    }
}

/// At most three decimals: `0.8`, `1`, `0.125`.
pub fn decimal(number: f64) -> String {
    // No sign of a zero.
    ((number * 1e3).round() / 1e3 + 0.0).to_string()
}

/// `+0.1`, `−0.125`, `0`.
pub fn signed(number: f64) -> String {
    let size = decimal(number.abs());
    match number {
        _ if size == "0" => size,
        number if number < 0.0 => format!("−{size}"),
        _ => format!("+{size}"),
    }
}

/// How long ago, with the time itself as its title.
pub fn ago(time: Timestamp, now: Timestamp) -> Markup {
    let seconds = now.as_second() - time.as_second();
    let text = match seconds {
        ..5 => "now".to_owned(),
        5..60 => format!("{seconds} s ago"),
        60..3600 => format!("{} min ago", seconds / 60),
        3600..86_400 => format!("{} h ago", seconds / 3600),
        86_400..604_800 => format!("{} d ago", seconds / 86_400),
        _ => time.strftime("%Y-%m-%d").to_string(),
    };
    html! { time datetime=(time) title=(instant(time)) { (text) } }
}

/// Date and time in UTC.
pub fn instant(time: Timestamp) -> String {
    time.strftime("%Y-%m-%d %H:%M:%S UTC").to_string()
}

pub fn status(status: Status) -> Markup {
    let name = status.as_str();
    html! { span class=(format!("status {name}")) { (name) } }
}

/// The beginning of a text on one line.
pub fn excerpt(text: &str, characters: usize) -> String {
    let mut line = String::new();
    let mut count = 0;
    for word in text.split_whitespace() {
        if count > 0 {
            line.push(' ');
        }
        for letter in word.chars() {
            if count >= characters {
                line.push('…');
                return line;
            }
            line.push(terminal_text::mark_reordering(letter));
            count += 1;
        }
        count += 1;
    }
    line
}

/// A text of a model or a client, without control over the order of its characters.
pub fn prose(text: &str) -> String {
    text.chars().map(terminal_text::mark_reordering).collect()
}

/// JSON with line breaks, as it is if it is none. Invisible characters and those that control a text's direction are `\uXXXX`:
/// a person approves what is shown.
pub fn pretty_json(json: &str) -> String {
    let pretty = serde_json::from_str::<serde_json::Value>(json)
        .and_then(|value| serde_json::to_string_pretty(&value));
    match pretty {
        Ok(pretty) => terminal_text::escape_json(&pretty),
        Err(_) => terminal_text::escape_json(json),
    }
}

#[cfg(test)]
mod tests {
    use super::{
        bytes, count, decimal, duration, excerpt, percent, pretty_json, prose, signed, thousands,
        tick, usd,
    };

    #[test]
    fn numbers_are_short() {
        let durations = [0, 950, 1_250, 61_000, 7_800_000].map(duration);
        assert_eq!(
            durations,
            ["0 ms", "950 ms", "1.2 s", "1 min 01 s", "2 h 10 min"]
        );
        assert_eq!(
            [(0, 3), (1, 250), (1, 3)].map(|(a, b)| percent(a, b)),
            ["0 %", "0.4 %", "33 %"]
        );
        assert_eq!(
            [0.8, 1.0, 0.123_45, -0.000_1].map(decimal),
            ["0.8", "1", "0.123", "0"]
        );
        assert_eq!([0.1, -0.05, -0.000_1].map(signed), ["+0.1", "−0.05", "0"]);
        assert_eq!([12, 12_345, 4_500_000].map(count), ["12", "12.3k", "4.5M"]);
        assert_eq!(
            [950, 12_345, 4_500_000].map(thousands),
            ["950", "12,345", "4,500,000"]
        );
        assert_eq!(
            [0, 200, 2_500, 90_000, 7_200_000].map(tick),
            ["0", "200 ms", "2.5 s", "1.5 min", "2 h"]
        );
        assert_eq!(
            [70, 48_213, 4_500_000].map(bytes),
            ["70 bytes", "48.2 kB", "4.5 MB"]
        );
        let amounts = [None, Some(0.0), Some(0.000_12), Some(0.25), Some(12.5)].map(usd);
        assert_eq!(amounts, ["–", "$0", "$0.00012", "$0.250", "$12.50"]);
    }

    #[test]
    fn an_excerpt_is_one_line() {
        assert_eq!(excerpt(" a\n\tb ", 9), "a b");
        assert_eq!(excerpt("abcdef", 3), "abc…");
        assert_eq!(excerpt("a\u{202e}b", 9), "a\u{fffd}b");
    }

    #[test]
    fn hidden_characters_are_shown() {
        let json = "{\"path\": \"a\u{202e}txt.exe\u{200b}\", \"text\": \"שלום\"}";
        let pretty = pretty_json(json);
        assert_eq!(
            pretty,
            "{\n  \"path\": \"a\\u202etxt.exe\\u200b\",\n  \"text\": \"שלום\"\n}"
        );
        let value = |json: &str| serde_json::from_str::<serde_json::Value>(json).ok();
        assert_eq!(value(&pretty), value(json));
        assert_eq!(pretty_json("no\u{2066} JSON"), "no\\u2066 JSON");
        assert_eq!(prose("a\u{2067}b\nc"), "a\u{fffd}b\nc");
    }
}
