//! Reads one agent file: strict keys, checked values, errors that name file, line, key and the nearest known key.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::value::RawValue;
use sha2::{Digest, Sha256};

use crate::catalog::LoadError;
use crate::catalog::context_files;
use crate::catalog::mcp_servers;
use crate::config::document::{self, Node, Value};
use crate::config::load::{check_variable_name, expand_home, home_dir};
use crate::config::table_reader::{self, MAX_COUNT, TableReader};
use crate::domain::agent::model_ref::ModelRef;
use crate::domain::agent::params::{Cache, Effort, Params, ReasoningSummary, check_extra};
use crate::domain::agent::response_format::ResponseFormat;
use crate::domain::agent::{
    Agent, BUILT_IN_TOOLS, Backoff, Budget, Delegation, HARD_MAX_DEPTH, MAX_TURNS, Memory, Retry,
    SubagentSettings, SummaryMode, is_agent_name,
};
use crate::domain::context::{ContextSettings, ContextStrategy};
use crate::domain::event::STORED_EVENT_NAMES;
use crate::domain::mcp::TOOL_NAME_SEPARATOR;
use crate::domain::service::Service;
use crate::domain::usage::Cost;
use crate::domain::webhook::Webhook;
use crate::ssrf;
use crate::validation;

/// Tools that the daemon offers by itself.
const IMPLICIT_TOOLS: [&str; 2] = ["call_agent", "subagent"];
/// Token and call limits above this are no limits.
const MAX_BUDGET: u64 = i64::MAX as u64;
/// Above what any run could cost, in USD.
const MAX_COST: f64 = 1e6;
/// The smallest bound on an unnamed agent's result, in bytes.
const MIN_OUTPUT_BYTES: u64 = 1024;
/// A smaller share of the window has no room for a summary.
const MIN_COMPACT_AT: f64 = 0.1;
/// The highest temperature that any service takes is far below.
const MAX_TEMPERATURE: f64 = 100.0;

/// The definition in these bytes of `<name>.toml`, with what is odd in it.
pub fn read(name: &str, path: &Path, bytes: &[u8]) -> Result<(Agent, Vec<String>), LoadError> {
    let file = path.display().to_string();
    let parse_error = |problems: &[document::Problem]| {
        let details = document::format_problems(problems, &file, "; ");
        LoadError::Invalid(format!(
            "failed to parse agent config \"{name}\": {details}"
        ))
    };
    let table = document::parse(bytes).map_err(|problems| parse_error(&problems))?;
    let (parsed, problems) =
        table_reader::read_table(table, |top| parse_agent(name, version(bytes), top));
    let (rule_violations, syntax_errors): (Vec<_>, Vec<_>) =
        problems.into_iter().partition(|it| it.is_rule_violation);
    if !syntax_errors.is_empty() {
        return Err(parse_error(&syntax_errors));
    }

    let missing = |key| LoadError::Invalid(format!("agent config missing required field: {key}"));
    let own_name = parsed.name.ok_or_else(|| missing("name"))?;
    let model = parsed.model.ok_or_else(|| missing("model"))?;
    let mut agent = parsed.agent;
    agent.model = model.parse()?;
    for model in &parsed.fallback_models {
        agent.fallback_models.push(model.parse()?);
    }
    if let Some(subagent) = parsed.subagent {
        agent.subagent = Some(SubagentSettings {
            model: subagent.model.as_deref().map(str::parse).transpose()?,
            ..subagent.settings
        });
    }
    if let Some(rule) = rule_violations.into_iter().next() {
        return Err(LoadError::Invalid(rule.text));
    }
    for tool in &agent.tools {
        check_tool(tool)?;
    }
    for tool in &agent.approve {
        check_approval(&agent, tool)?;
    }
    for pattern in &agent.files {
        context_files::check_glob(pattern).map_err(LoadError::Invalid)?;
    }
    let warnings = lint(&agent, &own_name);
    Ok((agent, warnings))
}

/// The version of a definition: the digest of its file's bytes.
pub fn version(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    let mut version = String::from("sha256:");
    for byte in digest.as_slice() {
        version.push_str(&format!("{byte:02x}"));
    }
    version
}

