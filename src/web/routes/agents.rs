//! `/agents`: definitions, errors in files, memories.

use std::borrow::Cow;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::json;

use crate::catalog::Entry;
use crate::config::KeyScope::{Admin, Read};
use crate::domain::agent::model_ref::ModelRef;
use crate::domain::agent::{Agent, AgentSettings};
use crate::domain::memory_entry::MemoryEntry;
use crate::engine::agent_check;
use crate::engine::memories::GcReport;
use crate::settings::document;
use crate::settings::schema::section_schema;
use crate::settings::section::{Audience, Section, show_section};
use crate::web::auth::Principal;
use crate::web::error::Problem;
use crate::web::extract::body::JsonBody;
use crate::web::extract::path::{AgentPath, require_agent, unknown_agent};
use crate::web::extract::query::{KeyName, NoQuery, Query};
use crate::web::openapi::examples;
use crate::web::problem_code::ProblemCode::{self, MemoryDisabled, ProviderFailed};
use crate::web::response::json::{ListResponse, json_response};
use crate::web::response::revalidation::IfNoneMatch;
use crate::web::route::{Route, get, post};
use crate::web::state::AppState;

pub fn routes() -> Vec<Route> {
    vec![
        get("/agents", [Read], list)
            .describe("list_agents", "Lists the agents")
            .details("Sorted by name, including agents whose file is invalid.")
            .response::<ListResponse<AgentBrief<'static>>>(200, "The agents.")
            .example(json!({"data": [examples::agent_summary()]})),
        get("/agents/{name}", [Read], get_agent)
            .describe("get_agent", "Returns an agent with its definition")
            .details("An agent whose file was never valid has no definition, only its error.")
            .response::<AgentView<'static>>(200, "The agent.")
            .example(examples::agent_summary()),
        get("/agents/{name}/memory", [Read], memory)
            .describe("get_agent_memory", "Returns the memory of an agent")
            .details("The oldest entry is first.")
            .response::<ListResponse<MemoryEntry>>(200, "The entries.")
            .example(json!({"data": [examples::memory_entry()]}))
            .problems(&[MemoryDisabled]),
        post("/agents/{name}/gc", [Admin], gc)
            .describe("collect_agent_memory", "Trims the memory of an agent")
            .details(
                "The agent's model names the entries that can be removed. With `dry_run` nothing is removed.",
            )
            .request_example("analyse", "Only analyse", json!({"dry_run": true}))
            .response::<GcReport>(200, "The result of the collection.")
            .example(examples::gc_report())
            .problems(&[MemoryDisabled, ProviderFailed]),
    ]
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct MemoryQuery {
    /// The key that owns the memory; by default the request's own. Another key needs the scope `admin`.
    key: Option<KeyName>,
}

async fn list(
    State(state): State<AppState>,
    principal: Principal,
    _: NoQuery,
    if_none_match: IfNoneMatch,
) -> Response {
    let agents = agent_check::inspected_agents(state.runner.catalog()).await;
    let entries = agents.entries.values();
    let data = entries
        .filter(|entry| principal.can_use_agent(&entry.name))
        .map(AgentBrief::new)
        .collect();
    if_none_match.json_response(&ListResponse { data })
}

async fn get_agent(
    State(state): State<AppState>,
    (AgentPath(name), principal): (AgentPath, Principal),
    _: NoQuery,
    if_none_match: IfNoneMatch,
) -> Result<Response, Problem> {
    let agents = agent_check::inspected_agents(state.runner.catalog()).await;
    let entry = agents.entries.get(&name);
    let entry = entry.ok_or_else(|| unknown_agent(&principal, &state, &name))?;
    let view = AgentView::new(entry);
    Ok(if_none_match.json_response(&view))
}

async fn memory(
    State(state): State<AppState>,
    AgentPath(name): AgentPath,
    principal: Principal,
    Query(query): Query<MemoryQuery>,
) -> Result<Response, Problem> {
    require_agent(&principal, &state, &name)?;
    let owner = memory_owner(&state, &name, &principal, query)?;
    let data = state.runner.memory(&name, owner.as_deref()).await?;
    Ok(json_response(StatusCode::OK, &ListResponse { data }))
}

async fn gc(
    State(state): State<AppState>,
    AgentPath(name): AgentPath,
    principal: Principal,
    Query(query): Query<MemoryQuery>,
    JsonBody(GcRequest { dry_run }): JsonBody<GcRequest>,
) -> Result<Response, Problem> {
    require_agent(&principal, &state, &name)?;
    let owner = memory_owner(&state, &name, &principal, query)?;
    let report = state
        .runner
        .collect_memory(&name, owner.as_deref(), dry_run.unwrap_or_default())
        .await?;
    Ok(json_response(StatusCode::OK, &report))
}

/// Whose memory of an agent is meant: the caller's own, or that of the key that `?key=` names, which an admin may choose,
/// and everybody where there are no keys.
fn memory_owner(
    state: &AppState,
    agent: &str,
    principal: &Principal,
    query: MemoryQuery,
) -> Result<Option<String>, Problem> {
    let Some(KeyName(key)) = query.key else {
        return Ok(principal.key_name().map(str::to_owned));
    };
    if principal.owner_filter().is_some_and(|owner| owner != key) {
        return Err(Problem::new(
            ProblemCode::InsufficientScope,
            "the memory of another key needs the scope admin",
        ));
    }
    let agents = state.runner.catalog().current();
    if agents.get(agent)?.memory.shared {
        let why = format_args!("agent {agent} has one memory for all keys");
        return Err(Problem::parameter("key", why));
    }
    Ok(Some(key))
}

/// How a memory is collected.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[schemars(rename = "CollectMemoryRequest")]
#[serde(deny_unknown_fields, default)]
pub struct GcRequest {
    /// Whether the memory is only analysed, and nothing is removed.
    dry_run: Option<bool>,
}

/// An agent as the list shows it.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "AgentSummary")]
pub struct AgentBrief<'a> {
    /// The agent's name: that of its file without `.toml`.
    pub name: &'a str,
    /// The version in use: `sha256:` and the digest of the file. The last valid one, if the file became invalid later.
    pub version: Option<&'a str>,
    /// Whether the file is valid now.
    pub valid: bool,
    /// Why the file is invalid.
    pub error: Option<String>,
    /// What is suspicious in the file, and what this server lacks for the definition in force.
    pub warnings: Vec<Cow<'a, str>>,
    /// What the agent does, for people and for the models of agents that may call it.
    pub description: Option<&'a str>,
    /// The model that replies.
    pub model: Option<&'a ModelRef>,
    /// The agents that it may call.
    pub sub_agents: &'a [String],
    /// The built-in tools that it may use.
    pub tools: &'a [String],
}

