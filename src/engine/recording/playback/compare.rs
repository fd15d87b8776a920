//! Compares a request of today with a recorded one. Pure.

use std::borrow::Cow;

use serde_json::Value;

use crate::domain::ignore::Ignore;
use crate::domain::message::{Message, ToolResult};
use crate::domain::recording::{RunRecording, ToolRecording};
use crate::domain::redaction::Redactor;
use crate::engine::recording::neutral::{plain_text, result_text};
use crate::engine::recording::playback::observed::ObservedRun;

/// What a missing part is shown as.
const NONE: &str = "(none)";

/// A part of a request that is not as recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    pub field: String,
    pub recorded: String,
    pub now: String,
    /// Whether `--accept` can take it over.
    pub is_acceptable: bool,
}

impl Difference {
    pub fn new(field: &str, recorded: impl Into<String>, now: impl Into<String>) -> Self {
        Self {
            field: field.to_owned(),
            recorded: recorded.into(),
            now: now.into(),
            is_acceptable: true,
        }
    }

    /// A difference that needs a new recording.
    pub fn unacceptable(field: &str, recorded: impl Into<String>, now: impl Into<String>) -> Self {
        Self {
            is_acceptable: false,
            ..Self::new(field, recorded, now)
        }
    }
}

/// What makes no difference.
#[derive(Clone, Copy)]
pub struct Tolerance<'a> {
    pub ignore: &'a Ignore,
    /// Recordings lack what it matches.
    pub redactor: &'a Redactor,
}

impl Tolerance<'_> {
    fn difference(&self, field: &str, recorded: String, now: String) -> Option<Difference> {
        let (recorded, now) = (self.redact(recorded), self.redact(now));
        let is_same = self.ignore.is_same(&recorded, &now);
        (!is_same).then(|| Difference::new(field, recorded, now))
    }

    fn redact(&self, text: String) -> String {
        let redacted = match self.redactor.redact(&text) {
            Cow::Owned(redacted) => Some(redacted),
            Cow::Borrowed(_) => None,
        };
        redacted.unwrap_or(text)
    }

    fn schema(&self, json: &str) -> Option<Value> {
        let redacted = self.redactor.redact_json(json);
        serde_json::from_str(redacted.as_deref().unwrap_or(json)).ok()
    }
}

/// The first difference in what all requests of a run have in common.
pub fn compare_preamble(
    tolerance: Tolerance<'_>,
    recorded: &RunRecording,
    tools: &[&ToolRecording],
    now: &ObservedRun,
) -> Option<Difference> {
    let json = |value: Option<&Value>| value.map_or(NONE.to_owned(), pretty);
    let text = |value: Option<&String>| value.map_or(NONE, String::as_str).to_owned();
    let (params, params_now) = (
        Value::Object(recorded.params.clone()),
        Value::Object(now.params.clone()),
    );
    let fields = [
        ("model", recorded.model.clone(), now.model.clone()),
        (
            "effort",
            text(recorded.effort.as_ref()),
            text(now.effort.as_ref()),
        ),
        ("params", pretty(&params), pretty(&params_now)),
        (
            "response_format",
            json(recorded.response_format.as_ref()),
            json(now.response_format.as_ref()),
        ),
        ("system", recorded.system.clone(), now.system.clone()),
        (
            "memory",
            text(recorded.memory.as_ref()),
            text(now.memory.as_ref()),
        ),
    ];
    let mut fields = fields.into_iter();
    let different =
        fields.find_map(|(field, recorded, now)| tolerance.difference(field, recorded, now));
    different.or_else(|| compare_tools(tolerance, tools, &now.tools))
}

