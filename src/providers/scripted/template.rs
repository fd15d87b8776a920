//! Texts with holes that quote the conversation: `{{input}}`, `{{results}}`, `{{result.2}}`. Knows no script file.

use crate::config::MAX_REPLY;
use crate::domain::message::ToolResult;

/// A text whose holes are known to be fillable by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template(Vec<Piece>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    Text(String),
    Input,
    Results,
    /// Counts from 1.
    Result(usize),
}

/// What holes are filled with.
#[derive(Clone, Copy, Debug)]
pub struct Quotes<'a> {
    /// The run's user message.
    pub input: &'a str,
    /// The results of the last batch of tool calls, in the order of the calls.
    pub results: &'a [ToolResult],
}

/// Why a text cannot be filled in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unfilled {
    /// It quotes a result that the conversation does not have.
    #[error("the script quotes {{{{result.{asked}}}}}, but the last turn has {there} tool results")]
    NoResult {
        /// The result asked for.
        asked: usize,
        /// How many there are.
        there: usize,
    },
    /// It would be longer than any reply may be.
    #[error("response too large")]
    TooLarge,
}

impl Template {
    /// Reads a text. `{{{{` stands for a literal `{{`. The error names the hole and those that there are.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut pieces = Vec::new();
        let mut plain = String::new();
        let mut rest = text;
        while let Some(at) = rest.find("{{") {
            plain.push_str(&rest[..at]);
            rest = &rest[at + 2..];
            if let Some(after) = rest.strip_prefix("{{") {
                plain.push_str("{{");
                rest = after;
                continue;
            }
            let Some(end) = rest.find("}}") else {
                return Err(
                    "\"{{\" is never closed; write \"{{{{\" for two literal braces".to_owned(),
                );
            };
            let hole = hole(&rest[..end])?;
            rest = &rest[end + 2..];
            if !plain.is_empty() {
                pieces.push(Piece::Text(std::mem::take(&mut plain)));
            }
            pieces.push(hole);
        }
        plain.push_str(rest);
        if !plain.is_empty() {
            pieces.push(Piece::Text(plain));
        }
        Ok(Self(pieces))
    }

    /// The text with its holes filled, at most [`MAX_REPLY`] bytes of it.
    pub fn fill(&self, quotes: Quotes<'_>) -> Result<String, Unfilled> {
        let mut filled = String::new();
        for piece in &self.0 {
            match piece {
                Piece::Text(text) => push(&mut filled, text)?,
                Piece::Input => push(&mut filled, quotes.input)?,
                Piece::Results => {
                    for (position, result) in quotes.results.iter().enumerate() {
                        push(&mut filled, if position == 0 { "" } else { "\n\n" })?;
                        push(&mut filled, &result.content)?;
                    }
                }
                Piece::Result(asked) => {
                    let result = quotes.results.get(asked - 1).ok_or(Unfilled::NoResult {
                        asked: *asked,
                        there: quotes.results.len(),
                    })?;
                    push(&mut filled, &result.content)?;
                }
            }
        }
        Ok(filled)
    }
}

fn hole(name: &str) -> Result<Piece, String> {
    match name.trim() {
        "input" => Ok(Piece::Input),
        "results" => Ok(Piece::Results),
        other => match other.strip_prefix("result.").map(str::parse) {
            Some(Ok(number)) if number > 0 => Ok(Piece::Result(number)),
            _ => Err(format!(
                "unknown placeholder \"{{{{{other}}}}}\"; there are {{{{input}}}}, {{{{results}}}} and {{{{result.1}}}}, \
                 {{{{result.2}}}}, …"
            )),
        },
    }
}

fn push(filled: &mut String, text: &str) -> Result<(), Unfilled> {
    if filled.len() + text.len() > MAX_REPLY {
        return Err(Unfilled::TooLarge);
    }
    filled.push_str(text);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{Quotes, Template, Unfilled};
    use crate::domain::message::ToolResult;

    fn fill(text: &str, results: &[&str]) -> Result<String, Unfilled> {
        let results: Vec<_> = results
            .iter()
            .map(|content| ToolResult::text("", *content, false))
            .collect();
        Template::parse(text).expect("a template").fill(Quotes {
            input: "{{results}}",
            results: &results,
        })
    }

    #[test]
    fn holes_are_filled_and_what_fills_them_is_never_read_again() {
        assert_eq!(fill("plain }} text", &[]).as_deref(), Ok("plain }} text"));
        assert_eq!(
            fill("<{{ input }}|{{result.2}}|{{results}}>", &["a", "b"]).as_deref(),
            Ok("<{{results}}|b|a\n\nb>")
        );
        assert_eq!(fill("{{{{input}}", &[]).as_deref(), Ok("{{input}}"));
        assert_eq!(
            fill("{{result.3}}", &["a"]),
            Err(Unfilled::NoResult { asked: 3, there: 1 })
        );
    }

    #[test]
    fn unknown_holes_are_refused() {
        for bad in ["{{inptu}}", "{{result.0}}", "{{result.x}}", "{{input"] {
            assert!(Template::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn growth_is_bounded() {
        let half = "x".repeat(crate::config::MAX_REPLY / 2 + 1);
        assert_eq!(
            fill("{{results}}{{results}}", &[&half]),
            Err(Unfilled::TooLarge)
        );
    }
}
