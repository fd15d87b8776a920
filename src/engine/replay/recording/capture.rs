//! Makes a recording from the record of a tree that has ended.

use std::collections::HashMap;
use std::sync::Arc;

use serde_json::{Map, Value};

use crate::domain::agent::client_additions::{ClientAdditions, ClientTool};
use crate::domain::expect::Expect;
use crate::domain::recording::{ClientRecording, Recording, RunRecording, VERSION};
use crate::domain::run::{Run, RunId, Status};
use crate::domain::run_path;
use crate::engine::context::Engine;
use crate::engine::record::recorded_request;
use crate::engine::replay::recording::capture_run::{self, CapturedRun};
use crate::engine::replay::recording::offer::ToolTable;
use crate::engine::replay::recording::{RecordingError, redact, run_events};

/// Makes the recording of this root.
pub async fn capture(engine: &Arc<Engine>, root: &Run) -> Result<Recording, RecordingError> {
    if root.parent_id.is_some() {
        return Err(RecordingError::NotARoot {
            run: root.id,
            root: root.root_id,
        });
    }
    if !root.status.is_terminal() {
        return Err(RecordingError::NotEnded(root.id));
    }
    let settings = &engine.settings.requests;
    if settings.is_off {
        return Err(RecordingError::RequestsOff(root.id));
    }
    let mut events = run_events::read(engine, root.id).await?;
    let of_root = events.get_mut(&root.id);
    let request = of_root.map_or_else(Map::new, |it| std::mem::take(&mut it.request));
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
    let mut pending = vec![(root.clone(), root.agent.clone(), None)];
    while let Some((run, path, parent)) = pending.pop() {
        let of_run = events.remove(&run.id).unwrap_or_default();
        let captured =
            capture_run::capture(engine, &run, path, parent.as_deref(), &of_run, &mut tools);
        let CapturedRun {
            recording: run_recording,
            position: tree_position,
        } = captured.await?;
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
    redact::redact(&mut recording, &settings.redactor);
    Ok(recording)
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