/// A definition with what is still to be checked about it, because its error has a place in the order.
struct ParsedAgent {
    name: Option<String>,
    model: Option<String>,
    fallback_models: Vec<String>,
    subagent: Option<ParsedSubagent>,
    agent: Agent,
}

fn parse_agent(stem: &str, version: String, top: &mut TableReader<'_>) -> ParsedAgent {
    let name = non_blank(top.text("name"));
    let model = non_blank(top.text("model"));
    let fallback_models = top.text_list("fallback_models").unwrap_or_default();
    let agent = Agent {
        name: stem.to_owned(),
        version,
        description: non_blank(top.text("description")),
        // Replaced once the shape is checked.
        model: ModelRef {
            provider: String::new(),
            model: String::new(),
        },
        fallback_models: Vec::new(),
        system_prompt: top.text("system_prompt").unwrap_or_default(),
        skill: non_blank(top.text("skill")),
        has_requested_skill: false,
        files: top.text_list("files").unwrap_or_default(),
        workdir: parse_path(top, "workdir"),
        tools: dedup(top.text_list("tools").unwrap_or_default()),
        allowed_hosts: parse_allowed_hosts(top),
        sub_agents: dedup(top.text_list("sub_agents").unwrap_or_default()),
        stream: top.flag("stream").unwrap_or(false),
        timeout: nonzero_seconds(top, "timeout"),
        delegation: top.nested("sub_agents_config", parse_delegation),
        params: Params {
            effort: top.one_of("effort", &Effort::ALL),
            reasoning_summary: top.one_of("reasoning_summary", &ReasoningSummary::ALL),
            cache: top.one_of("cache", &Cache::ALL).unwrap_or_default(),
            service: top.one_of("service", &Service::ALL),
            ..top.nested("params", parse_params)
        },
        allow_extra: parse_allow_extra(top),
        allow_provider_keys: top.flag("allow_provider_keys").unwrap_or(false),
        given_keys: Vec::new(),
        max_turns: top.nested("limits", |s| {
            parse_u32(s, "max_turns", 1, MAX_TURNS).unwrap_or(MAX_TURNS)
        }),
        context: top.nested("context", parse_context),
        budget: top.nested("budget", parse_budget),
        retry: top.nested("retry", parse_retry),
        memory: top.nested("memory", parse_memory),
        subagent: None,
        ad_hoc: None,
        webhook: top.nested("webhook", parse_webhook),
        mcp_servers: mcp_servers::read(top),
        approve: dedup(top.text_list("approve").unwrap_or_default()),
        approve_timeout: nonzero_seconds(top, "approve_timeout"),
    };
    let subagent = top.nested("subagent", parse_subagent);
    ParsedAgent {
        name,
        model,
        fallback_models,
        subagent,
        agent,
    }
}

fn parse_delegation(s: &mut TableReader<'_>) -> Delegation {
    let depth = s.integer("max_depth", 0..=u64::from(HARD_MAX_DEPTH));
    Delegation {
        max_depth: depth.and_then(|depth| u8::try_from(depth).ok().filter(|depth| *depth > 0)),
        parallel: s.flag("parallel").unwrap_or(true),
        timeout: nonzero_seconds(s, "timeout"),
        max_concurrent: s.count("max_concurrent", 0).filter(|count| *count > 0),
    }
}

/// `[subagent]`: nothing unless it is turned on.
fn parse_subagent(s: &mut TableReader<'_>) -> Option<ParsedSubagent> {
    let defaults = SubagentSettings::default();
    let limit = |s: &mut TableReader<'_>, key| s.integer(key, 0..=MAX_BUDGET).filter(|n| *n > 0);
    let summaries = [
        ("on_request", SummaryMode::OnRequest),
        ("always", SummaryMode::Always),
    ];
    let is_on = s.flag("enabled").unwrap_or(false);
    let depth = parse_u32(s, "max_depth", 1, u32::from(HARD_MAX_DEPTH));
    let size = s.integer("output_max_size", MIN_OUTPUT_BYTES..=MAX_COUNT);
    let parsed = ParsedSubagent {
        model: non_blank(s.text("model")),
        settings: SubagentSettings {
            max_depth: depth
                .and_then(|depth| u8::try_from(depth).ok())
                .unwrap_or(defaults.max_depth),
            default_max_turns: parse_u32(s, "default_max_turns", 1, MAX_TURNS)
                .unwrap_or(defaults.default_max_turns),
            output_max_size: size
                .and_then(|size| usize::try_from(size).ok())
                .unwrap_or(defaults.output_max_size),
            summary: s.one_of("summary", &summaries).unwrap_or_default(),
            max_executions: limit(s, "max_executions"),
            max_total_tokens: limit(s, "max_total_tokens"),
            max_total_time: nonzero_seconds(s, "max_total_time"),
            model: None,
            effort: s.one_of("effort", &Effort::ALL),
            service: s.one_of("service", &Service::ALL),
        },
    };
    is_on.then_some(parsed)
}

