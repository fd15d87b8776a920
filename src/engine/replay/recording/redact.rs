//! Removes from a recording what the patterns of `[data] redact` match, as from recorded requests.

use std::borrow::Cow;

use serde_json::Value;

use crate::domain::recording::{Recording, RunRecording};
use crate::domain::redaction::Redactor;

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
}

struct Texts<'a>(&'a Redactor);

impl Texts<'_> {
    fn run(&self, run: &mut RunRecording) {
        self.text(&mut run.system);
        self.text(&mut run.message);
        run.memory.iter_mut().for_each(|it| self.text(it));
        run.params.values_mut().for_each(|it| self.json(it));
        let errors = run.error.iter_mut();
        errors.for_each(|error| self.text(&mut error.message));
        for message in &mut run.history {
            self.text(&mut message.content);
            let results = message.results.iter_mut();
            results.for_each(|result| self.text(&mut result.text));
            let calls = message.calls.iter_mut();
            calls.for_each(|call| self.json(&mut call.arguments));
        }
        let mut compactions: Vec<_> = run.compaction.iter_mut().collect();
        for turn in &mut run.turns {
            self.text(&mut turn.reply);
            turn.added.iter_mut().for_each(|it| self.text(it));
            turn.followup.iter_mut().for_each(|it| self.text(it));
            let calls = turn.calls.iter_mut();
            calls.for_each(|call| self.json(&mut call.arguments));
            compactions.extend(&mut turn.compaction);
        }
        for compaction in compactions {
            self.text(&mut compaction.summary);
        }
        let results = run.results.iter_mut();
        results.for_each(|result| self.text(&mut result.text));
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
            Value::Object(fields) => fields.values_mut().for_each(|it| self.json(it)),
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }
}
