//! `/agents`: what is in force, what is broken, and what agents remember.

use std::collections::BTreeMap;
use std::path::Path;

use axum::extract::{Request, State};
use axum::http::{StatusCode, Uri};
use axum::response::Response;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::catalog::{Entry, LoadError};
use crate::config::load::is_valid_name;
use crate::domain::agent::model_ref::ModelRef;
use crate::domain::agent::params::{Cache, Effort, ReasoningSummary};
use crate::domain::agent::response_format::ResponseFormat;
use crate::domain::agent::{Agent, Backoff, SubagentSettings, SummaryMode};
use crate::domain::context::ContextSettings;
use crate::domain::mcp::{McpServer, McpTransport};
use crate::domain::service::Service;
use crate::ssrf;
use crate::web::auth::Principal;
use crate::web::error::Problem;
use crate::web::extract::path::AgentPath;
use crate::web::extract::query::Query;
use crate::web::extract::request_body;
use crate::web::response::json::{ListResponse, json_response};
use crate::web::state::AppState;

/// `GET /agents`
pub async fn list(State(state): State<AppState>, principal: Principal) -> Response {
    let agents = state.runner.catalog().current();
    let entries = agents.entries.values();
    let data = entries
        .filter(|entry| principal.can_use_agent(&entry.name))
        .map(AgentBrief::new)
        .collect();
    json_response(StatusCode::OK, &ListResponse { data })
}

/// `GET /agents/{name}`
pub async fn get(
    State(state): State<AppState>,
    AgentPath(name): AgentPath,
) -> Result<Response, Problem> {
    let agents = state.runner.catalog().current();
    let entry = agents.entries.get(&name).ok_or(LoadError::NotFound(name))?;
    let view = AgentView {
        brief: AgentBrief::new(entry),
        definition: entry.agent.as_deref().map(DefinitionView::new),
    };
    Ok(json_response(StatusCode::OK, &view))
}

/// `GET /agents/{name}/memory`
pub async fn memory(
    State(state): State<AppState>,
    AgentPath(name): AgentPath,
    principal: Principal,
    uri: Uri,
) -> Result<Response, Problem> {
    let owner = memory_owner(&state, &name, &principal, &uri)?;
    let data = state.runner.memory(&name, owner.as_deref()).await?;
    Ok(json_response(StatusCode::OK, &ListResponse { data }))
}

