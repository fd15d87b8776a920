//! Parses whole numbers, sizes and durations.

use std::ops::RangeInclusive;

use crate::settings::document::Value;

/// `None` if the value is not a whole number, `Err` if it is out of range.
pub fn parse_integer(value: &Value, range: RangeInclusive<u64>) -> Option<Result<u64, String>> {
    let number = match value {
        Value::Integer(number) => i128::from(*number),
        Value::HugeInteger => i128::MAX,
        Value::Untyped(text) => text.trim().parse().ok()?,
        _ => return None,
    };
    let (min, max) = (*range.start(), *range.end());
    let message = match u64::try_from(number) {
        Ok(number) if range.contains(&number) => return Some(Ok(number)),
        Ok(number) if number > max => format!("cannot exceed {max}"),
        Err(_) if number > 0 => format!("cannot exceed {max}"),
        _ if min == 0 => "must be non-negative".to_owned(),
        _ => format!("must be at least {min}"),
    };
    Some(Err(message))
}

/// Bytes of a text such as `4 MiB`, `10MB` or `512`.
pub fn parse_bytes(text: &str) -> Option<usize> {
    let text = text.trim();
    let end = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let number: usize = text[..end].parse().ok()?;
    let unit = match text[end..].trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kb" => 1_000,
        "kib" => 1 << 10,
        "mb" => 1_000_000,
        "mib" => 1 << 20,
        "gb" => 1_000_000_000,
        "gib" => 1 << 30,
        _ => return None,
    };
    number.checked_mul(unit)
}

/// A text such as `30d`, in the largest unit up to days that needs no fraction.
pub fn format_seconds(seconds: u64) -> String {
    let units = [("d", 86_400), ("h", 3_600), ("m", 60)];
    let mut fitting = units
        .iter()
        .filter(|(_, unit)| seconds.is_multiple_of(*unit));
    match fitting.next() {
        Some((name, unit)) => format!("{}{name}", seconds / unit),
        None => format!("{seconds}s"),
    }
}

/// Seconds of a text such as `30d`, `12 h` or `90`.
pub fn parse_seconds(text: &str) -> Option<u64> {
    let text = text.trim();
    let end = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let number: u64 = text[..end].parse().ok()?;
    let unit = match text[end..].trim() {
        "" | "s" => 1,
        "m" => 60,
        "h" => 3_600,
        "d" => 86_400,
        "w" => 7 * 86_400,
        _ => return None,
    };
    number.checked_mul(unit)
}

#[cfg(test)]
mod tests {
    use super::{parse_bytes, parse_seconds};

    #[test]
    fn sizes_and_times_are_read() {
        assert_eq!(parse_bytes("4 MiB"), Some(4 << 20));
        assert_eq!(parse_bytes("10kb"), Some(10_000));
        assert_eq!(parse_bytes("512"), Some(512));
        assert_eq!(parse_bytes("MiB"), None);
        assert_eq!(parse_bytes("99999999999999999999"), None);
        assert_eq!(parse_bytes("18446744073709551615 GiB"), None);
        assert_eq!(parse_seconds("90"), Some(90));
        assert_eq!(parse_seconds(" 12 h "), Some(43_200));
        assert_eq!(parse_seconds("30d"), Some(2_592_000));
        assert_eq!(parse_seconds("99999999999999999w"), None);
        assert_eq!(parse_seconds("1 month"), None);
        assert_eq!(parse_seconds("d"), None);
    }
}
