//! Removes what patterns of the operator match from texts that are recorded only to be shown.

use std::borrow::Cow;

use regex::Regex;

use crate::domain::request_head::REDACTED;

/// The patterns of `[data] redact`.
#[derive(Clone, Debug, Default)]
pub struct Redactor {
    patterns: Vec<Regex>,
}

/// Why a pattern is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PatternError {
    #[error("has {pattern:?}, which is not a regular expression: {cause}")]
    Invalid { pattern: String, cause: String },
    #[error("has {pattern:?}, which matches an empty text, and so every text")]
    MatchesNothing { pattern: String },
}

impl Redactor {
    /// Adds a pattern. Matching takes linear time.
    pub fn add(&mut self, pattern: &str) -> Result<(), PatternError> {
        let regex = Regex::new(pattern).map_err(|error| PatternError::Invalid {
            pattern: pattern.to_owned(),
            // The last line says why; the ones before repeat the pattern.
            cause: error
                .to_string()
                .lines()
                .last()
                .unwrap_or_default()
                .trim()
                .to_owned(),
        })?;
        if regex.is_match("") {
            let pattern = pattern.to_owned();
            return Err(PatternError::MatchesNothing { pattern });
        }
        self.patterns.push(regex);
        Ok(())
    }

    pub fn is_empty(&self) -> bool {
        self.patterns.is_empty()
    }

    /// The text with [`REDACTED`] in place of each match; borrowed if there is none.
    pub fn redact<'a>(&self, text: &'a str) -> Cow<'a, str> {
        let mut redacted = Cow::Borrowed(text);
        for pattern in &self.patterns {
            if let Cow::Owned(replaced) = pattern.replace_all(&redacted, regex::NoExpand(REDACTED))
            {
                redacted = Cow::Owned(replaced);
            }
        }
        redacted
    }

    /// Redacts each string of a JSON document, names of fields included, so that the result is JSON too. Returns `None` if
    /// nothing matches.
    pub fn redact_json(&self, json: &str) -> Option<String> {
        let mut redacted = String::new();
        let mut copied = 0;
        let mut at = 0;
        while let Some(start) = json[at..].find('"').map(|start| at + start) {
            let Some(end) = string_end(json, start) else {
                break;
            };
            at = end;
            let Ok(text) = serde_json::from_str::<String>(&json[start..end]) else {
                continue;
            };
            if let Cow::Owned(replaced) = self.redact(&text) {
                redacted.push_str(&json[copied..start]);
                redacted.push_str(&serde_json::to_string(&replaced).unwrap_or_default());
                copied = end;
            }
        }
        if copied == 0 {
            return None;
        }
        redacted.push_str(&json[copied..]);
        Some(redacted)
    }
}

/// The end of the JSON string that starts here.
fn string_end(json: &str, start: usize) -> Option<usize> {
    let mut at = start + 1;
    loop {
        at += json[at..].find(['"', '\\'])?;
        if json.as_bytes()[at] == b'"' {
            return Some(at + 1);
        }
        // An escaped character; the rest of a Unicode escape has neither a quote nor a backslash.
        at += 1 + json[at + 1..].chars().next()?.len_utf8();
    }
}

#[cfg(test)]
mod tests {
    use super::{PatternError, Redactor};

    fn redactor(patterns: &[&str]) -> Redactor {
        let mut redactor = Redactor::default();
        for pattern in patterns {
            redactor.add(pattern).expect("a pattern");
        }
        redactor
    }

    #[test]
    fn matches_are_replaced_in_each_string_of_a_document() {
        let redactor = redactor(&["sk-[a-z]+", r"(?m)^password: .*$"]);
        let json =
            r#"{"a":"sk-abc and \"sk-def\"","n":1.50,"b":["user: x\npassword: \"y\"\nend"]}"#;
        assert_eq!(
            redactor.redact_json(json).as_deref(),
            Some(
                r#"{"a":"[redacted] and \"[redacted]\"","n":1.50,"b":["user: x\n[redacted]\nend"]}"#
            )
        );
        assert_eq!(redactor.redact_json(r#"{"a":"\\","b":"\u00e9 sk"}"#), None);
        assert_eq!(redactor.redact_json(r#"{"a":"sk-abc"#), None);
    }

    #[test]
    fn a_pattern_that_cannot_work_is_rejected() {
        let mut redactor = Redactor::default();
        let error = redactor.add("a(").expect_err("no pattern").to_string();
        assert!(error.contains("unclosed group"), "{error}");
        let error = redactor.add("a*").expect_err("no pattern");
        assert!(matches!(error, PatternError::MatchesNothing { .. }));
        assert!(redactor.is_empty());
    }
}
