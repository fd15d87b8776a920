//! The beginnings of long texts and arguments, for events.

use std::sync::Arc;

use serde_json::value::{RawValue, to_raw_value};

use crate::domain::message::truncate_to_bytes;

/// Arguments with more levels are shown as text: many JSON parsers reject a deep document.
const MAX_LEVELS: usize = 64;

/// The beginning of a text, cut at a character boundary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextExcerpt {
    pub text: String,
    pub truncated: bool,
}

impl TextExcerpt {
    pub fn new(text: &str, max_bytes: usize) -> Self {
        Self {
            text: truncate_to_bytes(text, max_bytes).to_owned(),
            truncated: text.len() > max_bytes,
        }
    }
}

/// The arguments of a call on one line of JSON.
#[derive(Clone, Debug)]
pub struct ArgumentsExcerpt {
    /// The arguments, or a string with the beginning of their JSON.
    pub json: Arc<RawValue>,
    pub truncated: bool,
}

impl ArgumentsExcerpt {
    pub fn new(arguments: &Arc<RawValue>, max_bytes: usize) -> Self {
        let json = arguments.get();
        if json.len() > max_bytes || levels(json) > MAX_LEVELS {
            return Self::of_text(json, max_bytes);
        }
        Self {
            json: on_one_line(arguments),
            truncated: false,
        }
    }

    pub fn of_text(text: &str, max_bytes: usize) -> Self {
        let excerpt = TextExcerpt::new(text, max_bytes);
        let json = to_raw_value(&excerpt.text).unwrap_or_default();
        Self {
            json: Arc::from(json),
            truncated: excerpt.truncated,
        }
    }
}

/// A string in JSON has no raw line break, so that every line break is white space.
fn on_one_line(json: &Arc<RawValue>) -> Arc<RawValue> {
    if !json.get().contains(['\n', '\r']) {
        return Arc::clone(json);
    }
    let line = json.get().replace(['\n', '\r'], " ");
    RawValue::from_string(line).map_or_else(|_| Arc::clone(json), Arc::from)
}

/// How deep arrays and objects are nested.
fn levels(json: &str) -> usize {
    let (mut level, mut deepest) = (0_usize, 0);
    let (mut in_string, mut is_escaped) = (false, false);
    for byte in json.bytes() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = in_string,
            b'"' => in_string = !in_string,
            b'{' | b'[' if !in_string => {
                level += 1;
                deepest = deepest.max(level);
            }
            b'}' | b']' if !in_string => level = level.saturating_sub(1),
            _ => {}
        }
    }
    deepest
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::value::RawValue;

    use super::{ArgumentsExcerpt, TextExcerpt};

    fn excerpt(json: &str, max_bytes: usize) -> (String, bool) {
        let raw = RawValue::from_string(json.to_owned()).expect("JSON");
        let excerpt = ArgumentsExcerpt::new(&Arc::from(raw), max_bytes);
        (excerpt.json.get().to_owned(), excerpt.truncated)
    }

    #[test]
    fn a_text_is_cut_at_a_character_boundary() {
        let cut = TextExcerpt::new("aää", 4);
        assert_eq!((cut.text.as_str(), cut.truncated), ("aä", true));
        let whole = TextExcerpt::new("aää", 5);
        assert_eq!((whole.text.as_str(), whole.truncated), ("aää", false));
    }

    #[test]
    fn short_arguments_stay_json_on_one_line() {
        assert_eq!(
            excerpt("{\n  \"a\": 1.50,\r\n  \"b\": \"x\\n\"\n}", 99),
            ("{   \"a\": 1.50,    \"b\": \"x\\n\" }".to_owned(), false)
        );
    }

    #[test]
    fn long_arguments_become_the_beginning_of_their_text() {
        let (json, truncated) = excerpt("{\"path\": \"ä\"}", 11);
        assert_eq!((json.as_str(), truncated), (r#""{\"path\": \"""#, true));
    }

    #[test]
    fn deep_arguments_are_a_text() {
        let nested = |levels: usize| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
        assert_eq!(excerpt(&nested(64), 999), (nested(64), false));
        let (json, truncated) = excerpt(&nested(65), 999);
        assert_eq!((json, truncated), (format!("\"{}\"", nested(65)), false));
        let braces_in_a_string = format!(r#"{{"a\"b": "\\{}"}}"#, "{".repeat(99));
        assert!(excerpt(&braces_in_a_string, 999).0.starts_with('{'));
    }
}
