//! Reads the file of a recording. An error names the line.

use std::collections::HashSet;
use std::sync::Arc;

use toml_edit::{Document, Item};

use crate::domain::ignore::Ignore;
use crate::domain::recording::{MAX_BYTES, Recording, VERSION};
use crate::engine::recording::assertions::Assertions;

/// Why a file is not a recording.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ReadError {
    /// From 1; `None` for the whole file.
    pub line: Option<usize>,
    pub message: String,
}

/// A recording with its patterns compiled.
#[derive(Debug)]
pub struct ReadRecording {
    pub recording: Arc<Recording>,
    pub ignore: Vec<String>,
    pub assertions: Assertions,
}

impl ReadRecording {
    /// The compiled [`Recording::ignore`].
    pub fn ignore(&self) -> Ignore {
        // They were compiled when the file was read.
        Ignore::new(&self.ignore).unwrap_or_default()
    }
}

/// Whether the text is meant to be a recording: TOML with `runs`, or no TOML at all.
pub fn may_be_recording(text: &str) -> bool {
    match Document::parse(text) {
        Ok(document) => document.get("runs").is_some(),
        Err(_) => true,
    }
}

/// Reads and checks a recording.
pub fn read(text: &str) -> Result<ReadRecording, ReadError> {
    let whole = |message: String| ReadError {
        line: None,
        message,
    };
    if text.len() > MAX_BYTES {
        return Err(whole(format!(
            "the file has {} bytes; a recording has at most {MAX_BYTES}",
            text.len()
        )));
    }
    let document = Document::parse(text).map_err(|error| ReadError {
        line: error.span().map(|span| line_of(text, span.start)),
        message: error.message().to_owned(),
    })?;
    let recording: Recording = toml_edit::de::from_str(text).map_err(|error| ReadError {
        line: error.span().map(|span| line_of(text, span.start)),
        message: error.message().to_owned(),
    })?;
    let at = |path: &[&str], message: String| ReadError {
        line: span_start(document.as_item(), path).map(|start| line_of(text, start)),
        message,
    };
    if recording.version != VERSION {
        let message = format!(
            "version is {}; this axed reads version {VERSION}",
            recording.version
        );
        return Err(at(&["version"], message));
    }
    check_runs(&recording).map_err(|message| at(&["runs"], message))?;
    if let Err((_, error)) = Ignore::new(&recording.ignore) {
        return Err(at(&["ignore"], format!("ignore: {error}")));
    }
    let assertions = Assertions::compile(recording.expect.clone());
    let assertions = assertions.map_err(|(key, why)| at(&["expect", key], why))?;
    Ok(ReadRecording {
        ignore: recording.ignore.clone(),
        recording: Arc::new(recording),
        assertions,
    })
}

fn check_runs(recording: &Recording) -> Result<(), String> {
    let mut paths = HashSet::new();
    for run in &recording.runs {
        if !paths.insert(&run.path) {
            return Err(format!("there are two runs with the path {}", run.path));
        }
        let turns = run.turns.iter().map(|turn| turn.turn);
        if !turns.eq(1..=u32::try_from(run.turns.len()).unwrap_or(u32::MAX)) {
            return Err(format!("the turns of {} are not 1, 2, 3, …", run.path));
        }
        if run.results.iter().any(|result| result.position == 0) {
            return Err(format!(
                "a result of {} has position 0; 1 is the first",
                run.path
            ));
        }
    }
    match recording.runs.first() {
        Some(root) if root.path == recording.agent => Ok(()),
        _ => Err(format!(
            "the first run must be that of the agent, with path = \"{}\"",
            recording.agent
        )),
    }
}

fn span_start(item: &Item, path: &[&str]) -> Option<usize> {
    let found = path.iter().try_fold(item, |item, key| item.get(key));
    found.unwrap_or(item).span().map(|span| span.start)
}

/// The line of this byte, from 1.
fn line_of(text: &str, start: usize) -> usize {
    let before = &text.as_bytes()[..start.min(text.len())];
    before.iter().filter(|byte| **byte == b'\n').count() + 1
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, Value, json};

    use super::{may_be_recording, read};
    use crate::domain::recording::{
        CallRecording, Recording, RunRecording, TurnRecording, VERSION, arguments_text,
    };
    use crate::engine::recording::text;

    const RECORDING: &str = "version = 1\nagent = \"a\"\n\n[expect]\ncompleted = true\n\n\
        [[runs]]\npath = \"a\"\nagent = \"a\"\nmodel = \"x/y\"\n\n[[runs.turns]]\nturn = 1\n";

    fn error_of(from: &str, to: &str) -> (Option<usize>, String) {
        assert!(RECORDING.contains(from), "{from}");
        let error = read(&RECORDING.replacen(from, to, 1)).expect_err("invalid");
        (error.line, error.message)
    }

    #[test]
    fn an_error_names_its_line() {
        assert!(read(RECORDING).is_ok());
        let (line, message) = error_of("completed = true", "complete = true");
        assert_eq!(line, Some(5));
        assert!(message.contains("unknown field `complete`"), "{message}");
        let (line, message) = error_of("completed = true", "matches = \"(\"");
        assert_eq!(line, Some(5), "{message}");
        let (line, message) = error_of("version = 1", "version = 2");
        assert_eq!(
            (line, &*message),
            (Some(1), "version is 2; this axed reads version 1")
        );
        let (line, _) = error_of("agent = \"a\"", "agent = ");
        assert_eq!(line, Some(2));
        let (_, message) = error_of("turn = 1", "turn = 2");
        assert_eq!(message, "the turns of a are not 1, 2, 3, …");
        let (line, message) = error_of("completed = true", "schema = { type = 3 }");
        assert_eq!(line, Some(5), "{message}");
    }

    #[test]
    fn what_toml_cannot_express_is_read_as_it_was() {
        let fields = |json: Value| match json {
            Value::Object(fields) => fields,
            _ => Map::new(),
        };
        let deep = (0..100).fold(json!("end"), |inner, _| json!({"in": inner}));
        let params = fields(json!({"max_tokens": u64::MAX}));
        let schema = json!({"type": "json_schema", "schema": {"enum": ["b", null]}});
        let request = fields(json!({
            "context": "{\"a\":1}", "params": {"response_format": schema, "seed": u64::MAX},
        }));
        let call = CallRecording {
            id: "c".to_owned(),
            tool: "t".to_owned(),
            arguments: deep.clone(),
        };
        let turn = TurnRecording {
            turn: 1,
            calls: vec![call],
            ..TurnRecording::default()
        };
        let run = RunRecording {
            path: "a".to_owned(),
            agent: "a".to_owned(),
            model: "x/y".to_owned(),
            params: params.clone(),
            response_format: Some(schema.clone()),
            turns: vec![turn],
            ..RunRecording::default()
        };
        let recording = Recording {
            version: VERSION,
            agent: "a".to_owned(),
            request: request.clone(),
            runs: vec![run],
            ..Recording::default()
        };
        let found = read(&text::to_toml(&recording, "")).expect("a recording");
        let (found, run) = (&found.recording, &found.recording.runs[0]);
        assert_eq!((&found.request, &run.params), (&request, &params));
        assert_eq!(run.response_format, Some(schema));
        let arguments = arguments_text(&run.turns[0].calls[0].arguments);
        assert_eq!(arguments, deep.to_string());
    }

    #[test]
    fn other_files_are_no_recordings() {
        assert!(may_be_recording(RECORDING));
        assert!(may_be_recording("version = "));
        assert!(!may_be_recording("[[replies]]\ntext = \"hi\"\n"));
    }
}
