//! Finds what would go wrong in runs of the agents on this server: what they name and the server does not have. Blocking
//! I/O with a limit.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;

use crate::catalog::reload::Catalog;
use crate::catalog::{Agents, context_files, prompt, skills};
use crate::config::environment::{Environment, is_program};
use crate::config::models::lookup::{self, Models};
use crate::config::secrets::{is_process_secret_set, is_secret_set};
use crate::config::{ClientKey, Config, Webhooks};
use crate::domain::agent::model_ref::ModelRef;
use crate::domain::agent::params::Params;
use crate::domain::agent::{Agent, BUILT_IN_TOOLS, is_agent_name};
use crate::domain::mcp::{McpServer, McpTransport, Template};
use crate::domain::node::describe_labels;
use crate::domain::period_budget::PeriodLimit;
use crate::domain::scorer::{Scorer, ScorerKind};
use crate::domain::skill;
use crate::engine::blocking::run_blocking;
use crate::engine::recording::assertions::Assertions;
use crate::providers::registry::{ProviderRegistry, ProviderUnavailable};
use crate::settings::document::{Problem, ProblemKind};
use crate::settings::positions::{Positions, item};
use crate::settings::suggestion::did_you_mean;
use crate::ssrf::{self, SsrfGuard};
use crate::tools::mcp::oauth::logins::LoginId;
use crate::tools::mcp::oauth::logins::store::LoginStore;
use crate::tools::registry::ToolRegistry;
use crate::tools::{shell, web};
use crate::workdirs::registry::{OpenError, Workdirs};
use crate::workdirs::workdir::Workdir;

/// Directory entries that the globs of all agents may visit in one check. Globs beyond it are not checked.
const MAX_VISITS: usize = 50_000;

/// How long a request waits for a new check. Later, it gets the result of the last one.
const INSPECTION_TIMEOUT: Duration = Duration::from_secs(2);

/// The agents, with the warnings that hold now: files that they name can come and go without a reload. At most one check
/// runs at a time.
pub async fn inspected_agents(catalog: &Arc<Catalog>) -> Arc<Agents> {
    let inspected = Arc::clone(catalog);
    let inspection = run_blocking(move || inspected.refresh_warnings());
    // If the disk is slow, the check ends later, for the next request.
    let _ = tokio::time::timeout(INSPECTION_TIMEOUT, inspection).await;
    catalog.current()
}

/// What this server offers to agents.
pub struct AgentCheck {
    /// By name.
    providers: BTreeMap<String, ProviderState>,
    supported_providers: String,
    models: Models,
    /// The labels of this daemon; `None` if other nodes may have others.
    node_labels: Option<Vec<String>>,
    /// `[runs] max_tree`
    max_tree: usize,
    /// `[server] max_timeout`
    max_timeout: Duration,
    /// The built-in tools that are not offered, with the reason or what to do.
    missing_tools: BTreeMap<&'static str, String>,
    /// The tools that work in a workdir.
    workdir_tools: Vec<&'static str>,
    is_sandboxed: bool,
    workdirs: Arc<Workdirs>,
    config_dir: PathBuf,
    environment: Environment,
    logins: LoginStore,
    webhooks: Webhooks,
    /// The keys of clients.
    keys: Vec<Arc<ClientKey>>,
    /// The budgets over time in USD, each with the agent that its roots must be of.
    usd_budgets: Vec<(String, Option<String>)>,
}

struct ProviderState {
    /// Why it cannot take requests.
    unavailable: Option<ProviderUnavailable>,
    is_free: bool,
    /// Its only models, if they are known.
    models: Option<Vec<String>>,
}