/// `[subagent]` with the model whose shape is still to be checked.
struct ParsedSubagent {
    model: Option<String>,
    settings: SubagentSettings,
}

fn parse_params(s: &mut TableReader<'_>) -> Params {
    // Where a request has some of them.
    for key in ["effort", "service", "cache", "reasoning_summary"] {
        s.misplaced(key, "at the top of the file, above its first [table]");
    }
    Params {
        temperature: s.number("temperature", 0.0..=MAX_TEMPERATURE),
        max_tokens: parse_u32(s, "max_tokens", 1, u32::MAX),
        top_p: s.number("top_p", 0.0..=1.0),
        stop: s.text_list("stop").unwrap_or_default(),
        response_format: s.nested("response_format", parse_response_format),
        effort: None,
        reasoning_summary: None,
        cache: Cache::default(),
        service: None,
        extra: s.json_table("extra", check_extra).unwrap_or_default(),
    }
}

fn parse_response_format(s: &mut TableReader<'_>) -> ResponseFormat {
    #[derive(Clone, Copy, PartialEq)]
    enum Kind {
        Text,
        JsonObject,
        JsonSchema,
    }
    let kinds = [
        ("text", Kind::Text),
        ("json_object", Kind::JsonObject),
        ("json_schema", Kind::JsonSchema),
    ];
    let kind = s.one_of("type", &kinds).unwrap_or(Kind::Text);
    let Some(node) = s.take_node("schema") else {
        if kind == Kind::JsonSchema {
            s.push_missing("schema", "is required when type is json_schema");
        }
        return match kind {
            Kind::JsonObject => ResponseFormat::JsonObject,
            _ => ResponseFormat::Text,
        };
    };
    if kind != Kind::JsonSchema {
        s.push_invalid(&node, "schema", "is only for type = \"json_schema\"");
    }
    match schema(&node) {
        Ok(schema) => ResponseFormat::JsonSchema(schema),
        Err(why) => {
            s.push_invalid(&node, "schema", &why);
            ResponseFormat::Text
        }
    }
}

/// A JSON Schema, written as a table or as JSON text.
fn schema(node: &Node) -> Result<Arc<RawValue>, String> {
    let schema = match &node.value {
        Value::Table(_) => table_reader::to_json(node),
        Value::String(text) => {
            serde_json::from_str(text).map_err(|error| format!("is text, but no JSON: {error}"))?
        }
        _ => return Err("must be a table, or JSON text".to_owned()),
    };
    if !schema.is_object() {
        return Err("must be a JSON object".to_owned());
    }
    let raw = serde_json::value::to_raw_value(&schema).map_err(|error| error.to_string())?;
    let schema = validation::compile_schema_blocking(Arc::from(raw))
        .map_err(|why| format!("is no JSON Schema: {why}"))?;
    Ok(Arc::clone(schema.raw()))
}

fn parse_context(s: &mut TableReader<'_>) -> ContextSettings {
    let defaults = ContextSettings::default();
    let compact_at = s.number("compact_at", MIN_COMPACT_AT..=1.0);
    ContextSettings {
        compact_at: compact_at.unwrap_or(defaults.compact_at),
        strategy: s
            .one_of("strategy", &ContextStrategy::ALL)
            .unwrap_or_default(),
        recall: s.flag("recall").unwrap_or(defaults.recall),
    }
}

