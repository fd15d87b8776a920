//! Turns a request into a run that can start: the agent, the request's overrides, the provider and the prompt.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::Map;

use crate::catalog::prompt::{self, PromptError, PromptParts, SystemPrompt};
use crate::domain::agent::client_additions::ClientTool;
use crate::domain::agent::model_ref::ModelRef;
use crate::domain::agent::overrides::ParamsOverride;
use crate::domain::agent::params::Params;
use crate::domain::agent::response_format::ResponseFormat;
use crate::domain::agent::{Agent, Budget};
use crate::domain::content::Content;
use crate::domain::input::ASK_PERSON;
use crate::domain::mcp::TOOL_NAME_SEPARATOR;
use crate::domain::run::{RunId, Scope, now};
use crate::domain::service::Billing;
use crate::domain::skill::READ_SKILL;
use crate::domain::variant::Variant;
use crate::domain::warning::{Warning, WarningCode};
use crate::engine::admission::placement::Placement;
use crate::engine::blocking::run_blocking;
use crate::engine::context::Engine;
use crate::engine::memories::PromptMemory;
use crate::engine::request::{Overrides, RunRequest, StartError};
use crate::engine::settings::Settings;
use crate::engine::state::period_budgets::TreeBudgets;
use crate::engine::state::pinned_agents::{PinnedRoot, SubAgents};
use crate::engine::state::prompt::{Prompt, RunInput};
use crate::engine::state::provider_keys::Keys;
use crate::engine::structured_input::{self, CheckedInput};
use crate::engine::variants;
use crate::engine::workdir;
use crate::providers::registry::ProviderHandle;
use crate::tools::call_agent::CallableAgent;
use crate::tools::mcp::McpToolset;
use crate::tools::toolbox::Toolbox;
use crate::tools::{background, call_agent, recall, subagent};
use crate::workdirs::workdir::Workdir;

/// The catalog's agent with the request's overrides, what a tree of it is pinned to, and which version this root run got if the agent has a
/// rollout. `id` is `None` of a dry run, which has the current version.
pub async fn resolve_agent(
    engine: &Arc<Engine>,
    request: &RunRequest,
    id: Option<RunId>,
) -> Result<(PinnedRoot, Option<Variant>), StartError> {
    let (root, variant) = match (&request.definition, id) {
        (Some(root), _) => (PinnedRoot::clone(root), None),
        (None, id) => {
            let agents = engine.catalog.current();
            let current = agents.get(&request.agent)?;
            let (agents, agent, variant) = match id.filter(|_| current.rollout.is_some()) {
                Some(id) => variants::choose(engine, request, id).await?,
                None => (Arc::clone(&agents), Arc::clone(current), None),
            };
            let root = (engine.agent_pins).pin(&engine.agent_snapshots, &agents, &agent);
            (root, variant)
        }
    };
    let root = override_agent(engine, request, root).await?;
    Ok((root, variant))
}

async fn override_agent(
    engine: &Arc<Engine>,
    request: &RunRequest,
    root: PinnedRoot,
) -> Result<PinnedRoot, StartError> {
    let overrides = &request.overrides;
    check_provider_keys(engine, &request.provider_keys, &root.agent)?;
    if is_empty(overrides, &root.agent) && request.provider_keys.is_empty() {
        return Ok(root);
    }
    let mut overridden = Agent::clone(&root.agent);
    overridden.given_keys = request.provider_keys.keys().cloned().collect();
    if let Some(model) = &overrides.model {
        overridden.model = model.parse().map_err(StartError::Model)?;
    }
    if let Some(skill) = &overrides.skill {
        let path = prompt::skill_path(skill, &engine.settings.config_dir);
        let (path, _) = resolve_in_roots("skill", path, engine).await?;
        overridden.skill = Some(path.to_string_lossy().into_owned());
        overridden.has_requested_skill = true;
    }
    if let Some(workdir) = &overrides.workdir {
        let (path, root) = resolve_in_roots("workdir", workdir.clone(), engine).await?;
        overridden.workdir = Some(path);
        overridden.requested_root = Some(root);
    }
    if !overrides.client.is_empty() {
        check_client_tools(&overridden, &overrides.client.tools)?;
        if overrides.client.tool_choice.is_some() {
            check_tool_choice(engine, &overridden)?;
        }
        overridden.client = Some(Box::new(overrides.client.clone()));
    }
    check_params(engine, &overridden, &overrides.params)?;
    overrides.params.apply_to(&mut overridden.params);
    tighten_budget(&mut overridden.budget, &overrides.budget);
    if let Some(priority) = overrides.priority {
        overridden.priority = priority;
    }
    Ok(PinnedRoot {
        agent: Arc::new(overridden),
        ..root
    })
}

