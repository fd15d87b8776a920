//! Removes from a recording what the patterns of `[data] redact` match, as from recorded requests.

use std::borrow::Cow;

use serde::de::IgnoredAny;
use serde_json::{Map, Value};

use crate::domain::recording::{Recording, RunRecording, ToolRecording};
use crate::domain::redaction::Redactor;
use crate::engine::recording::playback::observed::{ObservedResult, ObservedRun};

pub fn redact(recording: &mut Recording, redactor: &Redactor) {
    if redactor.is_empty() {
        return;
    }
    let texts = Texts(redactor);
    texts.text(&mut recording.input);
    recording.request.values_mut().for_each(|it| texts.json(it));
    for run in &mut recording.runs {
        texts.run(run);
    }
    let of_servers = recording.mcp.iter_mut();
    let of_servers = of_servers.flat_map(|server| &mut server.tools);
    let tools = of_servers.chain(&mut recording.tools);
    tools.for_each(|tool| texts.tool(tool));
}

/// The same for what a test observed, so that it can be compared with a recording and written to it.
pub fn redact_observed(run: &mut ObservedRun, redactor: &Redactor) {
    if redactor.is_empty() {
        return;
    }
    let texts = Texts(redactor);
    texts.text(&mut run.system);
    texts.text(&mut run.message);
    run.memory.iter_mut().for_each(|it| texts.text(it));
    texts.fields(&mut run.params);
    run.response_format.iter_mut().for_each(|it| texts.json(it));
    run.tools.iter_mut().for_each(|tool| texts.tool(tool));
}

pub fn redact_result(result: &mut ObservedResult, redactor: &Redactor) {
    Texts(redactor).text(&mut result.text);
}

struct Texts<'a>(&'a Redactor);

impl Texts<'_> {
    fn run(&self, run: &mut RunRecording) {
        self.text(&mut run.system);
        self.text(&mut run.message);
        run.memory.iter_mut().for_each(|it| self.text(it));
        self.fields(&mut run.params);
        run.response_format.iter_mut().for_each(|it| self.json(it));
        run.cancelled.iter_mut().for_each(|it| self.text(it));
        if let Some(error) = &mut run.error {
            self.text(&mut error.message);
            error.added.iter_mut().for_each(|it| self.text(it));
        }
        for message in &mut run.history {
            self.text(&mut message.content);
            let results = message.results.iter_mut();
            results.for_each(|result| self.text(&mut result.text));
            let calls = message.calls.iter_mut();
            calls.for_each(|call| self.arguments(&mut call.arguments));
        }
        let mut compactions: Vec<_> = run.compaction.iter_mut().collect();
        for turn in &mut run.turns {
            self.text(&mut turn.reply);
            turn.added.iter_mut().for_each(|it| self.text(it));
            turn.followup.iter_mut().for_each(|it| self.text(it));
            let calls = turn.calls.iter_mut();
            calls.for_each(|call| self.arguments(&mut call.arguments));
            compactions.extend(&mut turn.compaction);
        }
        for compaction in compactions {
            self.text(&mut compaction.summary);
        }
        for result in &mut run.results {
            self.text(&mut result.text);
            result
                .arguments
                .iter_mut()
                .for_each(|it| self.arguments(it));
        }
    }

    fn tool(&self, tool: &mut ToolRecording) {
        self.text(&mut tool.description);
        self.json_text(&mut tool.parameters);
    }

    /// A table, or JSON as a text.
    fn arguments(&self, arguments: &mut Value) {
        match arguments {
            Value::String(text) => self.json_text(text),
            table => self.json(table),
        }
    }

    /// The result of JSON is JSON, too.
    fn json_text(&self, text: &mut String) {
        if serde_json::from_str::<IgnoredAny>(text).is_err() {
            self.text(text);
        } else if let Some(redacted) = self.0.redact_json(text) {
            *text = redacted;
        }
    }

    fn text(&self, text: &mut String) {
        if let Cow::Owned(redacted) = self.0.redact(text) {
            *text = redacted;
        }
    }

    fn json(&self, json: &mut Value) {
        match json {
            Value::String(text) => self.text(text),
            Value::Array(values) => values.iter_mut().for_each(|it| self.json(it)),
            Value::Object(fields) => self.fields(fields),
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }

    /// The names are redacted too.
    fn fields(&self, fields: &mut Map<String, Value>) {
        let redacted = std::mem::take(fields).into_iter();
        *fields = redacted
            .map(|(mut name, mut value)| {
                self.text(&mut name);
                self.json(&mut value);
                (name, value)
            })
            .collect();
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::redact;
    use crate::domain::recording::{Recording, ResultRecording, RunRecording};
    use crate::domain::redaction::Redactor;

    #[test]
    fn names_and_formats_are_redacted_and_json_is_still_json() {
        let mut redactor = Redactor::default();
        redactor.add(r"pin-\d+.*").expect("a pattern");
        let result = |arguments| ResultRecording {
            arguments: Some(arguments),
            ..ResultRecording::default()
        };
        let run = RunRecording {
            response_format: Some(json!({"properties": {"pin-1": {"enum": ["pin-2"]}}})),
            results: vec![
                result(json!({"pin-3": 4})),
                result(json!(r#"{"a":"pin-5","b":null}"#)),
            ],
            ..RunRecording::default()
        };
        let mut recording = Recording {
            runs: vec![run],
            ..Recording::default()
        };
        redact(&mut recording, &redactor);
        let run = &recording.runs[0];
        let format = json!({"properties": {"[redacted]": {"enum": ["[redacted]"]}}});
        assert_eq!(run.response_format, Some(format));
        assert_eq!(run.results[0].arguments, Some(json!({"[redacted]": 4})));
        let text = json!(r#"{"a":"[redacted]","b":null}"#);
        assert_eq!(run.results[1].arguments, Some(text));
    }
}