/// `POST /agents/{name}/gc`
pub async fn gc(
    State(state): State<AppState>,
    AgentPath(name): AgentPath,
    principal: Principal,
    request: Request,
) -> Result<Response, Problem> {
    let (parts, body) = request.into_parts();
    let owner = memory_owner(&state, &name, &principal, &parts.uri)?;
    let settings = &state.settings;
    let request_body = request_body::read(&parts.headers, body, settings.body_limits()).await?;
    let GcRequest { dry_run } = request_body.json()?;
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
    uri: &Uri,
) -> Result<Option<String>, Problem> {
    let query = Query::read(uri, &["key"])?;
    let Some(key) = query.parse("key", "a key's name", parse_key_name)? else {
        return Ok(principal.key_name().map(str::to_owned));
    };
    if principal.owner_filter().is_some_and(|owner| owner != key) {
        return Err(Problem::new(
            StatusCode::FORBIDDEN,
            "insufficient_scope",
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

fn parse_key_name(text: &str) -> Option<String> {
    is_valid_name(text).then(|| text.to_owned())
}

/// How a memory is collected.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[schemars(rename = "GcRequest")]
#[serde(deny_unknown_fields, default)]
pub struct GcRequest {
    /// Whether it is only analysed.
    dry_run: Option<bool>,
}

/// An agent as the list shows it.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "AgentBrief")]
pub struct AgentBrief<'a> {
    name: &'a str,
    /// The version in force: of a file that broke later, the last good one's.
    version: Option<&'a str>,
    /// Whether the file as it is now is a definition.
    valid: bool,
    error: Option<String>,
    warnings: &'a [String],
    description: Option<&'a str>,
    model: Option<&'a ModelRef>,
    sub_agents: &'a [String],
    tools: &'a [String],
}

impl<'a> AgentBrief<'a> {
    fn new(entry: &'a Entry) -> Self {
        let agent = entry.agent.as_deref();
        Self {
            name: &entry.name,
            version: agent.map(|agent| agent.version.as_str()),
            valid: entry.error.is_none() && agent.is_some(),
            error: entry.error.as_ref().map(ToString::to_string),
            warnings: &entry.warnings,
            description: agent.and_then(|agent| agent.description.as_deref()),
            model: agent.map(|agent| &agent.model),
            sub_agents: agent.map_or(&[], |agent| &agent.sub_agents),
            tools: agent.map_or(&[], |agent| &agent.tools),
        }
    }
}

/// An agent with its definition, where there is one.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Agent")]
pub struct AgentView<'a> {
    #[serde(flatten)]
    brief: AgentBrief<'a>,
    #[serde(flatten)]
    definition: Option<DefinitionView<'a>>,
}

/// The rest of a definition in the words of its file, with the defaults filled in: durations in seconds, 0 for none.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "AgentDefinition")]
struct DefinitionView<'a> {
    fallback_models: &'a [ModelRef],
    system_prompt: &'a str,
    skill: Option<&'a str>,
    files: &'a [String],
    workdir: Option<&'a Path>,
    allowed_hosts: &'a [String],
    stream: bool,
    timeout: u64,
    approve: &'a [String],
    approve_timeout: u64,
    sub_agents_config: DelegationView,
    effort: Option<Effort>,
    reasoning_summary: Option<ReasoningSummary>,
    cache: Cache,
    service: Option<Service>,
    allow_extra: &'a [String],
    allow_provider_keys: bool,
    params: BTreeMap<&'static str, ParamView<'a>>,
    limits: LimitsView,
    context: ContextSettings,
    budget: BudgetView,
    retry: RetryView,
    memory: MemoryView<'a>,
    mcp_servers: Vec<McpServerView<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    subagent: Option<SubagentView<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    webhook: Option<WebhookView<'a>>,
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "AgentSubagent")]
struct SubagentView<'a> {
    enabled: bool,
    max_depth: u8,
    default_max_turns: u32,
    output_max_size: usize,
    summary: SummaryMode,
    max_executions: u64,
    max_total_tokens: u64,
    max_total_time: u64,
    model: Option<&'a ModelRef>,
    effort: Option<Effort>,
    service: Option<Service>,
}

impl<'a> From<&'a SubagentSettings> for SubagentView<'a> {
    fn from(subagent: &'a SubagentSettings) -> Self {
        Self {
            enabled: true,
            max_depth: subagent.max_depth,
            default_max_turns: subagent.default_max_turns,
            output_max_size: subagent.output_max_size,
            summary: subagent.summary,
            max_executions: subagent.max_executions.unwrap_or(0),
            max_total_tokens: subagent.max_total_tokens.unwrap_or(0),
            max_total_time: subagent.max_total_time.map_or(0, |time| time.as_secs()),
            model: subagent.model.as_ref(),
            effort: subagent.effort,
            service: subagent.service,
        }
    }
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "AgentDelegation")]
struct DelegationView {
    max_depth: u8,
    parallel: bool,
    timeout: u64,
    max_concurrent: usize,
}