fn parse_budget(s: &mut TableReader<'_>) -> Budget {
    let limit = |s: &mut TableReader<'_>, key| s.integer(key, 0..=MAX_BUDGET).filter(|n| *n > 0);
    let cost = s.number("max_cost_usd", 0.0..=MAX_COST);
    Budget {
        max_tokens: limit(s, "max_tokens"),
        max_cost: cost.filter(|usd| *usd > 0.0).map(Cost::from_usd),
        max_tool_calls: limit(s, "max_tool_calls"),
        max_runs: limit(s, "max_runs"),
    }
}

fn parse_retry(s: &mut TableReader<'_>) -> Retry {
    let defaults = Retry::default();
    let backoffs = [
        ("exponential", Backoff::Exponential),
        ("linear", Backoff::Linear),
        ("fixed", Backoff::Fixed),
    ];
    let delay =
        |s: &mut TableReader<'_>, key| s.integer(key, 0..=MAX_COUNT).map(Duration::from_millis);
    Retry {
        max_retries: parse_u32(s, "max_retries", 0, u32::MAX).unwrap_or(defaults.max_retries),
        backoff: s.one_of("backoff", &backoffs).unwrap_or_default(),
        initial_delay: delay(s, "initial_delay_ms").unwrap_or(defaults.initial_delay),
        max_delay: delay(s, "max_delay_ms").unwrap_or(defaults.max_delay),
    }
}

fn parse_memory(s: &mut TableReader<'_>) -> Memory {
    let usual = Memory::default();
    Memory {
        enabled: s.flag("enabled").unwrap_or(usual.enabled),
        shared: s.flag("shared").unwrap_or(usual.shared),
        path: parse_path(s, "path"),
        last_n: parse_u32(s, "last_n", 0, u32::MAX).unwrap_or(usual.last_n),
        max_entries: parse_u32(s, "max_entries", 0, u32::MAX).unwrap_or(usual.max_entries),
    }
}

/// None where the section is empty.
fn parse_webhook(s: &mut TableReader<'_>) -> Option<Webhook> {
    let events = s.peek("events");
    let event_names = s.text_list("events").unwrap_or_default();
    if let Some(unknown) = event_names
        .iter()
        .find(|name| !STORED_EVENT_NAMES.contains(&name.as_str()))
        && let Some(node) = &events
    {
        let known = STORED_EVENT_NAMES.join(", ");
        s.push_invalid(
            node,
            "events",
            &format!("has {unknown:?}, which is none of: {known}"),
        );
    }
    let secret_env = s.parsed_text("secret_env", check_variable_name);
    if s.peek("url").is_none() && (events.is_some() || secret_env.is_some()) {
        s.push_missing("url", "is required");
    }
    let url = s.parsed_text("url", |text| ssrf::parse_url(text).map(String::from))?;
    Some(Webhook {
        url,
        secret_env,
        events: dedup(event_names),
    })
}

/// The keys of `extra` that a request may set: none that are axed's own.
fn parse_allow_extra(s: &mut TableReader<'_>) -> Vec<String> {
    let node = s.peek("allow_extra");
    let patterns = dedup(s.text_list("allow_extra").unwrap_or_default());
    let extra = patterns
        .iter()
        .map(|key| (key.clone(), serde_json::Value::Null))
        .collect();
    if let (Err(why), Some(node)) = (check_extra(&extra), &node) {
        s.push_invalid(node, "allow_extra", &why);
    }
    patterns
}

/// The hosts that `url_fetch` may ask.
fn parse_allowed_hosts(s: &mut TableReader<'_>) -> Vec<String> {
    let node = s.peek("allowed_hosts");
    let named = s.text_list("allowed_hosts").unwrap_or_default();
    let hosts: Result<Vec<_>, _> = named
        .iter()
        .map(|it| ssrf::parse_host_pattern(it))
        .collect();
    if let (Err(why), Some(node)) = (&hosts, &node) {
        s.push_invalid(node, "allowed_hosts", why);
    }
    dedup(hosts.unwrap_or_default())
}

fn check_tool(tool: &str) -> Result<(), LoadError> {
    if IMPLICIT_TOOLS.contains(&tool) {
        return Err(LoadError::Invalid(format!(
            "tool \"{tool}\" cannot be named in tools config: it is offered when sub_agents or [subagent] asks for it"
        )));
    }
    if !BUILT_IN_TOOLS.contains(&tool) {
        let text = format!("unknown tool \"{tool}\" in tools config");
        return Err(LoadError::Invalid(text));
    }
    Ok(())
}