impl AgentCheck {
    pub fn new(
        config: &Config,
        providers: &ProviderRegistry,
        tool_registry: &ToolRegistry,
        workdirs: &Arc<Workdirs>,
        environment: Environment,
    ) -> Self {
        let state = |name: &str| {
            let state = match providers.get(name) {
                Ok(handle) => ProviderState {
                    unavailable: None,
                    is_free: handle.is_free,
                    models: handle.provider.model_names(),
                },
                Err(why) => ProviderState {
                    unavailable: Some(why),
                    is_free: false,
                    models: None,
                },
            };
            (name.to_owned(), state)
        };
        let missing = BUILT_IN_TOOLS.iter().copied();
        let missing = missing.filter(|tool| tool_registry.get(tool).is_none());
        let tools = BUILT_IN_TOOLS.iter().copied();
        Self {
            providers: providers.names().map(state).collect(),
            supported_providers: providers.supported_names(),
            models: config.models.clone(),
            node_labels: (config.data.url.is_none()).then(|| config.data.cluster.labels.clone()),
            max_tree: config.runs.max_tree,
            max_timeout: config.server.max_timeout,
            missing_tools: missing
                .map(|tool| (tool, missing_tool(tool, tool_registry)))
                .collect(),
            workdir_tools: tools
                .filter(|tool| tool_registry.uses_workdir(tool))
                .collect(),
            is_sandboxed: tool_registry.is_sandboxed(),
            workdirs: Arc::clone(workdirs),
            config_dir: config.config_dir.clone(),
            logins: LoginStore::new(&config.logins, environment.clone()),
            environment,
            webhooks: config.webhooks.clone(),
            keys: config.auth.keys.clone(),
            usd_budgets: (config.budgets.iter())
                .filter(|budget| matches!(budget.limit, PeriodLimit::Usd(_)))
                .map(|budget| (budget.name.clone(), budget.agent.clone()))
                .collect(),
        }
    }

    /// The problems of all current definitions, by agent; for an invalid file without a definition, those of what it has
    /// beside its errors.
    pub fn check(&self, agents: &Agents) -> BTreeMap<String, Vec<Problem>> {
        let mut visits = MAX_VISITS;
        let mut problems = BTreeMap::new();
        let defined = agents.entries.values().filter_map(|it| it.agent.as_deref());
        let with_files = defined.filter(|agent| self.uses_files(agent));
        let agent_workdirs = with_files.map(|agent| agent.workdir.as_deref());
        let workdirs = self.workdirs.with_agent_workdirs(agent_workdirs);
        for (name, entry) in &agents.entries {
            let (agent, positions) = match (&entry.agent, &entry.draft) {
                (Some(agent), _) => (&**agent, &*entry.positions),
                (None, Some(draft)) => (&draft.agent, &draft.positions),
                (None, None) => continue,
            };
            let mut check = EntryCheck {
                server: self,
                workdirs: &workdirs,
                agents,
                positions,
                agent,
                problems: Vec::new(),
            };
            check.run(&mut visits);
            // A value that is invalid itself is reported once.
            let is_new =
                |found: &Problem| !entry.problems.iter().any(|it| it.origin == found.origin);
            check
                .problems
                .retain(|found| entry.agent.is_some() || is_new(found));
            problems.insert(name.clone(), check.problems);
        }
        problems
    }

    fn uses_files(&self, agent: &Agent) -> bool {
        let mut tools = agent.tools.iter().map(String::as_str);
        !agent.files.is_empty() || tools.any(|tool| self.workdir_tools.contains(&tool))
    }
}

/// Whether an agent has instructions of its own.
fn has_prompt(agent: &Agent) -> bool {
    !agent.system_prompt.trim().is_empty() || agent.skill.is_some()
}

/// Why the server does not offer the tool, and how it would.
fn missing_tool(tool: &str, tool_registry: &ToolRegistry) -> String {
    let advice = match (tool, tool_registry.commands_disabled_reason()) {
        (shell::tool::NAME, Some(reason)) => return reason.to_owned(),
        (shell::tool::NAME, None) => "set allow_commands = true in [tools]",
        (web::search::NAME, _) => "configure a search service in [tools.web_search]",
        _ => "remove it",
    };
    format!(
        "tools lists {tool}, which this server does not offer; {advice} of the server's configuration"
    )
}

