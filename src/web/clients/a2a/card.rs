//! Agent cards: how a client reaches an agent, and what it does. With keys, a card is shown to the keys that may use the
//! agent, if they may read or start runs.

use crate::web::clients::a2a::types::{
    AgentCapabilities, AgentCard, AgentInterface, AgentSkill, HTTP_JSON, JSON_RPC, VERSION,
};
use axum::extract::State;
use axum::response::Response;
use serde_json::json;

use crate::config::KeyScope;
use crate::domain::agent::Agent;
use crate::web::auth::Principal;
use crate::web::clients::a2a::version::Version1;
use crate::web::error::Problem;
use crate::web::extract::link_prefix::PublicUrl;
use crate::web::extract::path::AgentPath;
use crate::web::response::revalidation::IfNoneMatch;
use crate::web::state::AppState;

const TEXT: &str = "text/plain";
const JSON: &str = "application/json";
const INPUT_TYPES: [&str; 7] = [
    TEXT,
    JSON,
    "image/png",
    "image/jpeg",
    "image/webp",
    "image/gif",
    "application/pdf",
];
/// A card is for keys with one of these.
const SCOPES: [KeyScope; 2] = [KeyScope::Read, KeyScope::Run];
/// The name of the security scheme.
const KEY: &str = "key";

/// `GET /a2a/{agent}/.well-known/agent-card.json`
pub async fn of_agent(
    State(state): State<AppState>,
    principal: Principal,
    AgentPath(name): AgentPath,
    url: PublicUrl,
    if_none_match: IfNoneMatch,
) -> Result<Response, Problem> {
    let card = of(&state, &principal, &name, &url)?;
    Ok(if_none_match.json_response(&card))
}

/// The card of the agent.
pub fn of(
    state: &AppState,
    principal: &Principal,
    name: &str,
    url: &PublicUrl,
) -> Result<AgentCard, Problem> {
    principal.require_any_scope(&SCOPES)?;
    let agents = state.runner.catalog().current();
    let agent = agents.get(name)?;
    Ok(AgentCard {
        supported_interfaces: interfaces(agent, url).into(),
        skills: vec![skill(agent)],
        ..card(state, &agent.name, description(agent))
    })
}

/// `GET /a2a/{agent}/extendedAgentCard`: no more than the other card, which needs a key too.
pub async fn extended(
    _: Version1,
    state: State<AppState>,
    principal: Principal,
    agent: AgentPath,
    url: PublicUrl,
    if_none_match: IfNoneMatch,
) -> Result<Response, Problem> {
    of_agent(state, principal, agent, url, if_none_match).await
}

/// `GET /.well-known/agent-card.json`: each agent that the key may use has interfaces and a skill.
pub async fn all(
    State(state): State<AppState>,
    principal: Principal,
    url: PublicUrl,
    if_none_match: IfNoneMatch,
) -> Result<Response, Problem> {
    principal.require_any_scope(&SCOPES)?;
    let agents = state.runner.catalog().current();
    let entries = agents.entries.values();
    let usable = entries.filter(|entry| principal.can_use_agent(&entry.name));
    let usable: Vec<&Agent> = usable.filter_map(|entry| entry.agent.as_deref()).collect();
    let card = AgentCard {
        supported_interfaces: usable
            .iter()
            .flat_map(|agent| interfaces(agent, &url))
            .collect(),
        skills: usable.iter().map(|agent| skill(agent)).collect(),
        ..card(
            &state,
            "axed",
            "Agents of this server: each interface is one.".to_owned(),
        )
    };
    Ok(if_none_match.json_response(&card))
}

fn card(state: &AppState, name: &str, description: String) -> AgentCard {
    let needs_key = !state.settings.keys.is_empty();
    let scheme = || {
        let description = "A key of the server's configuration.";
        json!({ KEY: { "httpAuthSecurityScheme": { "scheme": "Bearer", "description": description } } })
    };
    AgentCard {
        name: name.to_owned(),
        description,
        version: env!("CARGO_PKG_VERSION"),
        supported_interfaces: Vec::new(),
        capabilities: AgentCapabilities {
            streaming: true,
            push_notifications: true,
            extended_agent_card: true,
        },
        default_input_modes: &INPUT_TYPES,
        default_output_modes: &[TEXT, JSON],
        skills: Vec::new(),
        security_schemes: needs_key.then(scheme),
        security_requirements: needs_key.then(|| json!([{ "schemes": { KEY: { "list": [] } } }])),
    }
}

/// The agent in each binding; both have the same URL.
fn interfaces(agent: &Agent, url: &PublicUrl) -> [AgentInterface; 2] {
    [HTTP_JSON, JSON_RPC].map(|protocol_binding| AgentInterface {
        url: url.join(&format!("/a2a/{}", agent.name)),
        protocol_binding,
        protocol_version: VERSION,
    })
}

/// What the agent does. An agent of ours has one skill: to work on its input.
fn skill(agent: &Agent) -> AgentSkill {
    AgentSkill {
        id: agent.name.clone(),
        name: agent.name.clone(),
        description: description(agent),
        tags: ["agent"],
        input_modes: agent.input_schema.is_some().then_some([JSON]),
    }
}

fn description(agent: &Agent) -> String {
    match &agent.description {
        Some(description) => description.clone(),
        None => format!("Runs the agent {}.", agent.name),
    }
}
