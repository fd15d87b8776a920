//! Numbers with their nouns.

use std::fmt::Display;

/// `1 file`, `2 files`, `0 entries`, `3 matches`.
pub fn counted<N: Display + PartialEq + From<u8>>(number: N, noun: &str) -> String {
    if number == N::from(1) {
        return format!("1 {noun}");
    }
    let stem = noun.strip_suffix('y');
    match stem.filter(|stem| !stem.ends_with(['a', 'e', 'o', 'u'])) {
        Some(stem) => format!("{number} {stem}ies"),
        None if noun.ends_with("ch") || noun.ends_with('s') => format!("{number} {noun}es"),
        None => format!("{number} {noun}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::counted;

    #[test]
    fn one_is_singular() {
        for (number, noun, text) in [
            (1, "root run", "1 root run"),
            (0, "root run", "0 root runs"),
            (2, "reply", "2 replies"),
            (2, "key", "2 keys"),
            (2, "match", "2 matches"),
        ] {
            assert_eq!(counted(number, noun), text);
        }
    }
}