/// A tool that nobody would ever be asked about is a slip of the pen, and a dangerous one.
fn check_approval(agent: &Agent, tool: &str) -> Result<(), LoadError> {
    let is_available = match tool {
        "call_agent" => !agent.sub_agents.is_empty(),
        "subagent" => agent.subagent.is_some(),
        "recall" => agent.context.recall,
        _ => match tool.split_once(TOOL_NAME_SEPARATOR) {
            Some((server_name, name)) => {
                let mut servers = agent.mcp_servers.iter();
                let is_named = |listed: &String| listed == name;
                servers.any(|server| {
                    let is_listed = server.tools.is_empty() || server.tools.iter().any(is_named);
                    server.name == server_name && !name.is_empty() && is_listed
                })
            }
            None => agent.tools.iter().any(|listed| listed == tool),
        },
    };
    if is_available {
        return Ok(());
    }
    Err(LoadError::Invalid(format!(
        "approve names \"{tool}\", which this agent does not have: name a tool of its tools list, call_agent (with \
         sub_agents), subagent (where it is enabled), or <server>__<tool> of one of its mcp_servers"
    )))
}

/// What is odd in a definition without being wrong.
fn lint(agent: &Agent, own_name: &str) -> Vec<String> {
    let mut oddities = Vec::new();
    if own_name != agent.name {
        oddities.push(format!(
            "name is \"{own_name}\", but the file makes it \"{}\"",
            agent.name
        ));
    }
    for sub_agent in agent.sub_agents.iter().filter(|name| !is_agent_name(name)) {
        oddities.push(format!(
            "sub_agents names \"{sub_agent}\", which no agent can be called"
        ));
    }
    for pattern in agent
        .files
        .iter()
        .filter(|it| context_files::is_outside_workdir(it))
    {
        oddities.push(format!(
            "files has \"{pattern}\", which leads out of the workdir and matches nothing"
        ));
    }
    oddities
}

/// A text that is not blank.
fn non_blank(text: Option<String>) -> Option<String> {
    text.filter(|text| !text.trim().is_empty())
}

/// A path; `~` is the home of the daemon's user.
fn parse_path(s: &mut TableReader<'_>, key: &'static str) -> Option<PathBuf> {
    non_blank(s.text(key)).map(|text| expand_home(&text, home_dir().as_deref()))
}

/// A time in seconds, where 0 means that none is set.
fn nonzero_seconds(s: &mut TableReader<'_>, key: &'static str) -> Option<Duration> {
    s.seconds(key, 0).filter(|time| !time.is_zero())
}

fn parse_u32(s: &mut TableReader<'_>, key: &'static str, min: u32, max: u32) -> Option<u32> {
    let number = s.integer(key, u64::from(min)..=u64::from(max))?;
    u32::try_from(number).ok()
}

