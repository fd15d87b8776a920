//! Reads and validates a script file: the replies of one scripted model.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use serde_json::value::RawValue;
use toml::Spanned;

use crate::providers::ErrorCategory;
use crate::providers::scripted::template::{
    Template, TemplateContext, TemplateError, TemplateSyntaxError,
};
use crate::settings::suggestion;

/// Why a script cannot be loaded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScriptError {
    #[error("scripts: {} is neither a file nor a directory", path.display())]
    NotFound { path: PathBuf },
    #[error("scripts: {}: {cause}", path.display())]
    UnreadableDirectory { path: PathBuf, cause: String },
    #[error("{}: {cause}", path.display())]
    Unreadable { path: PathBuf, cause: String },
    #[error("{}: the file name is not valid UTF-8", path.display())]
    FileName { path: PathBuf },
    #[error(
        "{} and {} are both scripts of {model}; rename or remove one",
        first.display(),
        second.display()
    )]
    Duplicate {
        first: PathBuf,
        second: PathBuf,
        /// `provider/model`.
        model: String,
    },
    #[error("{}:{line}: {message}", path.display())]
    Toml {
        path: PathBuf,
        line: usize,
        message: String,
    },
    #[error("{}:{line}: replies[{index}]: {error}", path.display())]
    Reply {
        path: PathBuf,
        line: usize,
        index: usize,
        error: ReplyError,
    },
    #[error("{}: a script needs at least one [[replies]]", path.display())]
    Empty { path: PathBuf },
}

/// Why a reply of a script is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplyError {
    #[error("a reply needs `text`, `tool_calls` or `errors` (text = \"\" for an empty one)")]
    Empty,
    #[error("match must not be empty; omit it to match every input")]
    EmptyMatch,
    #[error("text: {0}")]
    Text(TemplateSyntaxError),
    #[error("tool_calls[{index}].arguments: {error}")]
    Arguments {
        index: usize,
        error: TemplateSyntaxError,
    },
    #[error(
        "errors[{index}].category: unknown category \"{category}\"{}; the categories are {}",
        did_you_mean(category, &CATEGORIES.map(ErrorCategory::as_str)),
        CATEGORIES.map(ErrorCategory::as_str).join(", ")
    )]
    UnknownCategory { index: usize, category: String },
    #[error("errors[{index}].times: must be at least 1")]
    NoTimes { index: usize },
}

/// The replies of one model, in series: one series for each `match`, and one for all other inputs.
#[derive(Clone, Debug)]
pub struct Script {
    series: Vec<Series>,
}

#[derive(Clone, Debug)]
struct Series {
    /// The text that an input must contain, in lower case; `None` for inputs that no other series matches.
    matching: Option<String>,
    /// Never empty.
    replies: Vec<Reply>,
}

#[derive(Clone, Debug)]
pub struct Reply {
    /// `None` for a reply without text.
    pub text: Option<Template>,
    pub calls: Vec<ScriptedCall>,
    /// Raised one after another before this reply.
    pub errors: Vec<ScriptedError>,
    /// `None` means an estimate.
    pub input_tokens: Option<u64>,
    /// `None` means an estimate.
    pub output_tokens: Option<u64>,
    /// `None` means `tool_use` if the reply has tool calls, else `end_turn`.
    pub stop_reason: Option<String>,
    /// The delay per token of the reply.
    pub delay: Duration,
}

#[derive(Clone, Debug)]
pub struct ScriptedCall {
    pub name: String,
    arguments: ValueTemplate,
}

#[derive(Clone, Debug)]
pub struct ScriptedError {
    pub category: ErrorCategory,
    pub message: String,
    /// At least 1.
    pub times: u32,
    pub retry_after: Option<Duration>,
}

/// A JSON value whose strings are templates.
#[derive(Clone, Debug)]
enum ValueTemplate {
    Text(Template),
    List(Vec<ValueTemplate>),
    Map(Vec<(String, ValueTemplate)>),
    Plain(serde_json::Value),
}

impl Script {
    pub fn read(path: &Path, text: &str) -> Result<Self, ScriptError> {
        let line_at = |offset: usize| text[..offset.min(text.len())].matches('\n').count() + 1;
        let file: File = toml::from_str(text).map_err(|error| ScriptError::Toml {
            path: path.to_owned(),
            line: line_at(error.span().map_or(0, |span| span.start)),
            message: rewrite_serde_error(error.message()),
        })?;
        let default_delay = file.delay_ms;
        let mut script = Self { series: Vec::new() };
        for (index, spanned) in file.replies.into_iter().enumerate() {
            let line = line_at(spanned.span().start);
            let raw = spanned.into_inner();
            let matching = raw.matching.as_deref().map(str::to_lowercase);
            let reply =
                Reply::from_raw(raw, default_delay).map_err(|error| ScriptError::Reply {
                    path: path.to_owned(),
                    line,
                    index,
                    error,
                })?;
            script.add(matching, reply);
        }
        if script.series.is_empty() {
            return Err(ScriptError::Empty {
                path: path.to_owned(),
            });
        }
        Ok(script)
    }

