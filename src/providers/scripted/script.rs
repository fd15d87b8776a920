//! A script file: the replies of one scripted model. Reads and checks it; knows no conversation and keeps no state.

use std::path::Path;
use std::time::Duration;

use serde::Deserialize;
use serde_json::value::RawValue;
use toml::Spanned;

use crate::providers::Category;
use crate::providers::scripted::template::{Quotes, Template, Unfilled};

/// The replies of one model, in series: one for inputs that hold a certain text, one for all others.
#[derive(Clone, Debug)]
pub struct Script {
    series: Vec<Series>,
}

#[derive(Clone, Debug)]
struct Series {
    /// In lower case; none for all inputs that no other series is for.
    matching: Option<String>,
    /// Never empty.
    replies: Vec<Reply>,
}

/// One reply as the file has it.
#[derive(Clone, Debug)]
pub struct Reply {
    /// What the model says; none for a reply that only fails.
    pub text: Option<Template>,
    /// What it asks for.
    pub calls: Vec<Call>,
    /// Raised one after another before this reply answers.
    pub errors: Vec<Raise>,
    /// Tokens of the prompt; none means an estimate.
    pub input_tokens: Option<u64>,
    /// Tokens of the reply; none means an estimate.
    pub output_tokens: Option<u64>,
    /// The word for why the reply ended; none means `tool_use` with calls, `end_turn` without.
    pub stop_reason: Option<String>,
    /// How long each token of the reply takes.
    pub delay: Duration,
}

/// One tool call.
#[derive(Clone, Debug)]
pub struct Call {
    /// The tool.
    pub name: String,
    arguments: Shape,
}

/// An error to raise so many times.
#[derive(Clone, Debug)]
pub struct Raise {
    /// Its kind.
    pub category: Category,
    /// Its words.
    pub message: String,
    /// How often, at least once.
    pub times: u32,
    /// How long it asks to wait.
    pub retry_after: Option<Duration>,
}

/// A JSON value whose strings have holes.
#[derive(Clone, Debug)]
enum Shape {
    Text(Template),
    List(Vec<Shape>),
    Map(Vec<(String, Shape)>),
    Plain(serde_json::Value),
}

impl Script {
    /// Reads a script. The error names the file, the line, the key and the nearest known key.
    pub fn read(path: &Path, text: &str) -> Result<Self, String> {
        let line_of = |offset: usize| text[..offset.min(text.len())].matches('\n').count() + 1;
        let file: File = toml::from_str(text).map_err(|error| {
            let line = line_of(error.span().map_or(0, |span| span.start));
            format!("{}:{line}: {}", path.display(), explain(error.message()))
        })?;
        let default_delay = file.delay_ms;
        let mut script = Self { series: Vec::new() };
        for (position, spanned) in file.replies.into_iter().enumerate() {
            let line = line_of(spanned.span().start);
            let raw = spanned.into_inner();
            let matching = raw.matching.as_deref().map(str::to_lowercase);
            let reply = Reply::check(raw, default_delay)
                .map_err(|why| format!("{}:{line}: replies[{position}]: {why}", path.display()))?;
            script.add(matching, reply);
        }
        if script.series.is_empty() {
            return Err(format!(
                "{}: a script needs at least one [[replies]]",
                path.display()
            ));
        }
        Ok(script)
    }