/// Every text once, in the order of its first place.
fn dedup(texts: Vec<String>) -> Vec<String> {
    let mut seen = std::collections::BTreeSet::new();
    let is_new = |text: &String| seen.insert(text.clone());
    texts.into_iter().filter(is_new).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::read;
    use crate::catalog::LoadError;
    use crate::domain::agent::Agent;
    use crate::domain::agent::response_format::ResponseFormat;

    fn agent(text: &str) -> Agent {
        let text = format!("name = \"x\"\nmodel = \"p/m\"\n{text}");
        let read = read("x", Path::new("agents/x.toml"), text.as_bytes());
        read.expect("an agent").0
    }

    fn whole_error(text: &str) -> String {
        let read = read("x", Path::new("agents/x.toml"), text.as_bytes());
        read.expect_err("an error").to_string()
    }

    fn error(text: &str) -> String {
        whole_error(&format!("name = \"x\"\nmodel = \"p/m\"\n{text}"))
    }

    #[test]
    fn the_texts_are_the_contracts() {
        for (text, expected) in [
            (
                "model = \"p/m\"",
                "agent config missing required field: name",
            ),
            (
                "name = \" \"\nmodel = \"p/m\"",
                "agent config missing required field: name",
            ),
            ("", "agent config missing required field: name"),
            ("name = \"x\"", "agent config missing required field: model"),
            (
                "name = \"x\"\nmodel = \"gpt\"",
                "invalid model format \"gpt\": expected provider/model-name",
            ),
            (
                "name = \"x\"\nmodel = \"/gpt\"",
                "invalid model format \"/gpt\": empty provider",
            ),
            (
                "name = \"x\"\nmodel = \"p/\"",
                "invalid model format \"p/\": empty model name",
            ),
        ] {
            assert_eq!(whole_error(text), expected);
        }
        for (text, expected) in [
            (
                "fallback_models = [\"a/b\", \"c\"]",
                "invalid model format \"c\": expected provider/model-name",
            ),
            (
                "[sub_agents_config]\nmax_depth = -1",
                "sub_agents_config.max_depth must be non-negative",
            ),
            (
                "[sub_agents_config]\nmax_depth = 6",
                "sub_agents_config.max_depth cannot exceed 5",
            ),
            (
                "[sub_agents_config]\ntimeout = -1",
                "sub_agents_config.timeout must be non-negative",
            ),
            (
                "[memory]\nlast_n = -1",
                "memory.last_n must be non-negative",
            ),
            (
                "[memory]\nmax_entries = -1",
                "memory.max_entries must be non-negative",
            ),
            ("timeout = -1", "timeout must be non-negative"),
            (
                "tools = [\"hammer\"]",
                "unknown tool \"hammer\" in tools config",
            ),
            (
                "[webhook]\nurl = \"ftp://a\"",
                "webhook.url must begin with https://",
            ),
            ("[webhook]\nevents = []", "webhook.url is required"),
            (
                "[webhook]\nurl = \"https://a\"\nsecret_env = \"whsec_A=\"",
                "webhook.secret_env must be the name of an environment variable, and not the secret itself",
            ),
            (
                "[retry]\nbackoff = \"none\"",
                "retry.backoff must be one of: exponential, linear, fixed",
            ),
            (
                "[retry]\nmax_retries = -2",
                "retry.max_retries must be non-negative",
            ),
            (
                "[budget]\nmax_tokens = -1",
                "budget.max_tokens must be non-negative",
            ),
            (
                "[budget]\nmax_cost_usd = -0.5",
                "budget.max_cost_usd must be non-negative",
            ),
            (
                "[limits]\nmax_turns = 0",
                "limits.max_turns must be at least 1",
            ),
            (
                "[limits]\nmax_turns = 51",
                "limits.max_turns cannot exceed 50",
            ),
            (
                "[context]\ncompact_at = 0.05",
                "context.compact_at must be at least 0.1",
            ),
            (
                "[context]\nstrategy = \"forget\"",
                "context.strategy must be one of: compact, drop_tool_results, fail",
            ),
            (
                "[params]\ntemperature = -0.1",
                "params.temperature must be non-negative",
            ),
            ("[params]\ntop_p = 1.5", "params.top_p cannot exceed 1"),
            (
                "[params]\nmax_tokens = 0",
                "params.max_tokens must be at least 1",
            ),
            (
                "[params]\ntemperature = nan",
                "params.temperature must be a finite number",
            ),
            (
                "[params.response_format]\ntype = \"json_schema\"",
                "params.response_format.schema is required when type is json_schema",
            ),
            (
                "[params.response_format]\ntype = \"yaml\"",
                "params.response_format.type must be one of: text, json_object, json_schema",
            ),
            (
                "files = [\"[\"]",
                "invalid glob pattern \"[\": unclosed character class; missing ']'",
            ),
        ] {
            assert_eq!(error(text), expected);
        }
        assert!(
            error("tools = [\"call_agent\"]").starts_with("tool \"call_agent\" cannot be named")
        );
        let shape = read("x", Path::new("x.toml"), b"name = \"x\"\nmodel = \"gpt\"");
        assert!(matches!(shape, Err(LoadError::Model(_))));
    }

    #[test]
    fn other_errors_name_file_line_key_and_the_nearest_key() {
        assert_eq!(
            whole_error("name = \"x\"\n\nmodle = \"p/m\"\n"),
            "failed to parse agent config \"x\": agents/x.toml:3:1: unknown key \"modle\"; did you mean \"model\"?"
        );
        // As in a request.
        assert_eq!(
            error("[params]\neffort = \"low\""),
            "failed to parse agent config \"x\": agents/x.toml:4:1: params.effort belongs at the top of the file, \
             above its first [table]"
        );
        assert_eq!(
            error("[params]\nstop = \"x\"\n[memory]\nlastn = 3"),
            "failed to parse agent config \"x\": agents/x.toml:4:1: params.stop must be a list of strings, not a string; \
             agents/x.toml:6:1: unknown key \"memory.lastn\"; did you mean \"memory.last_n\"?"
        );
        assert!(
            error("timeout = ").starts_with("failed to parse agent config \"x\": agents/x.toml:3:")
        );
    }

    #[test]
    fn disabled_sections_may_be_present() {
        let off = agent(
            "approve = []\napprove_timeout = 3\nallowed_hosts = []\nmcp_servers = []\n[subagent]\nenabled = false\n\
             max_depth = 2\n[webhook]",
        );
        assert!(off.subagent.is_none() && off.webhook.is_none());
    }

    #[test]
    fn approve_lists_only_available_tools() {
        let server = "[[mcp_servers]]\nname = \"fs\"\ntransport = \"stdio\"\ncommand = \"x\"\ntools = [\"ls\"]\n";
        let read = agent(&format!(
            "tools = [\"grep\"]\nsub_agents = [\"a\"]\napprove_timeout = 5\n\
             approve = [\"grep\", \"call_agent\", \"fs__ls\", \"grep\"]\n{server}"
        ));
        assert_eq!(read.approve, ["grep", "call_agent", "fs__ls"]);
        assert_eq!(
            read.approve_timeout,
            Some(std::time::Duration::from_secs(5))
        );
        for wrong in [
            "grpe",
            "read_file",
            "subagent",
            "fs__rm",
            "other__ls",
            "fs__",
            "",
        ] {
            let message = error(&format!(
                "tools = [\"grep\"]\nsub_agents = [\"a\"]\napprove = [{wrong:?}]\n{server}"
            ));
            let expected = format!("approve names {wrong:?}, which this agent does not have");
            assert!(message.starts_with(&expected), "{message}");
        }
    }

    #[test]
    fn zero_means_unset_and_duplicates_are_folded() {
        let agent = agent(
            "timeout = 0\nsub_agents = [\"b\", \"a\", \"b\"]\n[sub_agents_config]\nmax_depth = 0\ntimeout = 0\n\
             max_concurrent = 0\n[budget]\nmax_tokens = 0\nmax_cost_usd = 0\n[params]\ntemperature = 0\n",
        );
        assert_eq!(agent.timeout, None);
        assert_eq!(agent.sub_agents, ["b", "a"]);
        assert_eq!(agent.delegation, Default::default());
        assert_eq!(agent.budget, Default::default());
        assert_eq!(agent.params.temperature, Some(0.0));
        assert_eq!(agent.max_turns, 50);
    }

    #[test]
    fn a_schema_is_a_table_or_json_text() {
        let raw = |text: &str| match agent(text).params.response_format {
            ResponseFormat::JsonSchema(schema) => schema.get().to_owned(),
            other => panic!("{other:?}"),
        };
        let head = "[params.response_format]\ntype = \"json_schema\"\n";
        assert_eq!(
            raw(&format!(
                "{head}schema = {{ type = \"object\", required = [\"b\"], minProperties = 1 }}"
            )),
            r#"{"type":"object","required":["b"],"minProperties":1}"#
        );
        assert_eq!(
            raw(&format!("{head}schema = '{{\"type\": \"object\"}}'")),
            r#"{"type":"object"}"#
        );
        let wrong = error(&format!("{head}schema = 'nonsense'"));
        assert!(
            wrong.starts_with("params.response_format.schema is text, but no JSON"),
            "{wrong}"
        );
    }

    #[test]
    fn a_mismatch_of_names_is_a_warning_and_the_file_wins() {
        let text = b"name = \"y\"\nmodel = \"p/m\"\nsub_agents = [\"../z\"]\nfiles = [\"../*\"]";
        let (agent, warnings) = read("x", Path::new("x.toml"), text).expect("an agent");
        assert_eq!(agent.name, "x");
        assert_eq!(warnings.len(), 3);
        assert!(agent.version.starts_with("sha256:") && agent.version.len() == 7 + 64);
    }
}
