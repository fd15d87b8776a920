//! Makes a recording from the record of a tree that has ended.

use std::collections::HashMap;
use std::sync::Arc;

use serde_json::{Map, Value};

use crate::domain::agent::client_additions::{ClientAdditions, ClientTool};
use crate::domain::event::EventKind;
use crate::domain::expect::Expect;
use crate::domain::recording::{
    CallRecording, ClientRecording, MAX_BYTES, Recording, RunRecording, VERSION,
};
use crate::domain::run::{Run, RunId, Status};
use crate::domain::run_path;
use crate::engine::capture::RecordingError;
use crate::engine::capture::capture_run::{self, CapturedRun};
use crate::engine::capture::offer::ToolTable;
use crate::engine::context::Engine;
use crate::engine::record::recorded_request;
use crate::engine::recording::redact;
use crate::record::entry::Entry;
use crate::store::StoreError;

/// Makes the recording of this root. Stops at the run whose texts do not fit into a file: a tree may have gigabytes.
pub async fn capture(engine: &Arc<Engine>, root: &Run) -> Result<Recording, RecordingError> {
    check(engine, root)?;
    let request = request_of(engine, root.id).await?;
    if recorded_request::is_too_large(&request) {
        return Err(RecordingError::Incomplete {
            run: root.id,
            reason: "its request was above 64 KiB and is not recorded".to_owned(),
        });
    }
    let mut children: HashMap<RunId, Vec<Run>> = HashMap::new();
    for run in engine.journal.store().tree(root.id).await? {
        if let Some(parent) = run.parent_id {
            children.entry(parent).or_default().push(run);
        }
    }
    let mut tools = ToolTable::default();
    let mut recording = Recording {
        version: VERSION,
        agent: root.agent.clone(),
        input: root.input.to_plain_text().into_owned(),
        request,
        expect: Expect {
            completed: Some(root.status == Status::Completed),
            ..Expect::default()
        },
        ..Recording::default()
    };
    let mut bytes = 0;
    let mut pending = vec![(root.clone(), root.agent.clone(), None)];
    while let Some((run, path, parent)) = pending.pop() {
        let captured = capture_run::capture(engine, &run, path, parent.as_deref(), &mut tools);
        let CapturedRun {
            recording: run_recording,
            position: tree_position,
        } = captured.await?;
        bytes += text_bytes(&run_recording);
        if bytes > MAX_BYTES {
            return Err(RecordingError::Incomplete {
                run: root.id,
                reason: format!("its texts have over {} MiB", MAX_BYTES >> 20),
            });
        }
        if run.id == root.id
            && let Some(client) = client_fields(tree_position.client(), &mut tools)
        {
            recording.request.insert("client".to_owned(), client);
        }
        let tree_position = Arc::new(tree_position);
        let mut found = Vec::new();
        for child in children.remove(&run.id).unwrap_or_default() {
            let Some((turn, position)) = position_of(&run_recording, &child) else {
                continue;
            };
            let path = run_path::child(&run_recording.path, turn, position, &child.agent);
            let parent = Some(Arc::clone(&tree_position));
            found.push(((turn, position), (child, path, parent)));
        }
        // The last one is taken first.
        found.sort_by_key(|(position, _)| std::cmp::Reverse(*position));
        pending.extend(found.into_iter().map(|(_, child)| child));
        recording.runs.push(run_recording);
    }
    (recording.tools, recording.mcp) = tools.into_recordings();
    redact::redact(&mut recording, &engine.settings.requests.redactor);
    Ok(recording)
}

/// What the request of a root set besides its input and labels.
async fn request_of(engine: &Engine, root: RunId) -> Result<Map<String, Value>, StoreError> {
    for it in engine.journal.store().entries(root).await? {
        if let Entry::Event(EventKind::RunQueued {
            request: Some(request),
            ..
        }) = it.entry
        {
            return serde_json::from_str(request.get())
                .map_err(|error| StoreError::Corrupt(format!("the request of {root}: {error}")));
        }
    }
    Ok(Map::new())
}

fn check(engine: &Engine, root: &Run) -> Result<(), RecordingError> {
    if root.parent_id.is_some() {
        return Err(RecordingError::NotARoot {
            run: root.id,
            root: root.root_id,
        });
    }
    if !root.status.is_terminal() {
        return Err(RecordingError::NotEnded(root.id));
    }
    if engine.settings.requests.is_off {
        return Err(RecordingError::RequestsOff(root.id));
    }
    Ok(())
}