/// The check of one agent.
struct EntryCheck<'a> {
    server: &'a AgentCheck,
    /// As the runs of these agents see them.
    workdirs: &'a Workdirs,
    agents: &'a Agents,
    positions: &'a Positions,
    agent: &'a Agent,
    problems: Vec<Problem>,
}

impl EntryCheck<'_> {
    fn run(&mut self, visits: &mut usize) {
        for (path, model) in models(self.agent) {
            self.check_model(&path, model);
        }
        self.check_prices();
        self.check_limits();
        self.check_sub_agents();
        self.check_node();
        for tool in &self.agent.tools {
            if let Some(text) = self.server.missing_tools.get(tool.as_str()) {
                self.warn(&item("tools", tool), text.clone());
            }
        }
        self.check_skill();
        self.check_skills();
        self.check_files(visits);
        for (index, server) in self.agent.mcp_servers.iter().enumerate() {
            self.check_mcp_server(&format!("mcp_servers[{index}]"), server);
        }
        let mut tables = BTreeSet::new();
        for tool in &self.agent.http_tools {
            // The operations of a document share their table's headers.
            if !tables.insert(tool.table) {
                continue;
            }
            let path = format!("http_tools[{}].headers", tool.table);
            self.check_variables(&path, &format!("tool {}", tool.name), &tool.headers);
        }
        self.check_webhook();
        for (index, schedule) in self.agent.schedules.iter().enumerate() {
            self.check_key(&format!("schedules[{index}].key"), schedule.key.as_deref());
        }
        for (index, scorer) in self.agent.scorers.iter().enumerate() {
            self.check_scorer(&format!("scorers[{index}]"), scorer);
        }
        for (index, trigger) in self.agent.triggers.iter().enumerate() {
            self.check_key(&format!("triggers[{index}].key"), trigger.key.as_deref());
            let variable = &trigger.secret_env;
            if !is_secret_set(&self.server.environment, variable) {
                let text = format!(
                    "the environment variable {variable} with the secret of trigger {} is not set, so that its events are refused",
                    trigger.name
                );
                self.warn(&format!("triggers[{index}].secret_env"), text);
            }
        }
    }

    fn warn(&mut self, path: &str, text: String) {
        self.warn_with_hint(path, text, None);
    }

    fn error(&mut self, path: &str, text: String) {
        let problem = self.positions.problem(path, text, ProblemKind::Unusable);
        self.problems.push(problem);
    }

    fn warn_with_hint(&mut self, path: &str, text: String, hint: Option<String>) {
        let problem = self.positions.warning(path, text);
        self.problems.push(problem.with_hint(hint));
    }

    fn check_model(&mut self, path: &str, model: &ModelRef) {
        let ModelRef {
            provider,
            model: name,
        } = model;
        let Some(state) = self.server.providers.get(provider) else {
            let supported = &self.server.supported_providers;
            let text = format!(
                "{}: unsupported provider \"{provider}\": supported providers are {supported}",
                key_of(path)
            );
            let known = self.server.providers.keys().map(String::as_str);
            let problem = self.positions.problem(path, text, ProblemKind::Unusable);
            self.problems
                .push(problem.with_hint(did_you_mean(provider, known)));
            return;
        };
        let is_given = self.agent.allow_provider_keys
            && matches!(
                state.unavailable,
                Some(ProviderUnavailable::MissingKey { .. })
            );
        if let (Some(why), false) = (&state.unavailable, is_given) {
            self.warn(path, format!("{}: {why}", key_of(path)));
        }
        let known = state.models.iter().flatten();
        if state.models.is_some() && !known.clone().any(|known| known == name) {
            let names: Vec<&str> = known.map(String::as_str).collect();
            let text = format!("{}: there is no script for {model}", key_of(path));
            let hint = did_you_mean(name, names.iter().copied()).unwrap_or_else(|| {
                match names.is_empty() {
                    true => format!("set [providers.{provider}] scripts in the configuration"),
                    false => format!("scripts exist for {}", names.join(", ")),
                }
            });
            self.warn_with_hint(path, text, Some(hint));
        }
        let facts = self.server.models.get(provider, name);
        let end = facts.and_then(|it| it.end_warning(provider, name, lookup::today()));
        if let Some(text) = end {
            self.warn(path, format!("{}: {text}", key_of(path)));
        }
    }

    /// Models without a price, if costs are limited: nothing is counted for them.
    fn check_prices(&mut self) {
        let holds = |(_, agent): &&(String, Option<String>)| {
            agent.as_deref().is_none_or(|it| it == self.agent.name)
        };
        let in_usd = self.server.usd_budgets.iter().filter(holds);
        let in_usd: Vec<&str> = in_usd.map(|(name, _)| name.as_str()).collect();
        let (path, counted_in) = match (self.agent.budget.max_cost, in_usd.is_empty()) {
            (Some(_), _) => (
                "budget.max_cost_usd",
                "budget.max_cost_usd is set".to_owned(),
            ),
            (None, false) => (
                "model",
                format!("[budgets] {} counts in USD", in_usd.join(", ")),
            ),
            (None, true) => return,
        };
        let entries = &self.agents.entries;
        let sub_agents = self.agent.sub_agents.iter();
        let sub_agents =
            sub_agents.filter_map(|name| entries.get(name).and_then(|it| it.agent.as_ref()));
        let is_unpriced = |(model, params): &(&ModelRef, &Params)| {
            let provider = self.server.providers.get(&model.provider);
            provider.is_some_and(|it| !it.is_free) && !self.server.models.is_priced(model, params)
        };
        let all = std::iter::once(self.agent).chain(sub_agents.map(|agent| &**agent));
        let all = all.flat_map(|agent| {
            let models = models(agent).into_iter();
            models.map(|(_, model)| (model, &agent.params))
        });
        let unpriced = all.filter(is_unpriced).map(|(model, _)| model);
        let mut unpriced: Vec<&ModelRef> = unpriced.collect();
        unpriced.sort_unstable_by_key(|model| model.to_string());
        unpriced.dedup();
        for model in unpriced {
            let text = format!(
                "{counted_in}, but the price of {model} is not known, so that nothing is counted for it; add \
                 [prices.\"{model}\"] to the server's configuration"
            );
            self.warn(path, text);
        }
    }

    /// Labels that no node has if this daemon has not.
    fn check_node(&mut self) {
        let Some(own) = &self.server.node_labels else {
            return;
        };
        let mut missing = self.agents.node_labels(self.agent);
        missing.retain(|label| !own.contains(label));
        if missing.is_empty() {
            return;
        }
        let is_own = missing.iter().any(|label| self.agent.node.contains(label));
        let path = if is_own { "node" } else { "sub_agents" };
        let text = format!(
            "{path}: runs need a node with {}, which this daemon has not, and are refused; set labels in [cluster] of \
             the server's configuration",
            describe_labels(&missing)
        );
        self.warn(path, text);
    }

    fn check_limits(&mut self) {
        let max_runs = u64::try_from(self.server.max_tree).unwrap_or(u64::MAX);
        if let Some(runs) = self.agent.budget.max_runs.filter(|runs| *runs > max_runs) {
            let text = format!(
                "budget.max_runs is {runs}, but the server lets a tree have {max_runs} runs (runs.max_tree)"
            );
            self.warn("budget.max_runs", text);
        }
        let max_timeout = self.server.max_timeout;
        if let Some(timeout) = self.agent.timeout.filter(|time| *time > max_timeout) {
            let text = format!(
                "timeout is {} seconds, but the server lets a run have {} (server.max_timeout)",
                timeout.as_secs(),
                max_timeout.as_secs()
            );
            self.warn("timeout", text);
        }
    }

    fn check_scorer(&mut self, path: &str, scorer: &Scorer) {
        match &scorer.kind {
            ScorerKind::Judge { agent } => {
                let path = format!("{path}.agent");
                let entry = self.agents.entries.get(agent);
                match entry.map(|entry| entry.agent.as_ref()) {
                    Some(Some(judge)) if has_prompt(judge) => {}
                    Some(Some(_)) => self.error(
                        &path,
                        format!(
                            "the judge \"{agent}\" has no prompt: set system_prompt in its file"
                        ),
                    ),
                    Some(None) => {
                        self.warn(
                            &path,
                            format!("the file of the judge \"{agent}\" has errors"),
                        );
                    }
                    None => {
                        let text = format!("there is no agent \"{agent}\" to judge");
                        let known = self.agents.entries.keys().map(String::as_str);
                        let hint = did_you_mean(agent, known);
                        self.warn_with_hint(&path, text, hint);
                    }
                }
            }
            ScorerKind::Assert { expect } => {
                let expect = serde_json::from_value(Value::Object(expect.clone()));
                if let Ok(Err((key, why))) = expect.map(Assertions::compile) {
                    self.error(&format!("{path}.expect.{key}"), why);
                }
            }
            ScorerKind::Http { secret_env, .. } => {
                if let Some(variable) = secret_env
                    && !is_secret_set(&self.server.environment, variable)
                {
                    let text = format!(
                        "the environment variable {variable} with the secret of scorer {} is not set, so that it scores nothing",
                        scorer.name
                    );
                    self.warn(&format!("{path}.secret_env"), text);
                }
            }
        }
    }

    fn check_sub_agents(&mut self) {
        for name in self.agent.sub_agents.iter().filter(|it| is_agent_name(it)) {
            let path = item("sub_agents", name);
            match self.agents.entries.get(name) {
                Some(entry) if entry.agent.is_some() => {}
                Some(entry) => {
                    let file = entry.path.display();
                    let text = format!("sub_agents names \"{name}\", whose file {file} has errors");
                    self.warn(&path, text);
                }
                None => {
                    let text = format!("sub_agents names \"{name}\", but there is no such agent");
                    let known = self.agents.entries.keys().map(String::as_str);
                    let hint = did_you_mean(name, known.filter(|it| *it != self.agent.name));
                    self.warn_with_hint(&path, text, hint);
                }
            }
        }
    }

    fn check_skill(&mut self) {
        let Some(skill) = &self.agent.skill else {
            return;
        };
        let path = prompt::skill_path(skill, &self.server.config_dir);
        let is_file = fs::metadata(&path).is_ok_and(|meta| meta.is_file());
        if !is_file {
            let path = path.display();
            self.warn(
                "skill",
                format!("skill not found: {path}; runs fail without it"),
            );
        }
    }

    fn check_skills(&mut self) {
        let agent = self.agent;
        for entry in &agent.skills {
            let path = item("skills", entry);
            match skills::read(entry, &self.server.config_dir, self.workdirs) {
                Ok(skill) => {
                    for deviation in skill.deviations {
                        self.warn(&path, format!("skill {deviation}"));
                    }
                }
                // An error of the entry itself is one of the file.
                Err(_) if skill::name_of(entry).is_err() => {}
                Err(why) => self.warn(&path, format!("{why}; runs fail without it")),
            }
        }
    }

    fn check_files(&mut self, visits: &mut usize) {
        let configured = self.agent.workdir.as_deref();
        if configured.is_none() && !self.server.uses_files(self.agent) {
            return;
        }
        let shown = configured.unwrap_or(Path::new(".")).display().to_string();
        match self.workdirs.open(configured, None) {
            Ok(workdir) => {
                self.check_commands(&shown, &workdir);
                self.check_globs(&shown, &workdir, visits);
            }
            Err(error @ OpenError::Reserved) => self.warn(
                "workdir",
                format!("the workdir {shown} {error}; until then its runs fail"),
            ),
            Err(error) => {
                let text = format!("the workdir {shown} {error}; runs that need it fail");
                self.warn("workdir", text);
            }
        }
    }

    /// Commands must not reach the daemon's own files.
    fn check_commands(&mut self, shown: &str, workdir: &Workdir) {
        let command = shell::tool::NAME.to_owned();
        if !self.agent.tools.contains(&command) || !self.server.is_sandboxed {
            return;
        }
        if let Some(path) = workdir.exposed_path() {
            let text = format!(
                "run_command is not offered: the workdir {shown} contains {}, which belongs to the daemon, and commands could \
                 reach it; give the agent its own workdir",
                path.display()
            );
            self.warn(&item("tools", &command), text);
        }
    }

    fn check_globs(&mut self, shown: &str, workdir: &Arc<Workdir>, visits: &mut usize) {
        for glob in &self.agent.files {
            let is_outside = context_files::is_outside_workdir(glob);
            if !is_outside && context_files::matches_any(glob, workdir, visits) == Some(false) {
                let text =
                    format!("files has \"{glob}\", which matches no file in the workdir {shown}");
                self.warn(&item("files", glob), text);
            }
        }
    }

    fn check_mcp_server(&mut self, path: &str, server: &McpServer) {
        let name = &server.name;
        let (templates, table) = match &server.transport {
            McpTransport::Stdio { command, env, .. } => {
                if !is_program(&self.server.environment, command) {
                    let text = match command.contains('/') {
                        true => format!("MCP server {name}: there is no program {command}"),
                        false => {
                            format!("MCP server {name}: there is no program \"{command}\" in PATH")
                        }
                    };
                    self.warn(&format!("{path}.command"), text);
                }
                (env, "env")
            }
            McpTransport::StreamableHttp { headers, oauth, .. } => {
                let secret = oauth.as_ref().and_then(|it| it.client_secret_env.as_ref());
                if let Some(variable) = secret
                    && !is_secret_set(&self.server.environment, variable)
                {
                    let text = format!(
                        "MCP server {name}: the environment variable {variable} with the client's secret is not set"
                    );
                    self.warn(&format!("{path}.oauth.client_secret_env"), text);
                }
                let login = LoginId::of(server);
                let is_missing = |it: &LoginId| self.server.logins.version(it).is_none();
                if let Some(login) = login.filter(is_missing) {
                    let command = login.command();
                    let text = format!("MCP server {name}: nobody has logged in; use {command}");
                    self.warn(&format!("{path}.oauth"), text);
                }
                (headers, "headers")
            }
        };
        self.check_variables(
            &format!("{path}.{table}"),
            &format!("MCP server {name}"),
            templates,
        );
    }

    /// Warns of variables that are not set. `owner` begins the sentence.
    fn check_variables(&mut self, path: &str, owner: &str, templates: &BTreeMap<String, Template>) {
        for (key, template) in templates {
            // Only whether they are set matters.
            let environment = &self.server.environment;
            let is_set =
                |name: &str| environment.contains_key(name) || is_secret_set(environment, name);
            let lookup = |name: &str| is_set(name).then_some("");
            if let Err(variable) = template.expand(lookup) {
                let text = format!("{owner}: the environment variable {variable} is not set");
                self.warn(&format!("{path}.{key}"), text);
            }
        }
    }

    /// Checks the key that owns runs which no client starts.
    fn check_key(&mut self, path: &str, key: Option<&str>) {
        let Some(key) = key else { return };
        let keys = &self.server.keys;
        if keys.is_empty() {
            let text = format!("{path} has no effect: the server's configuration has no keys");
            return self.warn(path, text);
        }
        let (text, hint) = match keys.iter().find(|known| known.name == key) {
            Some(known) if known.can_use_agent(&self.agent.name) => return,
            Some(_) => {
                let text = format!(
                    "{path} names \"{key}\", whose agents in the server's configuration do not include this one, so that \
                     no run starts"
                );
                (text, None)
            }
            None => {
                let text = format!(
                    "{path} names \"{key}\", which is no key of the server's configuration, so that no run starts"
                );
                let known = keys.iter().map(|known| known.name.as_str());
                (text, did_you_mean(key, known))
            }
        };
        let problem = self.positions.problem(path, text, ProblemKind::Unusable);
        self.problems.push(problem.with_hint(hint));
    }

    fn check_webhook(&mut self) {
        for (path, text) in webhook_warnings(self.agent, &self.server.webhooks) {
            self.warn(path, text);
        }
    }
}

