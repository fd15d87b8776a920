//! Creates child runs.

use std::sync::Arc;

use crate::catalog::{LoadError, prompt};
use crate::domain::agent::Agent;
use crate::domain::run::{Run, RunId, Scope};
use crate::domain::usage::TreeUsage;
use crate::domain::warning::{Warning, WarningCode};
use crate::engine::context::RunContext;
use crate::engine::record::run_record;
use crate::engine::run_loop::delegation::ad_hoc;
use crate::engine::state::active_run::ActiveRun;
use crate::engine::state::budget::AccountIds;
use crate::engine::state::deadline::Deadline;
use crate::engine::structured_input;
use crate::tools::{AdHocRequest, ChildRequest};

/// A child run, ready to be driven.
pub struct ChildRun {
    pub active_run: Arc<ActiveRun>,
    pub run: Arc<Run>,
    pub message: String,
}

/// Creates a child of `parent`, which is in this turn, under this id.
pub fn prepare(
    parent: &RunContext,
    turn: u32,
    request: &ChildRequest<'_>,
    task: ChildTask,
    id: RunId,
) -> Result<ChildRun, String> {
    let name = request.agent;
    let ChildTask {
        mut agent,
        task,
        message,
    } = task;
    inherit_hosts(&parent.run.agent, &mut agent);
    check_provider(parent, &agent).inspect_err(|reason| {
        let message = format!("sub-agent \"{name}\" could not be started: {reason}");
        let warning = Warning::new(WarningCode::SubAgentUnavailable, &message);
        parent.run.warn(warning, Some(turn));
    })?;
    let max_depth = parent.run.scope.max_depth;
    let mut child = build(parent, agent, max_depth, &parent.run.accounts, id)?;
    child.message = message;
    let run = Arc::make_mut(&mut child.run);
    run.tool_call_id = Some(request.tool_call_id.to_owned());
    run.input = child.message.as_str().into();
    run.task = Some(task);
    Ok(child)
}

/// The agent of a child, with a task that fits it.
pub struct ChildTask {
    agent: Arc<Agent>,
    pub task: String,
    message: String,
}

/// Finds the agent of a child, and checks the task against its schema.
pub async fn check_task(
    parent: &RunContext,
    turn: u32,
    request: &ChildRequest<'_>,
) -> Result<ChildTask, String> {
    let name = request.agent;
    let agents = parent.sub_agents();
    let agent = Arc::clone(agents.get(name).map_err(|error| {
        parent.run.warn(load_warning(name, &error), Some(turn));
        describe_load_error(name, &error)
    })?);
    let owner = parent.run.tree.owner.as_deref();
    let (task, message) = match structured_input::check_task(&agent, request.task, owner).await? {
        None => (
            request.task.to_owned(),
            prompt::child_message(request.task, request.context),
        ),
        Some((task, message)) => {
            let message = prompt::root_message(Some(message.into()), request.context);
            (task, message.to_plain_text().into_owned())
        }
    };
    Ok(ChildTask {
        agent,
        task,
        message,
    })
}

/// A child without hosts of its own may request its caller's only.
pub fn inherit_hosts(caller: &Agent, agent: &mut Arc<Agent>) {
    let hosts = &caller.allowed_hosts;
    if agent.allowed_hosts.is_empty() && !hosts.is_empty() {
        // Set in the definition, which is recorded with the run: it then also holds after a restart, and for the
        // child's children.
        Arc::make_mut(agent).allowed_hosts.clone_from(hosts);
    }
}

/// Creates an ad-hoc child of `parent` under this id.
pub fn prepare_ad_hoc(
    parent: &RunContext,
    request: &AdHocRequest<'_>,
    id: RunId,
) -> Result<ChildRun, String> {
    let agent = ad_hoc::derive_agent(&parent.run.agent, request);
    let settings = parent.run.agent.subagent_settings();
    let max_depth = parent.run.scope.max_ad_hoc_depth(settings.max_depth);
    check_provider(parent, &agent)?;
    let accounts = ad_hoc::account_ids(&parent.run);
    let mut child = build(parent, agent, max_depth, &accounts, id)?;
    request.task.clone_into(&mut child.message);
    let run = Arc::make_mut(&mut child.run);
    run.tool_call_id = Some(request.tool_call_id.to_owned());
    run.input = child.message.as_str().into();
    run.task = Some(request.task.to_owned());
    run.label = Some(request.label.to_owned());
    Ok(child)
}

