//! `tools/list`: the agents that the key may use, as tools; and the arguments of a call.

use std::sync::Arc;

use rmcp::model::{CacheScope, JsonObject, ListToolsResult, Tool};
use serde_json::{Value, json};

use crate::domain::agent::Agent;
use crate::web::auth::Principal;
use crate::web::body::json_body;
use crate::web::error::{Problem, did_you_mean, quote};
use crate::web::problem_code::ProblemCode;
use crate::web::state::AppState;

/// The arguments of every tool, and what a client's model reads about them.
const ARGUMENTS: [(&str, &str); 3] = [
    (
        "input",
        "What the agent has to do, with all that it needs to know: it does not see this conversation.",
    ),
    (
        "context",
        "More text for the agent, such as documents; appended to the input.",
    ),
    (
        "session",
        "A name, such as project-x. Calls of the agent with the same session continue one conversation.",
    ),
];

/// Agents with a valid definition, by name.
pub fn list(state: &AppState, principal: &Principal) -> ListToolsResult {
    let agents = state.runner.catalog().current();
    let entries = agents.entries.values();
    let usable = entries.filter(|entry| principal.can_use_agent(&entry.name));
    let tools = usable.filter_map(|entry| entry.agent.as_deref().map(tool));
    let mut result = ListToolsResult::with_all_items(tools.collect());
    // The files of agents may change at any time.
    result.ttl_ms = Some(0);
    result.cache_scope = Some(CacheScope::Private);
    result
}

fn tool(agent: &Agent) -> Tool {
    let description = match &agent.description {
        Some(description) => description.clone(),
        None => format!("Runs the agent {}.", agent.name),
    };
    let own_schema = agent.input_schema.as_ref();
    let own_schema = own_schema.and_then(|schema| serde_json::from_str(schema.get()).ok());
    let schema = own_schema.unwrap_or_else(input_schema);
    Tool::new(agent.name.clone(), description, Arc::new(schema))
}

fn input_schema() -> JsonObject {
    let properties = ARGUMENTS.map(|(name, description)| {
        let property = json!({ "type": "string", "description": description });
        (name.to_owned(), property)
    });
    let mut schema = JsonObject::new();
    schema.insert("type".to_owned(), "object".into());
    schema.insert(
        "properties".to_owned(),
        Value::Object(properties.into_iter().collect()),
    );
    schema.insert("required".to_owned(), json!(["input"]));
    schema.insert("additionalProperties".to_owned(), false.into());
    schema
}

/// The body of the request that starts the run. The arguments of an agent with an `input_schema` are its input.
pub fn run_request_body(agent: &Agent, arguments: Option<JsonObject>) -> Result<Vec<u8>, Problem> {
    let arguments = arguments.unwrap_or_default();
    if agent.input_schema.is_some() {
        let body = json!({ "input": arguments });
        return serde_json::to_vec(&body).map_err(|error| Problem::internal(error.to_string()));
    }
    let known = || ARGUMENTS.iter().map(|(name, _)| *name);
    if let Some(name) = arguments.keys().find(|name| known().all(|it| it != *name)) {
        let hint = did_you_mean(name, known());
        let detail = format!("unknown argument {}{hint}", quote(name));
        let pointer = json_body::join_pointer("", name);
        return Err(Problem::field(ProblemCode::UnknownField, pointer, detail));
    }
    serde_json::to_vec(&arguments).map_err(|error| Problem::internal(error.to_string()))
}