/// Checks the input against the agent's schema, and replaces it by what is recorded. Returns the user message.
pub async fn check_input(agent: &Agent, request: &mut RunRequest) -> Result<Content, StartError> {
    let owner = request.owner.as_deref();
    let (input, is_object) = (request.input.take(), request.is_object_input);
    let checked = structured_input::check(agent, input, is_object, owner).await;
    let CheckedInput { recorded, message } = checked.map_err(StartError::Input)?;
    request.input = recorded;
    Ok(prompt::root_message(message, request.context.as_deref()))
}

/// Whether requests to the agent's provider can be sent, with a key from the request or the operator's. Other nodes may have other
/// keys.
pub fn check_provider(engine: &Engine, agent: &Agent) -> Result<(), StartError> {
    if !Placement::new(engine, agent).is_here {
        return Ok(());
    }
    let provider = &agent.model.provider;
    let has_key = agent.given_keys.contains(provider);
    engine.providers.get_with_key(provider, has_key)?;
    Ok(())
}

/// Whether the agent accepts provider keys from requests, and the providers exist. The error does not repeat the given
/// name of a provider, because it may be a key.
pub fn check_provider_keys(engine: &Engine, keys: &Keys, agent: &Agent) -> Result<(), StartError> {
    if keys.is_empty() {
        return Ok(());
    }
    if !agent.allow_provider_keys {
        let message = format!(
            "agent {} takes no keys from requests: leave the header out, or set allow_provider_keys = true in its file",
            agent.name
        );
        return Err(StartError::ProviderKey(message));
    }
    if !keys.keys().all(|name| engine.providers.contains(name)) {
        let message = format!(
            "it is for a provider that is not configured: supported providers are {}",
            engine.providers.supported_names()
        );
        return Err(StartError::ProviderKey(message));
    }
    Ok(())
}

/// Checks that every model of a run with a budget in money has a price: without one, a model costs nothing. A model of the
/// request must have a price; returns warnings about those of the agent's settings.
pub fn check_prices(
    engine: &Engine,
    request: &RunRequest,
    agent: &Agent,
    period_budgets: &TreeBudgets,
) -> Result<Vec<Warning>, StartError> {
    let in_usd: Vec<&str> = period_budgets.in_usd().collect();
    let has_budget = agent.budget.max_cost.is_some();
    if !has_budget && in_usd.is_empty() {
        return Ok(Vec::new());
    }
    if request.overrides.model.is_some() {
        check_requested_price(engine, agent, None, period_budgets)?;
    }
    check_requested_tier(engine, agent, &request.overrides.params)?;
    let agents = engine.catalog.current();
    let sub_agents = agent
        .sub_agents
        .iter()
        .filter_map(|name| agents.get(name).ok());
    let ad_hoc_model = agent.subagent.iter().flat_map(|settings| &settings.model);
    let ad_hoc_model = ad_hoc_model.map(|model| (model, &agent.params));
    let unpriced: BTreeSet<String> = own_models(agent)
        .chain(ad_hoc_model)
        .chain(sub_agents.flat_map(|agent| own_models(agent)))
        .filter(|(model, params)| is_unpriced(engine, model, params))
        .map(|(model, _)| model.to_string())
        .collect();
    let counted_in = match has_budget {
        true => format!("agent {} has a budget in money", agent.name),
        false => format!("{} counts in USD", in_usd.join(", ")),
    };
    let warning = |model: String| {
        let message = format!(
            "{counted_in}, but the price of {model} is not known, so that nothing is counted for it: \
             add [prices.\"{model}\"] to the configuration",
        );
        Warning::new(WarningCode::PriceUnknown, &message)
    };
    Ok(unpriced.into_iter().map(warning).collect())
}

/// The models that reply to the agent's runs, with the parameters of their requests.
fn own_models(agent: &Agent) -> impl Iterator<Item = (&ModelRef, &Params)> {
    let models = std::iter::once(&agent.model).chain(&agent.fallback_models);
    models.map(|model| (model, &agent.params))
}

/// Checks that the agent's model, which a client chose, has a price if a budget in money holds for the run. `root` is the agent of
/// its root, if that is another run.
pub fn check_requested_price(
    engine: &Engine,
    agent: &Agent,
    root: Option<&Agent>,
    period_budgets: &TreeBudgets,
) -> Result<(), StartError> {
    let mut agents = std::iter::once(agent).chain(root);
    let has_budget = agents.any(|agent| agent.budget.max_cost.is_some())
        || period_budgets.in_usd().next().is_some();
    if has_budget && is_unpriced(engine, &agent.model, &agent.params) {
        return Err(StartError::Unpriced(agent.model.clone()));
    }
    Ok(())
}