/// A parameter that is set; one that is not is left out, as it is on the wire.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "AgentParam")]
#[serde(untagged)]
enum ParamView<'a> {
    Number(f64),
    Count(u32),
    Texts(&'a [String]),
    Format {
        r#type: &'static str,
        #[serde(skip_serializing_if = "Option::is_none")]
        schema: Option<&'a RawValue>,
    },
    Object(&'a Map<String, Value>),
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "AgentLimits")]
struct LimitsView {
    max_turns: u32,
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "AgentBudget")]
struct BudgetView {
    max_tokens: u64,
    max_cost_usd: f64,
    max_tool_calls: u64,
    max_runs: u64,
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "AgentRetry")]
struct RetryView {
    max_retries: u32,
    backoff: Backoff,
    initial_delay_ms: u128,
    max_delay_ms: u128,
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "AgentMemory")]
struct MemoryView<'a> {
    enabled: bool,
    shared: bool,
    path: Option<&'a Path>,
    last_n: u32,
    max_entries: u32,
}

/// The address is without its query, which may hold a secret.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "AgentWebhook")]
struct WebhookView<'a> {
    url: String,
    secret_env: Option<&'a str>,
    events: &'a [String],
}

/// An MCP server without what may be a secret: arguments, variables, headers, and what follows a URL's path.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "AgentMcpServer")]
struct McpServerView<'a> {
    name: &'a str,
    transport: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    command: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    url: Option<&'a str>,
    tools: &'a [String],
    /// Seconds that one call may take.
    timeout: u64,
    /// Whether a run fails that begins without it.
    required: bool,
}

impl<'a> McpServerView<'a> {
    fn new(server: &'a McpServer) -> Self {
        let (command, url) = match &server.transport {
            McpTransport::Stdio { command, .. } => (Some(command.as_str()), None),
            McpTransport::StreamableHttp { url, .. } => (None, url.split(['?', '#']).next()),
        };
        Self {
            name: &server.name,
            transport: server.transport.name(),
            command,
            url,
            tools: &server.tools,
            timeout: server.timeout.as_secs(),
            required: server.required,
        }
    }
}

impl<'a> DefinitionView<'a> {
    fn new(agent: &'a Agent) -> Self {
        let delegation = &agent.delegation;
        Self {
            fallback_models: &agent.fallback_models,
            system_prompt: &agent.system_prompt,
            skill: agent.skill.as_deref(),
            files: &agent.files,
            workdir: agent.workdir.as_deref(),
            allowed_hosts: &agent.allowed_hosts,
            stream: agent.stream,
            timeout: agent.timeout.map_or(0, |timeout| timeout.as_secs()),
            approve: &agent.approve,
            approve_timeout: agent.approve_timeout.map_or(0, |time| time.as_secs()),
            sub_agents_config: DelegationView {
                max_depth: delegation.max_depth.unwrap_or(0),
                parallel: delegation.parallel,
                timeout: delegation.timeout.map_or(0, |timeout| timeout.as_secs()),
                max_concurrent: delegation.max_concurrent.unwrap_or(0),
            },
            effort: agent.params.effort,
            reasoning_summary: agent.params.reasoning_summary,
            cache: agent.params.cache,
            service: agent.params.service,
            allow_extra: &agent.allow_extra,
            allow_provider_keys: agent.allow_provider_keys,
            params: param_views(agent),
            limits: LimitsView {
                max_turns: agent.max_turns,
            },
            context: agent.context,
            budget: BudgetView {
                max_tokens: agent.budget.max_tokens.unwrap_or(0),
                max_cost_usd: agent.budget.max_cost.map_or(0.0, |cost| cost.to_usd()),
                max_tool_calls: agent.budget.max_tool_calls.unwrap_or(0),
                max_runs: agent.budget.max_runs.unwrap_or(0),
            },
            retry: RetryView {
                max_retries: agent.retry.max_retries,
                backoff: agent.retry.backoff,
                initial_delay_ms: agent.retry.initial_delay.as_millis(),
                max_delay_ms: agent.retry.max_delay.as_millis(),
            },
            memory: MemoryView {
                enabled: agent.memory.enabled,
                shared: agent.memory.shared,
                path: agent.memory.path.as_deref(),
                last_n: agent.memory.last_n,
                max_entries: agent.memory.max_entries,
            },
            subagent: agent.subagent.as_ref().map(SubagentView::from),
            webhook: agent.webhook.as_ref().map(|webhook| WebhookView {
                url: ssrf::redact_query(&webhook.url),
                secret_env: webhook.secret_env.as_deref(),
                events: &webhook.events,
            }),
            mcp_servers: agent.mcp_servers.iter().map(McpServerView::new).collect(),
        }
    }
}