/// The models that an agent's file names, with their paths.
fn models(agent: &Agent) -> Vec<(String, &ModelRef)> {
    let fallbacks = agent.fallback_models.iter();
    let fallbacks = fallbacks.map(|it| (item("fallback_models", &it.to_string()), it));
    let ad_hoc = agent.subagent.iter().flat_map(|it| &it.model);
    let ad_hoc = ad_hoc.map(|it| ("subagent.model".to_owned(), it));
    let own = std::iter::once(("model".to_owned(), &agent.model));
    let all = own.chain(fallbacks).chain(ad_hoc);
    // That of a file without a model is empty.
    all.filter(|(_, model)| !model.provider.is_empty())
        .collect()
}

/// The path without the item of its list.
fn key_of(path: &str) -> &str {
    path.split('[').next().unwrap_or(path)
}

/// The warnings, each with the path of its key.
fn webhook_warnings(agent: &Agent, settings: &Webhooks) -> Vec<(&'static str, String)> {
    let Some(webhook) = &agent.webhook else {
        return Vec::new();
    };
    let url = url_warning(&webhook.url, &settings.guard()).map(|text| ("webhook.url", text));
    let secret_env = webhook.secret_env.as_ref().or(settings.secret_env.as_ref());
    url.into_iter().chain(secret_warning(secret_env)).collect()
}

