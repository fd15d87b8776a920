//! A child run's making and its result: what it takes from its own file, what little from its caller, and the words
//! in which its end reaches the caller's model. Knows no loop.

use std::sync::Arc;

use crate::catalog::{LoadError, prompt};
use crate::domain::agent::Agent;
use crate::domain::event::{EventKind, returned_usage};
use crate::domain::run::{FailureCode, Run, RunId, Scope, Status};
use crate::domain::usage::TreeUsage;
use crate::engine::ad_hoc;
use crate::engine::budget::Accounts;
use crate::engine::live::{Deadline, LiveRun};
use crate::engine::parts::Engine;
use crate::engine::record;
use crate::tools::{AdHocAsk, ChildAsk};

/// A child run, ready to be driven.
pub struct Child {
    /// The run at work.
    pub live: Arc<LiveRun>,
    /// Its record.
    pub run: Arc<Run>,
    /// Its user message.
    pub message: String,
}

/// Makes a child of `caller` under this id, or says why there can be none.
pub fn prepare(
    engine: &Engine,
    caller: &Arc<LiveRun>,
    ask: &ChildAsk<'_>,
    id: RunId,
) -> Result<Child, String> {
    let name = ask.agent;
    let agents = engine.catalog.current();
    let mut agent = Arc::clone(agents.get(name).map_err(|error| match error {
        LoadError::Model(error) => format!("invalid model for agent \"{name}\": {error}"),
        other => format!("failed to load agent \"{name}\": {other}"),
    })?);
    let hosts = &caller.agent.allowed_hosts;
    if agent.allowed_hosts.is_empty() && !hosts.is_empty() {
        // In the definition, which is recorded with the run: it holds for whoever goes on with it, and for its children.
        Arc::make_mut(&mut agent).allowed_hosts.clone_from(hosts);
    }
    let limit = caller.scope.max_depth;
    let mut child = make(engine, caller, agent, limit, &caller.accounts, id)?;
    child.message = prompt::child_message(ask.task, ask.context);
    let run = Arc::make_mut(&mut child.run);
    run.tool_call_id = Some(ask.tool_call_id.to_owned());
    run.input = child.message.as_str().into();
    run.task = Some(ask.task.to_owned());
    Ok(child)
}

/// Makes a child without a name of `caller` under this id, or says why there can be none.
pub fn prepare_ad_hoc(
    engine: &Engine,
    caller: &Arc<LiveRun>,
    ask: &AdHocAsk<'_>,
    id: RunId,
) -> Result<Child, String> {
    let agent = ad_hoc::agent(&caller.agent, ask);
    let settings = ad_hoc::settings(&caller.agent);
    let limit = caller.scope.ad_hoc_limit(settings.max_depth);
    let accounts = ad_hoc::accounts(caller);
    let mut child = make(engine, caller, agent, limit, &accounts, id)?;
    ask.task.clone_into(&mut child.message);
    let run = Arc::make_mut(&mut child.run);
    run.tool_call_id = Some(ask.tool_call_id.to_owned());
    run.input = child.message.as_str().into();
    run.task = Some(ask.task.to_owned());
    run.label = Some(ask.label.to_owned());
    Ok(child)
}

/// A child of that agent, at most at the level `limit`, that draws on these accounts beside its own.
fn make(
    engine: &Engine,
    caller: &Arc<LiveRun>,
    agent: Arc<Agent>,
    limit: u8,
    accounts: &[usize],
    id: RunId,
) -> Result<Child, String> {
    let provider = &agent.model.provider;
    let has_key = caller.tree.provider_keys.serve(&agent, provider);
    engine
        .providers
        .get_for(provider, has_key)
        .map_err(|unavailable| unavailable.to_string())?;
    let place: Option<Scope> = caller.scope.child(id, agent.delegation.max_depth, limit);
    let scope = place.ok_or_else(|| format!("maximum sub-agent depth ({limit}) reached"))?;
    let accounts = take_run(engine, caller, &agent, accounts)?;
    let bounds = [agent.timeout, caller.agent.delegation.timeout].into_iter();
    let bounds = bounds.flatten().map(Deadline::within);
    let deadline = bounds
        .chain(caller.deadline())
        .min_by_key(|deadline| deadline.at);
    let definition = engine.definitions.text(&agent);
    let tree = Arc::clone(&caller.tree);
    let live = LiveRun::new(
        scope,
        agent,
        tree,
        Some(Arc::clone(caller)),
        accounts,
        definition,
    );
    if let Some(deadline) = deadline {
        live.set_deadline(deadline);
    }
    let run = Arc::new(record::new(&live));
    Ok(Child {
        live,
        run,
        message: String::new(),
    })
}

/// Counts a run of that agent below `caller`, within the server's bound and the budgets; the accounts that it draws on.
fn take_run(
    engine: &Engine,
    caller: &LiveRun,
    agent: &Agent,
    accounts: &[usize],
) -> Result<Accounts, String> {
    let (tree, most) = (&caller.tree, engine.settings.runs.max_tree);
    if !tree.take_run(most) {
        return Err(format!(
            "the whole task has had {most} runs, the most that the server allows"
        ));
    }
    let budgets = &tree.budgets;
    let accounts = budgets.open(&agent.budget, accounts, &TreeUsage::default());
    match budgets.take_run(&accounts) {
        Ok(()) => Ok(accounts),
        Err(refused) => {
            tree.give_run_back();
            caller.refuse(&refused);
            Err(refused.exceeded.to_string())
        }
    }
}

/// The child's final text, or why there is none.
pub fn result(ended: &Run) -> Result<String, String> {
    if ended.status == Status::Completed {
        return Ok(ended.content.clone().unwrap_or_default());
    }
    match (&ended.error, &ended.cancel_reason) {
        (Some(failure), _) if failure.code == FailureCode::MaxTurns => Err(failure
            .message
            .replacen("agent exceeded", "sub-agent exceeded", 1)),
        (Some(failure), _) => Err(failure.message.clone()),
        (None, Some(reason)) => Err(format!("cancelled: {reason}")),
        (None, None) => Err("ended without a result".to_owned()),
    }
}

/// The event that tells the child's return.
pub fn returned(tool_call_id: &str, ended: &Run, outcome: &Result<String, String>) -> EventKind {
    let (input_tokens, output_tokens, tool_calls) = returned_usage(&ended.tree.usage);
    EventKind::AgentReturned {
        tool_call_id: tool_call_id.to_owned(),
        child_id: ended.id,
        child_agent: ended.agent.clone(),
        duration_ms: ended.duration_ms(crate::domain::run::now()),
        characters: outcome.as_ref().ok().map(|text| text.chars().count()),
        error: outcome.as_ref().err().cloned(),
        input_tokens,
        output_tokens,
        tool_calls,
    }
}
