//! Names that operators and clients give: of agents, sessions and scores.

/// 1 to 64 letters, digits, dots, underscores and hyphens, the first one a letter or a digit.
pub fn is_name(name: &str) -> bool {
    let bytes = name.as_bytes();
    (1..=64).contains(&bytes.len())
        && bytes[0].is_ascii_alphanumeric()
        && bytes
            .iter()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
}
