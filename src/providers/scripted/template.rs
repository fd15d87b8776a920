//! Templates with placeholders that quote the conversation: `{{input}}`, `{{results}}`, `{{result.2}}`.

use crate::config::DEFAULT_MAX_REPLY;
use crate::domain::message::ToolResult;

/// A parsed text. All its placeholders are known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template(Vec<Segment>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Segment {
    Text(String),
    Input,
    Results,
    /// Counted from 1.
    Result(usize),
}

/// The values of the placeholders.
#[derive(Clone, Copy, Debug)]
pub struct TemplateContext<'a> {
    /// The last user message.
    pub input: &'a str,
    /// The tool results of the previous turn, in the order of the calls.
    pub results: &'a [ToolResult],
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TemplateSyntaxError {
    #[error("\"{{{{\" is never closed; write \"{{{{{{{{\" for two literal braces")]
    Unclosed,
    #[error(
        "unknown placeholder \"{{{{{name}}}}}\"; the placeholders are {{{{input}}}}, {{{{results}}}} and {{{{result.1}}}}, \
         {{{{result.2}}}}, …"
    )]
    UnknownPlaceholder { name: String },
}

/// Why a template cannot be rendered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    #[error(
        "the script quotes {{{{result.{number}}}}}, but the last turn has {available} tool results"
    )]
    NoResult { number: usize, available: usize },
    /// The text would exceed [`DEFAULT_MAX_REPLY`].
    #[error("response too large")]
    TooLarge,
}

impl Template {
    /// Parses a text. `{{{{` means a literal `{{`.
    pub fn parse(text: &str) -> Result<Self, TemplateSyntaxError> {
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
                return Err(TemplateSyntaxError::Unclosed);
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

fn parse_placeholder(name: &str) -> Result<Segment, TemplateSyntaxError> {
    match name.trim() {
        "input" => Ok(Segment::Input),
        "results" => Ok(Segment::Results),
        other => match other.strip_prefix("result.").map(str::parse) {
            Some(Ok(number)) if number > 0 => Ok(Segment::Result(number)),
            _ => Err(TemplateSyntaxError::UnknownPlaceholder {
                name: other.to_owned(),
            }),
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

    fn render(text: &str, results: &[&str]) -> Result<String, TemplateError> {
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
    fn placeholders_are_replaced_once() {
        assert_eq!(render("plain }} text", &[]).as_deref(), Ok("plain }} text"));
        assert_eq!(
            render("<{{ input }}|{{result.2}}|{{results}}>", &["a", "b"]).as_deref(),
            Ok("<{{results}}|b|a\n\nb>")
        );
        assert_eq!(render("{{{{input}}", &[]).as_deref(), Ok("{{input}}"));
        assert_eq!(
            render("{{result.3}}", &["a"]),
            Err(TemplateError::NoResult {
                number: 3,
                available: 1
            })
        );
    }

    #[test]
    fn unknown_placeholders_are_rejected() {
        for bad in ["{{inptu}}", "{{result.0}}", "{{result.x}}", "{{input"] {
            assert!(Template::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_size_is_limited() {
        let half = "x".repeat(crate::config::DEFAULT_MAX_REPLY / 2 + 1);
        assert_eq!(
            render("{{results}}{{results}}", &[&half]),
            Err(TemplateError::TooLarge)
        );
    }
}
