//! Timestamps as text, in RFC 3339 in UTC, without the detour over a formatter that their `Serialize` takes.

use jiff::Timestamp;
use jiff::fmt::temporal::DateTimePrinter;
use serde::{Serialize, Serializer};

const PRINTER: DateTimePrinter = DateTimePrinter::new();

/// Appends the text that [`Timestamp`] is displayed as.
pub fn append(time: Timestamp, text: &mut Vec<u8>) {
    // Only a writer can fail, and a vector does not.
    let _ = PRINTER.print_timestamp(&time, text);
}

/// For `#[serde(serialize_with)]`.
pub fn serialize<S: Serializer>(time: &Timestamp, serializer: S) -> Result<S::Ok, S::Error> {
    PRINTER.timestamp_to_string(time).serialize(serializer)
}

/// For `#[serde(serialize_with)]`.
pub fn serialize_option<S: Serializer>(
    time: &Option<Timestamp>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let text = time.map(|time| PRINTER.timestamp_to_string(&time));
    text.serialize(serializer)
}
