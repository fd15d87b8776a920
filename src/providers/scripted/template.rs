//! Texts with holes that quote the conversation: `{{input}}`, `{{results}}`, `{{result.2}}`. Knows no script file.

use crate::config::DEFAULT_MAX_REPLY;
use crate::domain::message::ToolResult;

/// A text whose holes are known to be fillable by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template(Vec<Segment>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Segment {
    Text(String),
    Input,
    Results,
    /// Counts from 1.
    Result(usize),
}

/// What holes are filled with.
#[derive(Clone, Copy, Debug)]
pub struct TemplateContext<'a> {
    /// The run's user message.
    pub input: &'a str,
    /// The results of the last batch of tool calls, in the order of the calls.
    pub results: &'a [ToolResult],
}

/// Why a text cannot be filled in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// It quotes a result that the conversation does not have.
    #[error(
        "the script quotes {{{{result.{number}}}}}, but the last turn has {available} tool results"
    )]
    NoResult {
        /// The result asked for.
        number: usize,
        /// How many there are.
        available: usize,
    },
    /// It would be longer than any reply may be.
    #[error("response too large")]
    TooLarge,
}

impl Template {
    /// Reads a text. `{{{{` stands for a literal `{{`. The error names the hole and those that there are.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut segments = Vec::new();
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
            let segment = parse_placeholder(&rest[..end])?;
            rest = &rest[end + 2..];
            if !plain.is_empty() {
                segments.push(Segment::Text(std::mem::take(&mut plain)));
            }
            segments.push(segment);
        }
        plain.push_str(rest);
        if !plain.is_empty() {
            segments.push(Segment::Text(plain));
        }
        Ok(Self(segments))
    }

    /// The text with its holes filled, at most [`MAX_REPLY`] bytes of it.
    pub fn render(&self, context: TemplateContext<'_>) -> Result<String, TemplateError> {
        let mut rendered = String::new();
        for segment in &self.0 {
            match segment {
                Segment::Text(text) => push_bounded(&mut rendered, text)?,
                Segment::Input => push_bounded(&mut rendered, context.input)?,
                Segment::Results => {
                    for (position, result) in context.results.iter().enumerate() {
                        push_bounded(&mut rendered, if position == 0 { "" } else { "\n\n" })?;
                        push_bounded(&mut rendered, &result.content)?;
                    }
                }
                Segment::Result(number) => {
                    let result =
                        context
                            .results
                            .get(number - 1)
                            .ok_or(TemplateError::NoResult {
                                number: *number,
                                available: context.results.len(),
                            })?;
                    push_bounded(&mut rendered, &result.content)?;
                }
            }
        }
        Ok(rendered)
    }
}

fn parse_placeholder(name: &str) -> Result<Segment, String> {
    match name.trim() {
        "input" => Ok(Segment::Input),
        "results" => Ok(Segment::Results),
        other => match other.strip_prefix("result.").map(str::parse) {
            Some(Ok(number)) if number > 0 => Ok(Segment::Result(number)),
            _ => Err(format!(
                "unknown placeholder \"{{{{{other}}}}}\"; there are {{{{input}}}}, {{{{results}}}} and {{{{result.1}}}}, \
                 {{{{result.2}}}}, …"
            )),
        },
    }
}

fn push_bounded(rendered: &mut String, text: &str) -> Result<(), TemplateError> {
    if rendered.len() + text.len() > DEFAULT_MAX_REPLY {
        return Err(TemplateError::TooLarge);
    }
    rendered.push_str(text);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{Template, TemplateContext, TemplateError};
    use crate::domain::message::ToolResult;

    fn fill(text: &str, results: &[&str]) -> Result<String, TemplateError> {
        let results: Vec<_> = results
            .iter()
            .map(|content| ToolResult::text("", *content, false))
            .collect();
        Template::parse(text)
            .expect("a template")
            .render(TemplateContext {
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
            Err(TemplateError::NoResult {
                number: 3,
                available: 1
            })
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
        let half = "x".repeat(crate::config::DEFAULT_MAX_REPLY / 2 + 1);
        assert_eq!(
            fill("{{results}}{{results}}", &[&half]),
            Err(TemplateError::TooLarge)
        );
    }
}