fn secret_warning(secret_env: Option<&String>) -> Option<(&'static str, String)> {
    match secret_env {
        Some(variable) if is_process_secret_set(variable) => None,
        Some(variable) => {
            let text = format!(
                "the environment variable {variable} with the webhook's secret is not set, so that nothing is sent"
            );
            Some(("webhook.secret_env", text))
        }
        None => {
            let text = "webhook has no secret, so that nothing is sent; set secret_env here, or in [webhooks] of the server's \
                        configuration";
            Some(("webhook", text.to_owned()))
        }
    }
}

/// What every delivery would fail with. A name is not resolved.
fn url_warning(url: &str, guard: &SsrfGuard) -> Option<String> {
    // A URL with errors is an error of the file.
    let url = ssrf::parse_url(url).ok()?;
    let error = guard.check(&url).err()?;
    Some(format!("nothing is sent to webhook.url: {error}"))
}

#[cfg(test)]
mod tests {
    use super::url_warning;
    use crate::ssrf::SsrfGuard;

    #[test]
    fn urls_that_deliveries_refuse_are_found() {
        let guard = SsrfGuard::new(["internal".to_owned()], "[webhooks] allow_hosts");
        let warning = |url| url_warning(url, &guard);
        assert_eq!(
            warning("http://127.0.0.1:1/hook?token=hush").as_deref(),
            Some(
                "nothing is sent to webhook.url: 127.0.0.1 must be reached by https, or be listed in [webhooks] allow_hosts"
            )
        );
        for refused in ["http://example.com/", "https://10.0.0.1/", "https://[::1]/"] {
            assert!(warning(refused).is_some(), "{refused}");
        }
        for fine in ["https://example.com/", "http://internal:8080/", "nonsense"] {
            assert_eq!(warning(fine), None, "{fine}");
        }
    }
}
