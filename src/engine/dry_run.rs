//! What a run would do, without a request to a model.

use std::sync::Arc;

use crate::catalog::prompt;
use crate::domain::agent::Agent;
use crate::domain::run::{RunId, Scope};
use crate::domain::warning::{Warning, WarningCode};
use crate::engine::blocking::run_blocking;
use crate::engine::context::Engine;
use crate::engine::conversation::context_window::ContextWindow;
use crate::engine::memories::PromptMemory;
use crate::engine::prepare;
use crate::engine::record::webhook_events;
use crate::engine::request::{DryLimits, DryRun, DrySubAgents, RunRequest, StartError};
use crate::engine::run_loop::delegation::child_run;
use crate::engine::state::pinned_agents::{PinnedRoot, SubAgents};
use crate::engine::state::prompt::RunInput;
use crate::engine::workdir;
use crate::providers::model_params;
use crate::tools::mcp::McpToolset;

pub async fn dry_run(engine: &Arc<Engine>, mut request: RunRequest) -> Result<DryRun, StartError> {
    let (root, _) = prepare::resolve_agent(engine, &request, None).await?;
    let PinnedRoot { agent, pinned } = root;
    let sub_agents = SubAgents::new(pinned, &engine.catalog);
    let period_budgets = prepare::period_budgets(engine, &request, &agent.name);
    let mut warnings = prepare::check_prices(engine, &request, &agent, &period_budgets)?;
    webhook_events::for_run(&engine.settings, &request, &agent)?;
    let scope = Scope::root(RunId::new(), agent.delegation.max_depth);
    let message = prepare::check_input(&agent, &mut request).await?;
    let mut open_workdir = None;
    if workdir::is_used(engine, &agent) {
        open_workdir = Some(workdir::open_dir(engine, &agent, None).await?);
    }
    let owner = request.owner.as_deref();
    let memory = read_memory(engine, &agent, owner).await?;
    let input = RunInput::from(message);
    workdir::prepare_skills(engine, &agent).await;
    let prompt =
        prepare::assemble_prompt(engine, &agent, open_workdir.as_ref(), memory, input).await?;
    warnings.extend(prompt.memory_warning);
    warnings.extend(prompt.warnings);
    let task_agent = Arc::clone(&agent);
    let workdir =
        run_blocking(move || prompt::workdir(&task_agent.name, task_agent.workdir.as_deref()))
            .await?;
    let mut offer = McpToolset::default();
    if !agent.mcp_servers.is_empty() {
        offer = engine.mcp.list_tools(&agent.mcp_servers).await;
        warnings.append(&mut offer.skipped);
        warnings.append(&mut offer.warnings);
        let failure = offer.required_failure.as_ref();
        warnings.extend(failure.map(|it| Warning::new(WarningCode::McpServerUnavailable, it)));
    }
    let toolbox = prepare::build_toolbox(
        engine,
        &agent,
        &scope,
        open_workdir.as_ref(),
        offer,
        &sub_agents,
    );
    warnings.extend(prepare::missing_tools(engine, &agent, &toolbox));
    warnings.extend(missing_agents(&sub_agents, &agent));
    warnings.extend(model_warnings(engine, &agent));
    for warning in &warnings {
        tracing::warn!(agent = %agent.name, code = %warning.code, "{}", warning.message);
    }
    Ok(DryRun {
        agent: agent.name.clone(),
        agent_version: agent.version.clone(),
        model: agent.model.clone(),
        fallback_models: agent.fallback_models.clone(),
        system_prompt: prompt.system,
        message: prompt.input.message.into_redacted(),
        workdir,
        params: agent.params.clone(),
        tools: toolbox.offered_specs().to_vec(),
        deferred_tools: toolbox.deferred().to_vec(),
        sub_agents: DrySubAgents {
            names: agent.sub_agents.clone(),
            max_depth: scope.max_depth,
            parallel: agent.delegation.parallel,
            timeout: agent
                .delegation
                .timeout
                .map_or(0, |timeout| timeout.as_secs()),
        },
        limits: DryLimits {
            max_turns: agent.limits.max_turns,
            timeout: prepare::root_timeout(&engine.settings, &request, &agent).as_secs(),
            max_tokens: agent.budget.max_tokens,
            max_cost_usd: agent.budget.max_cost.map(|cost| cost.to_usd()),
            max_tool_calls: agent.budget.max_tool_calls,
            max_runs: agent.budget.max_runs,
        },
        context: agent.context,
        warnings: warnings.into_iter().map(|it| it.in_turn(None)).collect(),
    })
}

fn missing_agents(sub_agents: &SubAgents, agent: &Agent) -> Vec<Warning> {
    let errors = agent.sub_agents.iter().filter_map(|name| {
        let error = sub_agents.get(name).err()?;
        Some(child_run::load_warning(name, &error))
    });
    errors.collect()
}

/// What requests to the agent's model leave out or change.
fn model_warnings(engine: &Engine, agent: &Agent) -> Vec<Warning> {
    let model = &agent.model;
    let facts = engine.settings.models.get(&model.provider, &model.model);
    let name = model.to_string();
    let (_, mut warnings) = model_params::fit_to_model(&name, &agent.params, facts.as_deref());
    warnings.extend(model_params::end_warning(model, facts.as_deref()));
    warnings
}

/// # Errors
/// Those of the store, and why the memory cannot be read.
async fn read_memory(
    engine: &Engine,
    agent: &Agent,
    owner: Option<&str>,
) -> Result<PromptMemory, StartError> {
    let window = ContextWindow::for_agent(&engine.settings.models, agent);
    let memory = engine.memories.for_prompt(agent, owner, window).await?;
    match memory.warning {
        Some(warning) if memory.is_unreadable => Err(StartError::Memory(warning.message)),
        _ => Ok(memory),
    }
}
