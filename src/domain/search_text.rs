//! What a client searches runs for: a text, or a part of an id.

use regex::bytes::{Regex, RegexBuilder};
use uuid::Uuid;

use crate::domain::run::RunId;

/// Maximum characters of a search.
pub const MAX_SEARCH_CHARS: usize = 200;
/// Digits of an id, and of the shortest part of one: a word such as `cafe` would find runs by chance.
const ID_DIGITS: usize = 32;
const MIN_ID_DIGITS: usize = 6;

/// Letters are compared without case, by Unicode's simple case folding: one character equals one other, so `ß` is not `ss`.
#[derive(Clone, Debug)]
pub struct SearchText {
    /// Compares in linear time.
    pattern: Regex,
    /// The text without `run_` and dashes, if it may be a part of an id.
    id_digits: Option<String>,
}

impl SearchText {
    /// Trims the text. `None` if it is blank or too long.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        if text.is_empty() || text.chars().nth(MAX_SEARCH_CHARS).is_some() {
            return None;
        }
        let pattern = RegexBuilder::new(&regex::escape(text))
            .case_insensitive(true)
            .build();
        let id = text.to_ascii_lowercase();
        let digits = id.strip_prefix("run_").unwrap_or(&id).replace('-', "");
        let is_id_part = (MIN_ID_DIGITS..=ID_DIGITS).contains(&digits.len())
            && digits.chars().all(|digit| digit.is_ascii_hexdigit());
        Some(Self {
            pattern: pattern.ok()?,
            id_digits: is_id_part.then_some(digits),
        })
    }

    /// Whether a text in UTF-8 contains it.
    pub fn is_in(&self, text: &[u8]) -> bool {
        self.pattern.is_match(text)
    }

    /// Whether the id begins or ends with it.
    pub fn is_part_of(&self, id: RunId) -> bool {
        let mut digits = [0; ID_DIGITS];
        let digits = &*id.0.simple().encode_lower(&mut digits);
        let is_part = |part: &String| digits.starts_with(part) || digits.ends_with(part);
        self.id_digits.as_ref().is_some_and(is_part)
    }

    /// The id, if it is a whole one.
    pub fn whole_id(&self) -> Option<RunId> {
        let digits = self.id_digits.as_ref();
        let digits = digits.filter(|digits| digits.len() == ID_DIGITS)?;
        Uuid::try_parse(digits).ok().map(RunId)
    }
}

#[cfg(test)]
mod tests {
    use super::SearchText;
    use crate::domain::run::RunId;

    fn search(text: &str) -> SearchText {
        SearchText::parse(text).expect(text)
    }

    #[test]
    fn letters_are_compared_by_simple_case_folding() {
        for (text, other) in [
            ("ÄRGER", "viel ärger!"),
            ("ΣΊΣΥΦΟΣ", "σίσυφος"),
            ("σίσυφος", "Σίσυφοσ"),
            ("straße", "STRAẞE"),
            ("ДОМ", "дом"),
            ("a.b*", "xA.B*x"),
        ] {
            assert!(search(text).is_in(other.as_bytes()), "{text} in {other}");
            assert!(search(other).is_in(other.as_bytes()), "{other} in itself");
        }
        for (text, other) in [
            ("STRASSE", "straße"),
            ("straße", "STRASSE"),
            ("ARGER", "ärger"),
            ("i", "İ"),
            ("a.b", "axb"),
        ] {
            assert!(!search(text).is_in(other.as_bytes()), "{text} in {other}");
        }
    }

    #[test]
    fn an_id_is_found_by_its_beginning_and_its_end() {
        let id: RunId = "run_01890a5d-ac96-774b-bcce-b302099a8057"
            .parse()
            .expect("an id");
        for part in [
            "run_01890A5D",
            "01890a5d-ac96-7",
            "01890a5dac967",
            "9a8057",
            "bcce-b302099a8057",
        ] {
            assert!(search(part).is_part_of(id), "{part}");
            assert_eq!(search(part).whole_id(), None, "{part}");
        }
        for text in ["a8057", "ac96-774b", "01890a5e", "run_", "8057x1"] {
            assert!(!search(text).is_part_of(id), "{text}");
        }
        assert_eq!(search(&id.to_string()).whole_id(), Some(id));
    }

    #[test]
    fn blank_and_long_texts_are_refused() {
        for text in [String::new(), " \n".to_owned(), "ä".repeat(201)] {
            assert!(SearchText::parse(&text).is_none(), "{text}");
        }
        assert!(search(&"ä".repeat(200)).is_in("Ä".repeat(300).as_bytes()));
    }
}