fn compare_tools(
    tolerance: Tolerance<'_>,
    recorded: &[&ToolRecording],
    now: &[ToolRecording],
) -> Option<Difference> {
    let names = |tools: &[&ToolRecording]| {
        let names: Vec<_> = tools.iter().map(|tool| tool.name()).collect();
        names.join("\n")
    };
    let (names, names_now) = (names(recorded), names(&now.iter().collect::<Vec<_>>()));
    if names != names_now {
        return Some(Difference::new("tools", names, names_now));
    }
    recorded.iter().zip(now).find_map(|(recorded, now)| {
        let field = |part: &str| format!("tools.{}.{part}", now.name());
        let (text, text_now) = (recorded.description.clone(), now.description.clone());
        let different = tolerance.difference(&field("description"), text, text_now);
        if different.is_some() {
            return different;
        }
        let schema = tolerance.schema(&recorded.parameters);
        let schema_now = tolerance.schema(&now.parameters);
        if schema == schema_now {
            return None;
        }
        let shown = |schema: Option<Value>| schema.as_ref().map_or(String::new(), pretty);
        Some(Difference::new(
            &field("parameters"),
            shown(schema),
            shown(schema_now),
        ))
    })
}

fn pretty(value: &Value) -> String {
    serde_json::to_string_pretty(value).unwrap_or_default()
}

/// The first difference in the messages. Replies are not compared: both come from the recording.
pub fn compare_messages(
    tolerance: Tolerance<'_>,
    recorded: &[Message],
    now: &[Message],
) -> Option<Difference> {
    let count = recorded.len().max(now.len());
    (0..count).find_map(|index| {
        let field = format!("messages[{index}]");
        match (recorded.get(index), now.get(index)) {
            (Some(Message::Assistant(_)), Some(Message::Assistant(_))) => None,
            (
                Some(Message::Tool {
                    tool_results: recorded,
                }),
                Some(Message::Tool { tool_results: now }),
            ) => compare_results(tolerance, &field, recorded, now),
            (recorded, now) => tolerance.difference(&field, describe(recorded), describe(now)),
        }
    })
}

fn compare_results(
    tolerance: Tolerance<'_>,
    field: &str,
    recorded: &[ToolResult],
    now: &[ToolResult],
) -> Option<Difference> {
    (0..recorded.len().max(now.len())).find_map(|index| {
        let text = |results: &[ToolResult]| {
            let result = results.get(index);
            result.map_or(NONE.to_owned(), |result| {
                let error = if result.is_error { "error: " } else { "" };
                format!("{error}{}", result_text(result))
            })
        };
        let field = format!("{field}.results[{index}]");
        tolerance.difference(&field, text(recorded), text(now))
    })
}

fn describe(message: Option<&Message>) -> String {
    match message {
        None => NONE.to_owned(),
        Some(Message::User { content }) => plain_text(content),
        Some(Message::Assistant(reply)) => format!("(a reply) {}", reply.content),
        Some(Message::Tool { tool_results }) => {
            format!("(the results of {} calls)", tool_results.len())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Tolerance, compare_messages};
    use crate::domain::ignore::Ignore;
    use crate::domain::message::{Message, ToolResult};
    use crate::domain::redaction::Redactor;

    #[test]
    fn the_first_different_message_is_named() {
        let results = |text: &str| Message::Tool {
            tool_results: vec![
                ToolResult::text("a", "same", false),
                ToolResult::text("b", text, false),
            ],
        };
        let (ignore, mut redactor) = (Ignore::default(), Redactor::default());
        redactor.add("pin-[0-9]").expect("a pattern");
        let tolerance = Tolerance {
            ignore: &ignore,
            redactor: &redactor,
        };
        let compare =
            |recorded: &[Message], now: &[Message]| compare_messages(tolerance, recorded, now);
        let recorded = [Message::user("go"), results("old")];
        let found = compare(&recorded, &[Message::user("go"), results("new")]).expect("one");
        assert_eq!(found.field, "messages[1].results[1]");
        assert_eq!((&*found.recorded, &*found.now), ("old", "new"));
        let shorter = compare(&recorded, &recorded[..1]).expect("one");
        assert_eq!((&*shorter.field, &*shorter.now), ("messages[1]", "(none)"));
        assert_eq!(compare(&recorded, &recorded), None);
        let redacted = [Message::user("go"), results("[redacted]")];
        let with_secret = [Message::user("go"), results("pin-1")];
        assert_eq!(compare(&redacted, &with_secret), None);
    }
}