    /// Selects the reply for a turn, counted from 1: (index of the series, index in the series, reply). The last reply of a
    /// series serves all further turns. `None` if no series matches the input.
    pub fn select_reply(&self, input: &str, turn: usize) -> Option<(usize, usize, &Reply)> {
        let input = input.to_lowercase();
        let is_match = |series: &Series| {
            series
                .matching
                .as_ref()
                .is_some_and(|text| input.contains(text))
        };
        let series_index = self
            .series
            .iter()
            .position(is_match)
            .or_else(|| self.series.iter().position(|s| s.matching.is_none()))?;
        let replies = &self.series[series_index].replies;
        let position = turn.clamp(1, replies.len()) - 1;
        Some((series_index, position, &replies[position]))
    }

    fn add(&mut self, matching: Option<String>, reply: Reply) {
        match self.series.iter_mut().find(|s| s.matching == matching) {
            Some(series) => series.replies.push(reply),
            None => self.series.push(Series {
                matching,
                replies: vec![reply],
            }),
        }
    }
}

impl Reply {
    fn from_raw(raw: RawReply, default_delay: u64) -> Result<Self, ReplyError> {
        if raw.text.is_none() && raw.tool_calls.is_empty() && raw.errors.is_empty() {
            return Err(ReplyError::Empty);
        }
        if raw.matching.as_deref() == Some("") {
            return Err(ReplyError::EmptyMatch);
        }
        let text = raw
            .text
            .map(|text| Template::parse(&text).map_err(ReplyError::Text))
            .transpose()?;
        let calls = raw
            .tool_calls
            .into_iter()
            .enumerate()
            .map(|(index, call)| {
                let arguments = ValueTemplate::parse(toml::Value::Table(call.arguments))
                    .map_err(|error| ReplyError::Arguments { index, error })?;
                Ok(ScriptedCall {
                    name: call.name,
                    arguments,
                })
            })
            .collect::<Result<_, ReplyError>>()?;
        let errors = raw
            .errors
            .into_iter()
            .enumerate()
            .map(|(index, error)| ScriptedError::from_raw(index, error))
            .collect::<Result<_, ReplyError>>()?;
        Ok(Self {
            text,
            calls,
            errors,
            input_tokens: raw.input_tokens,
            output_tokens: raw.output_tokens,
            stop_reason: raw.stop_reason,
            delay: Duration::from_millis(raw.delay_ms.unwrap_or(default_delay)),
        })
    }

    /// Whether the reply has content after its errors.
    pub fn has_content(&self) -> bool {
        self.text.is_some() || !self.calls.is_empty()
    }
}

impl ScriptedCall {
    pub fn render_arguments(
        &self,
        context: TemplateContext<'_>,
    ) -> Result<Box<RawValue>, TemplateError> {
        let value = self.arguments.render(context)?;
        // A `Value` always serializes, so the default is never used.
        Ok(serde_json::value::to_raw_value(&value).unwrap_or_default())
    }
}

impl ScriptedError {
    fn from_raw(index: usize, raw: RawError) -> Result<Self, ReplyError> {
        let Some(category) = CATEGORIES
            .into_iter()
            .find(|category| category.as_str() == raw.category)
        else {
            let category = raw.category;
            return Err(ReplyError::UnknownCategory { index, category });
        };
        if raw.times == 0 {
            return Err(ReplyError::NoTimes { index });
        }
        Ok(Self {
            category,
            message: raw
                .message
                .unwrap_or_else(|| format!("scripted {}", category.as_str())),
            times: raw.times,
            retry_after: raw.retry_after_ms.map(Duration::from_millis),
        })
    }
}

impl ValueTemplate {
    fn parse(value: toml::Value) -> Result<Self, TemplateSyntaxError> {
        Ok(match value {
            toml::Value::String(text) => Self::Text(Template::parse(&text)?),
            toml::Value::Integer(number) => Self::Plain(number.into()),
            toml::Value::Float(number) => Self::Plain(number.into()),
            toml::Value::Boolean(value) => Self::Plain(value.into()),
            toml::Value::Datetime(time) => Self::Plain(time.to_string().into()),
            toml::Value::Array(values) => Self::List(
                values
                    .into_iter()
                    .map(Self::parse)
                    .collect::<Result<_, _>>()?,
            ),
            toml::Value::Table(table) => Self::Map(
                table
                    .into_iter()
                    .map(|(key, value)| Ok((key, Self::parse(value)?)))
                    .collect::<Result<_, TemplateSyntaxError>>()?,
            ),
        })
    }

