//! Timestamps as text: RFC 3339 in UTC, always with milliseconds, so that they sort as texts. Their own `Serialize` leaves out
//! zeros at the end, and takes a detour over a formatter.

use jiff::Timestamp;
use jiff::fmt::temporal::DateTimePrinter;
use serde::{Serialize, Serializer};

const PRINTER: DateTimePrinter = DateTimePrinter::new().precision(Some(3));

pub fn append(time: Timestamp, text: &mut Vec<u8>) {
    // Only a writer can fail, and a vector does not.
    let _ = PRINTER.print_timestamp(&time, text);
}

pub fn text(time: Timestamp) -> String {
    PRINTER.timestamp_to_string(&time)
}

/// For `#[serde(serialize_with)]`.
pub fn serialize<S: Serializer>(time: &Timestamp, serializer: S) -> Result<S::Ok, S::Error> {
    text(*time).serialize(serializer)
}

/// For `#[serde(serialize_with)]`.
pub fn serialize_option<S: Serializer>(
    time: &Option<Timestamp>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    time.map(text).serialize(serializer)
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;

    use super::{append, text};

    #[test]
    fn a_time_has_three_digits_of_a_second() {
        for (millisecond, expected) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (13_880, "1970-01-01T00:00:13.880Z"),
            (13_886, "1970-01-01T00:00:13.886Z"),
        ] {
            let time = Timestamp::from_millisecond(millisecond).expect("a time");
            assert_eq!(text(time), expected);
            let mut appended = Vec::new();
            append(time, &mut appended);
            assert_eq!(appended, expected.as_bytes());
            assert_eq!(expected.parse().ok(), Some(time));
        }
    }
}