/// Checks that the service tier has a price that a client chose by extra keys, for a run with a budget in money.
fn check_requested_tier(
    engine: &Engine,
    agent: &Agent,
    patch: &ParamsOverride<ResponseFormat>,
) -> Result<(), StartError> {
    let Some(extra) = &patch.extra else {
        return Ok(());
    };
    let model = &agent.model;
    let chooses_tier = Billing::requested(None, [extra, &Map::new()]) != Billing::default();
    let has_price = engine.settings.models.price(model).is_some();
    if chooses_tier && has_price && is_unpriced(engine, model, &agent.params) {
        return Err(StartError::Param {
            field: "extra",
            reason: format!(
                "the price of {model} on this service tier is not known, and this run has a budget in money"
            ),
        });
    }
    Ok(())
}

/// Whether nothing is counted for the model, with these parameters, under a cost budget.
fn is_unpriced(engine: &Engine, model: &ModelRef, params: &Params) -> bool {
    let is_free = |provider: &Arc<ProviderHandle>| provider.is_free;
    !engine.settings.models.is_priced(model, params)
        && !engine.providers.get(&model.provider).is_ok_and(is_free)
}

/// The budgets over time that hold for the root run of this request.
pub fn period_budgets(engine: &Engine, request: &RunRequest, agent: &str) -> TreeBudgets {
    if request.playback.is_some() {
        // A test uses up none.
        return TreeBudgets::default();
    }
    let owner = request.owner.as_deref();
    engine.period_budgets.of_root(owner, agent, &request.labels)
}

/// Whether a new root run may start.
pub async fn check_period_budgets(
    engine: &Engine,
    budgets: &TreeBudgets,
) -> Result<(), StartError> {
    let now = now();
    let store = engine.journal.store().as_ref();
    budgets.read_new_periods(store, now).await?;
    Ok(budgets.check(now)?)
}

/// The time limit of a root run.
pub fn root_timeout(settings: &Settings, request: &RunRequest, agent: &Agent) -> Duration {
    request
        .overrides
        .timeout
        .or(agent.timeout)
        .unwrap_or(settings.default_timeout)
        .min(settings.max_timeout)
}

/// The tools of a run in this directory, including those that its MCP servers offer.
pub fn build_toolbox(
    engine: &Engine,
    agent: &Agent,
    scope: &Scope,
    workdir: Option<&Arc<Workdir>>,
    offer: McpToolset,
    sub_agents: &SubAgents,
) -> Toolbox {
    let workdir = workdir.map(Arc::clone);
    Toolbox::new(
        agent,
        scope,
        workdir,
        &engine.tool_registry,
        offer,
        |name| {
            let agent = sub_agents.get(name).ok();
            CallableAgent {
                name: name.to_owned(),
                description: agent.and_then(|agent| agent.description.clone()),
                input_schema: agent.and_then(|agent| agent.input_schema.clone()),
            }
        },
    )
}

/// Assembles the prompt of a run, with context files from this directory. Files are read off the runtime's
/// threads.
pub async fn assemble_prompt(
    engine: &Arc<Engine>,
    agent: &Arc<Agent>,
    workdir: Option<&Arc<Workdir>>,
    memory: PromptMemory,
    input: RunInput,
) -> Result<Prompt, PromptError> {
    let reads_files = agent.skill.is_some()
        || !agent.skills.is_empty()
        || !agent.files.is_empty()
        || agent.workdir.is_some();
    if !reads_files {
        return assemble_prompt_blocking(engine, agent, None, memory, input);
    }
    let (engine, agent) = (Arc::clone(engine), Arc::clone(agent));
    let workdir = workdir.map(Arc::clone);
    run_blocking(move || assemble_prompt_blocking(&engine, &agent, workdir, memory, input)).await
}