    fn render(&self, context: TemplateContext<'_>) -> Result<serde_json::Value, TemplateError> {
        Ok(match self {
            Self::Text(template) => template.render(context)?.into(),
            Self::List(templates) => templates
                .iter()
                .map(|template| template.render(context))
                .collect::<Result<Vec<_>, _>>()?
                .into(),
            Self::Map(entries) => entries
                .iter()
                .map(|(key, template)| Ok((key.clone(), template.render(context)?)))
                .collect::<Result<serde_json::Map<_, _>, _>>()?
                .into(),
            Self::Plain(value) => value.clone(),
        })
    }
}

const CATEGORIES: [ErrorCategory; 6] = [
    ErrorCategory::Auth,
    ErrorCategory::BadRequest,
    ErrorCategory::RateLimit,
    ErrorCategory::Overloaded,
    ErrorCategory::Server,
    ErrorCategory::Timeout,
];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    delay_ms: u64,
    #[serde(default)]
    replies: Vec<Spanned<RawReply>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawReply {
    #[serde(rename = "match")]
    matching: Option<String>,
    text: Option<String>,
    #[serde(default)]
    tool_calls: Vec<RawCall>,
    #[serde(default)]
    errors: Vec<RawError>,
    input_tokens: Option<u64>,
    output_tokens: Option<u64>,
    stop_reason: Option<String>,
    delay_ms: Option<u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawCall {
    name: String,
    #[serde(default)]
    arguments: toml::Table,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawError {
    category: String,
    message: Option<String>,
    #[serde(default = "once")]
    times: u32,
    retry_after_ms: Option<u64>,
}

fn once() -> u32 {
    1
}

/// Rewrites serde's ``unknown field `a`, expected one of `b`, `c` `` like other configuration errors; keeps other messages.
fn rewrite_serde_error(message: &str) -> String {
    let message = message.trim();
    if !message.starts_with("unknown field `") {
        return message.to_owned();
    }
    let mut quoted = message.split('`').skip(1).step_by(2);
    let key = quoted.next().unwrap_or_default();
    let known: Vec<&str> = quoted.collect();
    format!(
        "unknown key \"{key}\"{}; the keys here are {}",
        did_you_mean(key, &known),
        known.join(", ")
    )
}

fn did_you_mean(key: &str, known: &[&str]) -> String {
    let hint = suggestion::did_you_mean(key, known.iter().copied());
    hint.map_or_else(String::new, |hint| format!(", {hint}"))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::Script;

    fn error_text(text: &str) -> String {
        let error = Script::read(Path::new("scripts/x.toml"), text).expect_err("an error");
        error.to_string()
    }

    #[test]
    fn an_error_has_a_line_and_suggests_the_nearest_key() {
        assert_eq!(
            error_text("delay_ms = 1\n[[replies]]\ntextt = \"hi\"\n"),
            "scripts/x.toml:3: unknown key \"textt\", did you mean \"text\"?; the keys here are match, text, tool_calls, \
             errors, input_tokens, output_tokens, stop_reason, delay_ms"
        );
        assert!(error_text("replies = 1").starts_with("scripts/x.toml:1: "));
        assert!(error_text("[[replies]]\ntext = \"").starts_with("scripts/x.toml:2: "));
        assert!(error_text("").contains("at least one [[replies]]"));
    }

    #[test]
    fn invalid_replies_are_rejected() {
        let empty = error_text("[[replies]]\ntext = \"\"\n\n[[replies]]\ndelay_ms = 1\n");
        assert!(
            empty.starts_with("scripts/x.toml:4: replies[1]: a reply needs"),
            "{empty}"
        );
        let placeholder = error_text(
            "[[replies]]\ntool_calls = [{ name = \"t\", arguments = { a = [\"{{x}}\"] } }]",
        );
        assert!(
            placeholder.contains("tool_calls[0].arguments: unknown placeholder \"{{x}}\""),
            "{placeholder}"
        );
        let category = error_text("[[replies]]\nerrors = [{ category = \"rate_limits\" }]");
        assert!(
            category.contains(
                "errors[0].category: unknown category \"rate_limits\", did you mean \"rate_limit\"?"
            ),
            "{category}"
        );
        assert!(
            error_text("[[replies]]\nerrors = [{ category = \"auth\", times = 0 }]")
                .contains("times")
        );
    }

    #[test]
    fn the_input_selects_the_series_and_the_turn_the_reply() {
        let script = Script::read(
            Path::new("x.toml"),
            "replies = [{ text = \"a\" }, { match = \"Crash\", text = \"b\" }, { text = \"c\" }, { match = \"it\", text = \"d\" }]",
        )
        .expect("a script");
        let select = |input: &str, turn| script.select_reply(input, turn).map(|(s, r, _)| (s, r));
        assert_eq!(select("hello", 1), Some((0, 0)));
        assert_eq!(select("hello", 2), Some((0, 1)));
        assert_eq!(select("hello", 9), Some((0, 1)));
        assert_eq!(select("it CRASHES", 1), Some((1, 0)));
        assert_eq!(select("it works", 1), Some((2, 0)));
    }
}