/// The length of its texts. Its part of the file is longer.
fn text_bytes(run: &RunRecording) -> usize {
    let arguments = |calls: &[CallRecording]| -> usize {
        let calls = calls.iter();
        calls.map(|call| json_text_bytes(&call.arguments)).sum()
    };
    let history = run.history.iter().map(|message| {
        let results = message.results.iter().map(|result| result.text.len());
        message.content.len() + arguments(&message.calls) + results.sum::<usize>()
    });
    let turns = run.turns.iter().map(|turn| {
        let added = turn.added.iter().chain(&turn.followup).map(String::len);
        turn.reply.len() + arguments(&turn.calls) + added.sum::<usize>()
    });
    let of_turns = run.turns.iter().flat_map(|turn| &turn.compaction);
    let compactions = run.compaction.iter().chain(of_turns);
    let summaries = compactions.map(|compaction| compaction.summary.len());
    let results = run.results.iter().map(|result| result.text.len());
    let prompt = [&run.system, &run.message].into_iter().chain(&run.memory);
    let texts = prompt.map(String::len).chain(summaries).chain(results);
    history.chain(turns).chain(texts).sum()
}

/// The length of its strings and keys.
fn json_text_bytes(json: &Value) -> usize {
    match json {
        Value::String(text) => text.len(),
        Value::Array(values) => values.iter().map(json_text_bytes).sum(),
        Value::Object(fields) => {
            let fields = fields.iter();
            fields
                .map(|(key, value)| key.len() + json_text_bytes(value))
                .sum()
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
    }
}

/// `client` of `[request]`; `None` if the client added nothing to the agent. It is not in the recorded request, which has the
/// fields of a request to the agent.
fn client_fields(client: Option<&ClientAdditions>, tools: &mut ToolTable) -> Option<Value> {
    let client = client?;
    let specs = client.tools.iter().map(ClientTool::spec);
    let recording = ClientRecording {
        instructions: client.instructions.clone(),
        tools: specs.map(|spec| tools.id(&spec)).collect(),
        tool_choice: client.tool_choice.clone(),
    };
    let fields = serde_json::to_value(recording).ok()?;
    let is_set = fields.as_object().is_some_and(|it| !it.is_empty());
    is_set.then_some(fields)
}

/// The turn and the position of the call that started the child.
fn position_of(parent: &RunRecording, child: &Run) -> Option<(u32, usize)> {
    let call = child.tool_call_id.as_deref()?;
    parent.turns.iter().find_map(|turn| {
        let mut calls = turn.calls.iter();
        let index = calls.position(|it| it.id == call)?;
        Some((turn.turn, index + 1))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::text_bytes;
    use crate::domain::recording::{
        CallRecording, CompactionRecording, HistoryMessage, HistoryResult, Recording,
        ResultRecording, RunRecording, TurnRecording,
    };
    use crate::engine::recording::text;

    /// A run all of whose texts have this length.
    fn run(length: usize) -> RunRecording {
        let text = || "x".repeat(length);
        let call = || CallRecording {
            arguments: json!({"path": [text()]}),
            ..CallRecording::default()
        };
        let compaction = || CompactionRecording {
            summary: text(),
            ..CompactionRecording::default()
        };
        let message = HistoryMessage {
            content: text(),
            calls: vec![call()],
            results: vec![HistoryResult {
                text: text(),
                ..HistoryResult::default()
            }],
            ..HistoryMessage::default()
        };
        let turn = TurnRecording {
            turn: 1,
            added: vec![text(), text()],
            reply: text(),
            calls: vec![call()],
            followup: Some(text()),
            compaction: Some(compaction()),
            ..TurnRecording::default()
        };
        let result = ResultRecording {
            turn: 1,
            position: 1,
            text: text(),
            ..ResultRecording::default()
        };
        RunRecording {
            system: text(),
            memory: Some(text()),
            history: vec![message],
            compaction: Some(compaction()),
            message: text(),
            turns: vec![turn],
            results: vec![result],
            ..RunRecording::default()
        }
    }

    #[test]
    fn every_text_is_counted_and_the_file_is_longer() {
        const LENGTH: usize = 1000;
        const TEXTS: usize = 14;
        let counted = text_bytes(&run(LENGTH));
        assert_eq!(counted - text_bytes(&run(0)), TEXTS * LENGTH);
        let recording = Recording {
            runs: vec![run(LENGTH)],
            ..Recording::default()
        };
        let file = text::to_toml(&recording, "");
        assert_eq!(file.matches(&"x".repeat(LENGTH)).count(), TEXTS);
        assert!(file.len() > counted);
    }
}