impl<'a> AgentBrief<'a> {
    pub fn new(entry: &'a Entry) -> Self {
        let agent = entry.agent.as_deref();
        Self {
            name: &entry.name,
            version: agent.map(|agent| agent.version.as_str()),
            valid: entry.error.is_none() && agent.is_some(),
            error: entry.error.as_ref().map(ToString::to_string),
            warnings: entry
                .warnings
                .iter()
                .map(document::Problem::message)
                .collect(),
            description: agent.and_then(|agent| agent.description.as_deref()),
            model: agent.map(|agent| &agent.model),
            sub_agents: agent.map_or(&[], |agent| &agent.sub_agents),
            tools: agent.map_or(&[], |agent| &agent.tools),
        }
    }
}

/// An agent with its definition: every key of its file, with defaults filled in. Without the definition if the file was never
/// valid.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Agent", extend("x-keeps-null" = true))]
pub struct AgentView<'a> {
    #[serde(flatten)]
    pub brief: AgentBrief<'a>,
    #[serde(flatten)]
    definition: Option<DefinitionView<'a>>,
}

impl<'a> AgentView<'a> {
    pub fn new(entry: &'a Entry) -> Self {
        Self {
            brief: AgentBrief::new(entry),
            definition: entry.agent.as_deref().map(DefinitionView),
        }
    }
}

/// The keys that [`AgentBrief`] has already.
const BRIEF_KEYS: &[&str] = &["description", "model", "sub_agents", "tools"];

/// The other keys of the agent's file, with defaults filled in.
struct DefinitionView<'a>(&'a Agent);

impl Serialize for DefinitionView<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut view = show_section(&self.0.settings, Audience::Client);
        view.retain(|key, _| !BRIEF_KEYS.contains(&key.as_str()));
        view.serialize(serializer)
    }
}

impl JsonSchema for DefinitionView<'_> {
    fn schema_name() -> Cow<'static, str> {
        AgentSettings::SCHEMA.into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        section_schema::<AgentSettings>(generator, BRIEF_KEYS)
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::Arc;
    use std::time::Duration;

    use serde_json::value::RawValue;

    use super::{AgentBrief, AgentView};
    use crate::catalog::{Entry, LoadError};
    use crate::domain::agent::params::Params;
    use crate::domain::agent::response_format::ResponseFormat;
    use crate::domain::agent::{Agent, AgentSettings};
    use crate::domain::webhook::Webhook;

    fn entry() -> Entry {
        let schema = RawValue::from_string(r#"{"type":"object"}"#.to_owned()).expect("JSON");
        let agent = Agent {
            name: "planner".to_owned(),
            version: "sha256:00".to_owned(),
            settings: AgentSettings {
                model: "openai/gpt".parse().expect("a model"),
                system_prompt: "plan".to_owned(),
                files: vec!["*.md".to_owned()],
                sub_agents: vec!["reader".to_owned()],
                timeout: Some(Duration::from_secs(60)),
                params: Params {
                    temperature: Some(0.0),
                    response_format: ResponseFormat::JsonSchema(Arc::from(schema)),
                    ..Params::default()
                },
                webhook: Some(Webhook {
                    url: "https://hooks.example.com/axed?token=hush".to_owned(),
                    secret_env: Some("HOOK_SECRET".to_owned()),
                    events: Vec::new(),
                }),
                ..AgentSettings::default()
            },
            ..Agent::default()
        };
        Entry {
            name: "planner".to_owned(),
            path: PathBuf::from("agents/planner.toml"),
            agent: Some(Arc::new(agent)),
            candidate: None,
            file_version: None,
            error: None,
            draft: None,
            problems: Vec::new(),
            file_warnings: Vec::new(),
            warnings: Vec::new(),
            positions: Arc::default(),
        }
    }

    #[test]
    fn a_definition_reads_like_its_file() {
        let entry = entry();
        let view = AgentView::new(&entry);
        insta::assert_snapshot!(serde_json::to_string_pretty(&view).expect("JSON"));
    }

    #[test]
    fn a_file_that_broke_later_keeps_its_version() {
        let mut entry = entry();
        entry.error = Some(LoadError::Invalid("planner.toml:3: bad".to_owned()));
        let brief = serde_json::to_value(AgentBrief::new(&entry)).expect("JSON");
        assert_eq!(brief["valid"], false);
        assert_eq!(brief["version"], "sha256:00");
        assert_eq!(brief["error"], "planner.toml:3: bad");
    }
}