fn param_views(agent: &Agent) -> BTreeMap<&'static str, ParamView<'_>> {
    let params = &agent.params;
    let format = match &params.response_format {
        ResponseFormat::Text => None,
        ResponseFormat::JsonObject => Some(ParamView::Format {
            r#type: "json_object",
            schema: None,
        }),
        ResponseFormat::JsonSchema(schema) => Some(ParamView::Format {
            r#type: "json_schema",
            schema: Some(schema),
        }),
    };
    let extra = Some(&params.extra).filter(|extra| !extra.is_empty());
    let stop = Some(params.stop.as_slice()).filter(|stop| !stop.is_empty());
    [
        ("temperature", params.temperature.map(ParamView::Number)),
        ("max_tokens", params.max_tokens.map(ParamView::Count)),
        ("top_p", params.top_p.map(ParamView::Number)),
        ("stop", stop.map(ParamView::Texts)),
        ("response_format", format),
        ("extra", extra.map(ParamView::Object)),
    ]
    .into_iter()
    .filter_map(|(name, param)| Some((name, param?)))
    .collect()
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::Arc;
    use std::time::Duration;

    use serde_json::value::RawValue;

    use super::{AgentBrief, AgentView, DefinitionView};
    use crate::catalog::{Entry, LoadError};
    use crate::domain::agent::Agent;
    use crate::domain::agent::params::Params;
    use crate::domain::agent::response_format::ResponseFormat;

    fn entry() -> Entry {
        let schema = RawValue::from_string(r#"{"type":"object"}"#.to_owned()).expect("JSON");
        let agent = Agent {
            name: "planner".to_owned(),
            version: "sha256:00".to_owned(),
            description: None,
            model: "openai/gpt".parse().expect("a model"),
            fallback_models: Vec::new(),
            system_prompt: "plan".to_owned(),
            skill: None,
            has_requested_skill: false,
            files: vec!["*.md".to_owned()],
            workdir: None,
            tools: Vec::new(),
            allowed_hosts: Vec::new(),
            sub_agents: vec!["reader".to_owned()],
            stream: false,
            timeout: Some(Duration::from_secs(60)),
            delegation: crate::domain::agent::Delegation::default(),
            params: Params {
                temperature: Some(0.0),
                response_format: ResponseFormat::JsonSchema(Arc::from(schema)),
                ..Params::default()
            },
            max_turns: 50,
            context: crate::domain::context::ContextSettings::default(),
            budget: crate::domain::agent::Budget::default(),
            retry: crate::domain::agent::Retry::default(),
            memory: crate::domain::agent::Memory::default(),
            subagent: None,
            ad_hoc: None,
            webhook: Some(crate::domain::webhook::Webhook {
                url: "https://hooks.example.com/axed?token=hush".to_owned(),
                secret_env: Some("HOOK_SECRET".to_owned()),
                events: Vec::new(),
            }),
            mcp_servers: Vec::new(),
            approve: Vec::new(),
            approve_timeout: None,
            allow_extra: Vec::new(),
            allow_provider_keys: false,
            given_keys: Vec::new(),
        };
        Entry {
            name: "planner".to_owned(),
            path: PathBuf::from("agents/planner.toml"),
            agent: Some(Arc::new(agent)),
            error: None,
            warnings: Vec::new(),
        }
    }

    #[test]
    fn a_definition_reads_like_its_file() {
        let entry = entry();
        let view = AgentView {
            brief: AgentBrief::new(&entry),
            definition: entry.agent.as_deref().map(DefinitionView::new),
        };
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
