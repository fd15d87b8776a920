//! Patterns of texts that differ each time, such as times and ids.

use std::borrow::Cow;

use regex::{Regex, RegexBuilder};

/// The most bytes of a compiled pattern: some are a client's.
const MAX_COMPILED: usize = 2 << 20;

/// Texts that differ each time. Matching takes linear time.
#[derive(Clone, Debug, Default)]
pub struct Ignore(Vec<Regex>);

impl Ignore {
    /// # Errors
    /// Which pattern is invalid, and why.
    pub fn new(patterns: &[String]) -> Result<Self, (usize, regex::Error)> {
        let compiled = patterns.iter().enumerate().map(|(index, pattern)| {
            let compiled = RegexBuilder::new(pattern).size_limit(MAX_COMPILED).build();
            compiled.map_err(|error| (index, error))
        });
        compiled.collect::<Result<_, _>>().map(Self)
    }

    pub fn is_same(&self, recorded: &str, now: &str) -> bool {
        recorded == now || self.normalize(recorded) == self.normalize(now)
    }

    /// The text with the same sign for all that the patterns match.
    pub fn normalize<'a>(&self, text: &'a str) -> Cow<'a, str> {
        let mut text = Cow::Borrowed(text);
        for pattern in &self.0 {
            if let Cow::Owned(replaced) = pattern.replace_all(&text, "…") {
                text = Cow::Owned(replaced);
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::Ignore;

    #[test]
    fn ignored_texts_make_no_difference() {
        let ignore = Ignore::new(&[r"\d+ ms".to_owned()]).expect("a pattern");
        assert!(ignore.is_same("took 3 ms", "took 12 ms"));
        assert!(!ignore.is_same("took 3 ms", "took 3 s"));
        let invalid = Ignore::new(&["ok".to_owned(), "(".to_owned()]);
        assert_eq!(invalid.err().map(|it| it.0), Some(1));
        assert!(Ignore::new(&[r"(\w{200}){200}".to_owned()]).is_err());
    }
}
