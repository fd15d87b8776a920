//! Counts as the signed integers of a database.

/// Databases have signed integers: a larger count becomes the largest of them.
pub fn signed(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// A negative number becomes 0.
pub fn unsigned(count: i64) -> u64 {
    u64::try_from(count).unwrap_or(0)
}