fn assemble_prompt_blocking(
    engine: &Engine,
    agent: &Agent,
    workdir: Option<Arc<Workdir>>,
    memory: PromptMemory,
    input: RunInput,
) -> Result<Prompt, PromptError> {
    if workdir.is_none() && agent.workdir.is_some() {
        // The directory is not used, but an error in its configuration is still reported.
        prompt::workdir(&agent.name, agent.workdir.as_deref())?;
    }
    let SystemPrompt { text, omissions } = prompt::system_prompt(&PromptParts {
        agent: &agent.name,
        system_prompt: &agent.system_prompt,
        skill: agent.skill.as_deref(),
        skills: readable_skills(agent),
        workdirs: &engine.workdirs,
        files: &agent.files,
        is_skill_requested: agent.has_requested_skill,
        workdir,
        config_dir: &engine.settings.config_dir,
        max_file_bytes: engine.settings.max_context_file_bytes,
        memory: &memory.text,
    })?;
    let text = prompt::append_instructions(text, agent.client.as_deref());
    let omissions = omissions.iter();
    let warnings = omissions.map(|it| Warning::new(WarningCode::ContextFileLeftOut, it));
    Ok(Prompt {
        system: text,
        input,
        memory_warning: memory.warning,
        warnings: warnings.collect(),
    })
}

/// The skills that the run can read: an ad-hoc sub-agent may lack the tool.
fn readable_skills(agent: &Agent) -> &[String] {
    let ad_hoc = agent.ad_hoc.as_ref();
    let allowed = ad_hoc.and_then(|ad_hoc| ad_hoc.allowed_tools.as_ref());
    let can_read = allowed.is_none_or(|it| it.iter().any(|name| name == READ_SKILL));
    if can_read { &agent.skills } else { &[] }
}

/// Tools in the agent's file, or of the run's client, that the model is not offered.
pub fn missing_tools(engine: &Engine, agent: &Agent, toolbox: &Toolbox) -> Vec<Warning> {
    if agent.ad_hoc.is_some() {
        // Its caller's run has the warnings.
        return Vec::new();
    }
    let is_offered = |name: &&String| {
        let mut offered = toolbox.offered_specs().iter();
        offered.any(|spec| spec.name == **name)
    };
    let missing = agent.tools.iter().filter(|name| !is_offered(name));
    let messages = missing.map(|name| engine.tool_registry.describe_missing(name));
    let left_out = agent.client.as_ref().map(|client| &client.tools_left_out);
    let left_out = left_out.filter(|tools| !tools.is_empty()).map(|tools| {
        let tools = tools.join(", ");
        format!("tools of the client that are no functions are not offered: {tools}")
    });
    let warnings = messages.chain(left_out);
    let warnings = warnings.map(|it| Warning::new(WarningCode::ToolNotOffered, &it));
    warnings.collect()
}

/// Whether the agent has all of them already.
fn is_empty(overrides: &Overrides, agent: &Agent) -> bool {
    let Overrides {
        model,
        skill,
        workdir,
        params,
        timeout: _,
        budget,
        priority,
        client,
    } = overrides;
    model.is_none()
        && skill.is_none()
        && workdir.is_none()
        && params.is_empty()
        && *budget == Budget::default()
        && priority.is_none_or(|priority| priority == agent.priority)
        && client.is_empty()
}

/// Refuses tools of the client with the names of tools that the agent has. `tool_search` and `tool_call` are not among
/// them: the toolbox does not defer the agent's tools if the client has tools of these names.
fn check_client_tools(agent: &Agent, tools: &[ClientTool]) -> Result<(), StartError> {
    let own = agent.tools.iter().map(String::as_str);
    let http_tools = agent.http_tools.iter().map(|tool| tool.name.as_str());
    let by_settings = [
        (READ_SKILL, !agent.skills.is_empty()),
        (call_agent::NAME, !agent.sub_agents.is_empty()),
        (subagent::NAME, agent.subagent.is_some()),
        (background::AWAIT_AGENTS, agent.delegation.background),
        (background::CANCEL_AGENT, agent.delegation.background),
        (recall::NAME, agent.context.recall),
        (ASK_PERSON, agent.ask.is_some()),
    ];
    let by_settings = by_settings
        .iter()
        .filter(|(_, is_on)| *is_on)
        .map(|it| it.0);
    let own: BTreeSet<&str> = own.chain(http_tools).chain(by_settings).collect();
    let is_of_server = |name: &str| {
        let mut servers = agent.mcp_servers.iter();
        servers.any(|server| {
            let rest = name.strip_prefix(server.name.as_str());
            rest.is_some_and(|rest| rest.starts_with(TOOL_NAME_SEPARATOR))
        })
    };
    let is_taken =
        |tool: &&ClientTool| own.contains(tool.name.as_str()) || is_of_server(&tool.name);
    match tools.iter().find(is_taken) {
        None => Ok(()),
        Some(tool) => Err(StartError::Override {
            field: "tools",
            reason: format!(
                "agent {} has a tool {} of its own; give the client's tool another name",
                agent.name, tool.name
            ),
        }),
    }
}