/// The warning that a sub-agent's definition cannot be loaded.
pub fn load_warning(name: &str, error: &LoadError) -> Warning {
    match error {
        LoadError::NotFound(_) => Warning::new(
            WarningCode::SubAgentNotFound,
            &format!("sub-agent \"{name}\" does not exist"),
        ),
        LoadError::Model(_) | LoadError::Invalid(_) => {
            let reason = describe_load_error(name, error);
            let message = format!("sub-agent \"{name}\" could not be started: {reason}");
            Warning::new(WarningCode::SubAgentUnavailable, &message)
        }
    }
}

/// The texts are fixed by the contract.
fn describe_load_error(name: &str, error: &LoadError) -> String {
    match error {
        LoadError::Model(error) => format!("invalid model for agent \"{name}\": {error}"),
        other => format!("failed to load agent \"{name}\": {other}"),
    }
}

fn check_provider(parent: &RunContext, agent: &Agent) -> Result<(), String> {
    if parent.model_playback().is_some() {
        return Ok(());
    }
    let provider = &agent.model.provider;
    let has_key = parent.run.tree.provider_keys.has_own_key(agent, provider);
    let found = parent.engine.providers.get_with_key(provider, has_key);
    found
        .map(drop)
        .map_err(|unavailable| unavailable.to_string())
}

/// `max_depth` is the deepest level allowed; `accounts` are the child's budget accounts beside its own.
fn build(
    parent: &RunContext,
    agent: Arc<Agent>,
    max_depth: u8,
    accounts: &[usize],
    id: RunId,
) -> Result<ChildRun, String> {
    let child_scope: Option<Scope> =
        parent
            .run
            .scope
            .child(id, agent.delegation.max_depth, max_depth);
    let scope =
        child_scope.ok_or_else(|| format!("maximum sub-agent depth ({max_depth}) reached"))?;
    let accounts = reserve_run(parent, &agent, accounts)?;
    let deadline = deadline(&parent.run, &agent);
    let agent_json = parent.engine.agent_snapshots.agent_json(&agent);
    let tree = Arc::clone(&parent.run.tree);
    let active_run = ActiveRun::new(
        scope,
        agent,
        tree,
        Some(Arc::clone(&parent.run)),
        accounts,
        agent_json,
    );
    if let Some(deadline) = deadline {
        active_run.set_deadline(deadline);
    }
    let run = Arc::new(run_record::new_run(&active_run));
    Ok(ChildRun {
        active_run,
        run,
        message: String::new(),
    })
}

/// When a child that starts now must have ended.
pub fn deadline(parent: &ActiveRun, agent: &Agent) -> Option<Deadline> {
    let timeouts = [agent.timeout, parent.agent.delegation.timeout].into_iter();
    let deadlines = timeouts.flatten().map(Deadline::within);
    deadlines
        .chain(parent.deadline())
        .min_by_key(|deadline| deadline.at)
}

/// Counts the new run against the server's limit and the budgets. Returns its budget accounts.
fn reserve_run(
    parent: &RunContext,
    agent: &Agent,
    accounts: &[usize],
) -> Result<AccountIds, String> {
    let (tree, max) = (&parent.run.tree, parent.engine.settings.runs.max_tree);
    if !tree.count_run(max) {
        return Err(format!(
            "the whole task has had {max} runs, the maximum that the server allows"
        ));
    }
    let budgets = &tree.budgets;
    let accounts = budgets.open_account(&agent.budget, accounts, &TreeUsage::default());
    match budgets.count_run(&accounts) {
        Ok(()) => Ok(accounts),
        Err(refusal) => {
            tree.uncount_run();
            parent.run.record_refusal(&refusal);
            Err(refusal.exceeded.to_string())
        }
    }
}
