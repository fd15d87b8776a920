//! The request of a test's root run, as its recording has it.

use std::sync::Arc;

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::domain::agent::client_additions::{ClientAdditions, ClientTool};
use crate::domain::agent::overrides::{BudgetOverride, ParamsOverride};
use crate::domain::agent::response_format::ResponseFormat;
use crate::domain::rate_limit::Priority;
use crate::domain::recording::{ClientRecording, Recording};
use crate::engine::recording::playback::Playback;
use crate::engine::request::{Overrides, RunRequest};

/// `[request]` of a recording.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct RequestTable {
    context: Option<String>,
    model: Option<String>,
    skill: Option<String>,
    workdir: Option<String>,
    params: ParamsOverride<ResponseFormat>,
    timeout: Option<u64>,
    budget: BudgetOverride,
    priority: Option<Priority>,
    stream: Option<bool>,
    client: ClientRecording,
}

/// # Errors
/// Which field of `[request]` is invalid.
pub fn run_request(
    recording: &Recording,
    playback: Option<Arc<Playback>>,
) -> Result<RunRequest, String> {
    let table: Map<String, Value> = recording.request.clone();
    let table: RequestTable =
        serde_path_to_error::deserialize(Value::Object(table)).map_err(|error| {
            let path = error.path().to_string();
            format!("[request] {path}: {}", error.into_inner())
        })?;
    let budget = table.budget.into_budget();
    let client = client_additions(recording, table.client)
        .map_err(|error| format!("[request] client: {error}"))?;
    Ok(RunRequest {
        agent: recording.agent.clone(),
        input: Some(recording.input.as_str().into()),
        context: table.context,
        overrides: Overrides {
            model: table.model,
            skill: table.skill,
            workdir: table.workdir.map(Into::into),
            params: table.params,
            timeout: table.timeout.map(std::time::Duration::from_secs),
            budget: budget.map_err(|error| format!("[request] budget: {error}"))?,
            priority: table.priority,
            client,
        },
        stream: table.stream,
        playback,
        ..RunRequest::default()
    })
}

fn client_additions(
    recording: &Recording,
    client: ClientRecording,
) -> Result<ClientAdditions, String> {
    let tools: Result<Vec<_>, String> = client
        .tools
        .iter()
        .map(|id| client_tool(recording, id))
        .collect();
    Ok(ClientAdditions {
        instructions: client.instructions,
        tools: tools?,
        ends_with_calls: client.tool_choice.is_some(),
        tool_choice: client.tool_choice,
        ..ClientAdditions::default()
    })
}

fn client_tool(recording: &Recording, id: &str) -> Result<ClientTool, String> {
    let tool = recording.tool(id);
    let tool = tool.ok_or_else(|| format!("no tool of the file has the id \"{id}\""))?;
    let parameters = RawValue::from_string(tool.parameters.clone());
    let parameters = parameters.map_err(|error| format!("the parameters of {id}: {error}"))?;
    Ok(ClientTool {
        name: tool.name().to_owned(),
        description: tool.description.clone(),
        parameters: Arc::from(parameters),
    })
}