/// All models of the agent have to take a choice of tools. A provider that is not available is another error.
fn check_tool_choice(engine: &Engine, agent: &Agent) -> Result<(), StartError> {
    let mut models = std::iter::once(&agent.model).chain(&agent.fallback_models);
    let takes_none = |model: &&ModelRef| {
        let handle = engine.providers.get(&model.provider);
        handle.is_ok_and(|handle| !handle.provider.takes_tool_choice())
    };
    let rejects = |model: &&ModelRef| {
        let facts = engine.settings.models.get(&model.provider, &model.model);
        facts.is_some_and(|facts| facts.forced_tools == Some(false))
    };
    let reason = match (models.clone().find(takes_none), models.find(rejects)) {
        (Some(model), _) => {
            format!("the provider of {model} lets the model decide; use auto or none")
        }
        (None, Some(model)) => {
            format!("{model} decides itself whether it calls a tool; use auto or none")
        }
        (None, None) => return Ok(()),
    };
    Err(StartError::Override {
        field: "tool_choice",
        reason,
    })
}

/// Whether the agent allows the parameters of a request, and its model is not known to reject them.
pub fn check_params(
    engine: &Engine,
    agent: &Agent,
    patch: &ParamsOverride<ResponseFormat>,
) -> Result<(), StartError> {
    let allows = |key: &&String| agent.allow_extra.contains(key);
    if let Some(key) = patch
        .extra
        .iter()
        .flat_map(Map::keys)
        .find(|key| !allows(key))
    {
        let reason = format!("\"{key}\" is not in the agent's allow_extra");
        return Err(StartError::Param {
            field: "extra",
            reason,
        });
    }
    let model = &agent.model;
    let facts = engine.settings.models.get(&model.provider, &model.model);
    let mut params = agent.params.clone();
    patch.apply_to(&mut params);
    if facts.is_none_or(|facts| facts.allows_sampling(&params)) {
        return Ok(());
    }
    for (field, value) in [("temperature", patch.temperature), ("top_p", patch.top_p)] {
        if value.is_some() {
            let reason = format!("{model} does not take it; leave it out");
            return Err(StartError::Param { field, reason });
        }
    }
    Ok(())
}

/// A request may lower the agent's limits, and set those that the agent has not.
pub fn tighten_budget(budget: &mut Budget, requested: &Budget) {
    tighten_limit(&mut budget.max_tokens, requested.max_tokens);
    tighten_limit(&mut budget.max_cost, requested.max_cost);
    tighten_limit(&mut budget.max_tool_calls, requested.max_tool_calls);
    tighten_limit(&mut budget.max_runs, requested.max_runs);
}

/// The lower of two limits; `None` is no limit.
pub fn tighten_limit<T: Ord + Copy>(own: &mut Option<T>, requested: Option<T>) {
    *own = match (*own, requested) {
        (Some(own), Some(requested)) => Some(own.min(requested)),
        (own, requested) => own.or(requested),
    };
}

/// The path of an override and its root, if it is within a configured root and has no symbolic link below that.
pub async fn resolve_in_roots(
    field: &'static str,
    path: PathBuf,
    engine: &Arc<Engine>,
) -> Result<(PathBuf, PathBuf), StartError> {
    if !engine.workdirs.has_roots() {
        let reason =
            format!("{field} cannot be overridden: the server has no [tools] roots configured");
        return Err(StartError::Override { field, reason });
    }
    let engine = Arc::clone(engine);
    run_blocking(move || resolve_in_roots_blocking(field, &path, &engine)).await
}

fn resolve_in_roots_blocking(
    field: &'static str,
    path: &Path,
    engine: &Engine,
) -> Result<(PathBuf, PathBuf), StartError> {
    let rejection = |reason: String| {
        let reason = format!("{field} {} {reason}", path.display());
        StartError::Override { field, reason }
    };
    workdir::update_agent_workdirs(engine);
    let workdirs = &engine.workdirs;
    let resolved = workdirs.resolve_below_roots(path);
    let (resolved_path, root) =
        resolved.ok_or_else(|| rejection("is outside the server's [tools] roots".to_owned()))?;
    let opening_result = match field {
        "skill" => workdirs.open_file(&resolved_path).map(drop),
        _ => workdirs.open_requested(&resolved_path).map(drop),
    };
    opening_result.map_err(|error| rejection(error.to_string()))?;
    Ok((resolved_path, root.to_owned()))
}
