//! `GET /v1/models`: the agents that the key may use.

use axum::extract::State;
use axum::response::Response;
use serde::Serialize;

use crate::domain::agent::Agent;
use crate::web::auth::Principal;
use crate::web::error::Problem;
use crate::web::extract::path::AgentPath;
use crate::web::response::revalidation::IfNoneMatch;
use crate::web::state::AppState;

#[derive(Serialize)]
struct ModelList<'a> {
    object: &'static str,
    data: Vec<Model<'a>>,
}

#[derive(Serialize)]
struct Model<'a> {
    id: &'a str,
    object: &'static str,
    /// Required by clients. Agents have no time of creation.
    created: u64,
    owned_by: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    description: Option<&'a str>,
}

impl<'a> Model<'a> {
    fn new(agent: &'a Agent) -> Self {
        Self {
            id: &agent.name,
            object: "model",
            created: 0,
            owned_by: "axed",
            description: agent.description.as_deref(),
        }
    }
}

/// `GET /v1/models`: agents with a valid definition, by name.
pub async fn list(
    State(state): State<AppState>,
    principal: Principal,
    if_none_match: IfNoneMatch,
) -> Response {
    let agents = state.runner.catalog().current();
    let entries = agents.entries.values();
    let usable = entries.filter(|entry| principal.can_use_agent(&entry.name));
    let data = usable.filter_map(|entry| entry.agent.as_deref().map(Model::new));
    if_none_match.json_response(&ModelList {
        object: "list",
        data: data.collect(),
    })
}

/// `GET /v1/models/{name}`
pub async fn get(
    State(state): State<AppState>,
    AgentPath(name): AgentPath,
    if_none_match: IfNoneMatch,
) -> Result<Response, Problem> {
    let agents = state.runner.catalog().current();
    Ok(if_none_match.json_response(&Model::new(agents.get(&name)?)))
}
