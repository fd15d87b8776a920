//! Times in query parameters.

use jiff::Timestamp;
use jiff::fmt::temporal::Pieces;

/// An RFC 3339 time. A `+` that was not percent-encoded arrives as a space.
pub fn parse_time(text: &str) -> Option<Timestamp> {
    bound(text).or_else(|| bound(&text.replace(' ', "+")))
}

/// A time. A time beyond the range of timestamps becomes the first or the last one, which is before or after every run.
fn bound(text: &str) -> Option<Timestamp> {
    if let Ok(time) = text.parse() {
        return Some(time);
    }
    let pieces = Pieces::parse(text).ok()?;
    pieces.time().and(pieces.to_numeric_offset())?;
    Some(match pieces.date().year() {
        9999 => Timestamp::MAX,
        -9999 => Timestamp::MIN,
        _ => return None,
    })
}