    /// The reply for this turn of a run (from 1) with this input, and its place in the file's terms: the last reply of
    /// a series answers all further turns. None where no series is for the input.
    pub fn choose(&self, input: &str, turn: usize) -> Option<(usize, usize, &Reply)> {
        let input = input.to_lowercase();
        let fits = |series: &Series| {
            series
                .matching
                .as_ref()
                .is_some_and(|text| input.contains(text))
        };
        let chosen = self
            .series
            .iter()
            .position(fits)
            .or_else(|| self.series.iter().position(|s| s.matching.is_none()))?;
        let replies = &self.series[chosen].replies;
        let position = turn.clamp(1, replies.len()) - 1;
        Some((chosen, position, &replies[position]))
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
    fn check(raw: RawReply, default_delay: u64) -> Result<Self, String> {
        if raw.text.is_none() && raw.tool_calls.is_empty() && raw.errors.is_empty() {
            return Err(
                "a reply needs `text`, `tool_calls` or `errors` (text = \"\" for an empty one)"
                    .to_owned(),
            );
        }
        if raw.matching.as_deref() == Some("") {
            return Err("match must not be empty; leave it out to fit every input".to_owned());
        }
        let text = raw
            .text
            .map(|text| Template::parse(&text).map_err(|why| format!("text: {why}")))
            .transpose()?;
        let calls = raw
            .tool_calls
            .into_iter()
            .enumerate()
            .map(|(position, call)| {
                let arguments = Shape::read(toml::Value::Table(call.arguments))
                    .map_err(|why| format!("tool_calls[{position}].arguments: {why}"))?;
                Ok(Call {
                    name: call.name,
                    arguments,
                })
            })
            .collect::<Result<_, String>>()?;
        let errors = raw
            .errors
            .into_iter()
            .enumerate()
            .map(|(position, raise)| {
                Raise::check(raise).map_err(|why| format!("errors[{position}].{why}"))
            })
            .collect::<Result<_, String>>()?;
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

    /// Whether it has an answer once its errors are raised.
    pub fn answers(&self) -> bool {
        self.text.is_some() || !self.calls.is_empty()
    }
}

impl Call {
    /// The arguments as a JSON object.
    pub fn arguments(&self, quotes: Quotes<'_>) -> Result<Box<RawValue>, Unfilled> {
        let value = self.arguments.fill(quotes)?;
        // A `Value` always is valid JSON, so the second arm is never taken.
        Ok(serde_json::value::to_raw_value(&value).unwrap_or_default())
    }
}

impl Raise {
    fn check(raw: RawRaise) -> Result<Self, String> {
        let Some(category) = CATEGORIES
            .into_iter()
            .find(|category| category.as_str() == raw.category)
        else {
            let names = CATEGORIES.map(Category::as_str);
            return Err(format!(
                "category: unknown category \"{}\"{}; there are {}",
                raw.category,
                nearest(&raw.category, &names),
                names.join(", ")
            ));
        };
        if raw.times == 0 {
            return Err("times: must be at least 1".to_owned());
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

impl Shape {
    fn read(value: toml::Value) -> Result<Self, String> {
        Ok(match value {
            toml::Value::String(text) => Self::Text(Template::parse(&text)?),
            toml::Value::Integer(number) => Self::Plain(number.into()),
            toml::Value::Float(number) => Self::Plain(number.into()),
            toml::Value::Boolean(truth) => Self::Plain(truth.into()),
            toml::Value::Datetime(time) => Self::Plain(time.to_string().into()),
            toml::Value::Array(values) => Self::List(
                values
                    .into_iter()
                    .map(Self::read)
                    .collect::<Result<_, _>>()?,
            ),
            toml::Value::Table(table) => Self::Map(
                table
                    .into_iter()
                    .map(|(key, value)| Ok((key, Self::read(value)?)))
                    .collect::<Result<_, String>>()?,
            ),
        })
    }

    fn fill(&self, quotes: Quotes<'_>) -> Result<serde_json::Value, Unfilled> {
        Ok(match self {
            Self::Text(template) => template.fill(quotes)?.into(),
            Self::List(shapes) => shapes
                .iter()
                .map(|shape| shape.fill(quotes))
                .collect::<Result<Vec<_>, _>>()?
                .into(),
            Self::Map(entries) => entries
                .iter()
                .map(|(key, shape)| Ok((key.clone(), shape.fill(quotes)?)))
                .collect::<Result<serde_json::Map<_, _>, _>>()?
                .into(),
            Self::Plain(value) => value.clone(),
        })
    }
}

const CATEGORIES: [Category; 6] = [
    Category::Auth,
    Category::BadRequest,
    Category::RateLimit,
    Category::Overloaded,
    Category::Server,
    Category::Timeout,
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
    errors: Vec<RawRaise>,
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
struct RawRaise {
    category: String,
    message: Option<String>,
    #[serde(default = "once")]
    times: u32,
    retry_after_ms: Option<u64>,
}

fn once() -> u32 {
    1
}

/// Serde's ``unknown field `a`, expected one of `b`, `c` `` in our words; other messages as they are.
fn explain(message: &str) -> String {
    let message = message.trim();
    if !message.starts_with("unknown field `") {
        return message.to_owned();
    }
    let mut quoted = message.split('`').skip(1).step_by(2);
    let key = quoted.next().unwrap_or_default();
    let known: Vec<&str> = quoted.collect();
    format!(
        "unknown key \"{key}\"{}; the keys here are {}",
        nearest(key, &known),
        known.join(", ")
    )
}

fn nearest(word: &str, known: &[&str]) -> String {
    known
        .iter()
        .map(|candidate| (strsim::jaro_winkler(word, candidate), candidate))
        .filter(|(likeness, _)| *likeness > 0.7)
        .max_by(|(a, _), (b, _)| a.total_cmp(b))
        .map_or_else(String::new, |(_, candidate)| {
            format!(", did you mean \"{candidate}\"?")
        })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::Script;

    fn refusal(text: &str) -> String {
        Script::read(Path::new("scripts/x.toml"), text).expect_err("no script")
    }

    #[test]
    fn a_mistake_is_named_with_its_line_and_the_nearest_key() {
        assert_eq!(
            refusal("delay_ms = 1\n[[replies]]\ntextt = \"hi\"\n"),
            "scripts/x.toml:3: unknown key \"textt\", did you mean \"text\"?; the keys here are match, text, tool_calls, \
             errors, input_tokens, output_tokens, stop_reason, delay_ms"
        );
        assert!(refusal("replies = 1").starts_with("scripts/x.toml:1: "));
        assert!(refusal("[[replies]]\ntext = \"").starts_with("scripts/x.toml:2: "));
        assert!(refusal("").contains("at least one [[replies]]"));
    }

    #[test]
    fn a_reply_that_cannot_be_given_is_refused() {
        let empty = refusal("[[replies]]\ntext = \"\"\n\n[[replies]]\ndelay_ms = 1\n");
        assert!(
            empty.starts_with("scripts/x.toml:4: replies[1]: a reply needs"),
            "{empty}"
        );
        let hole = refusal(
            "[[replies]]\ntool_calls = [{ name = \"t\", arguments = { a = [\"{{x}}\"] } }]",
        );
        assert!(
            hole.contains("tool_calls[0].arguments: unknown placeholder \"{{x}}\""),
            "{hole}"
        );
        let category = refusal("[[replies]]\nerrors = [{ category = \"rate_limits\" }]");
        assert!(
            category.contains(
                "errors[0].category: unknown category \"rate_limits\", did you mean \"rate_limit\"?"
            ),
            "{category}"
        );
        assert!(
            refusal("[[replies]]\nerrors = [{ category = \"auth\", times = 0 }]").contains("times")
        );
    }

    #[test]
    fn the_input_picks_the_series_and_the_turn_the_reply() {
        let script = Script::read(
            Path::new("x.toml"),
            "replies = [{ text = \"a\" }, { match = \"Crash\", text = \"b\" }, { text = \"c\" }, { match = \"it\", text = \"d\" }]",
        )
        .expect("a script");
        let place = |input: &str, turn| script.choose(input, turn).map(|(s, r, _)| (s, r));
        assert_eq!(place("hello", 1), Some((0, 0)));
        assert_eq!(place("hello", 2), Some((0, 1)));
        assert_eq!(place("hello", 9), Some((0, 1)));
        assert_eq!(place("it CRASHES", 1), Some((1, 0)));
        assert_eq!(place("it works", 1), Some((2, 0)));
    }
}
