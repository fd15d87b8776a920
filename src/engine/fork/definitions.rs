//! The agents that copied runs continue with: as recorded or of today, with the edits of the request. A fork may not have
//! what a new run may not request.

use std::sync::Arc;

use crate::domain::agent::{Agent, MAX_TURNS};
use crate::engine::context::Engine;
use crate::engine::fork::request::{DefinitionChoice, ForkError, ForkRequest};
use crate::engine::fork::restrict;
use crate::engine::fork::source::{RequestSettings, SourceRun};
use crate::engine::prepare;
use crate::engine::request::StartError;
use crate::engine::run_loop::delegation::child_run;
use crate::engine::state::period_budgets::TreeBudgets;
use crate::engine::state::pinned_agents::{PinnedAgents, PinnedRoot};

/// An agent, with its recorded form if it is unchanged.
pub struct Definition {
    pub agent: Arc<Agent>,
    pub json: Option<Arc<str>>,
    /// What the tree of this root is pinned to.
    pub pinned: Option<Arc<PinnedAgents>>,
}

impl Definition {
    fn replace(&mut self, agent: Agent) {
        self.agent = Arc::new(agent);
        self.json = None;
    }

    pub fn json(&self, engine: &Engine) -> Arc<str> {
        match &self.json {
            Some(json) => Arc::clone(json),
            None => engine.agent_snapshots.agent_json(&self.agent),
        }
    }
}

/// The definition that a copy of this run starts from. `caller` is its parent's; `settings` are those of a root's request.
pub async fn resolve(
    engine: &Arc<Engine>,
    source: &SourceRun,
    request: &ForkRequest,
    caller: Option<&Agent>,
    settings: Option<&RequestSettings>,
) -> Result<Definition, ForkError> {
    if !request.is_by_admin
        && let Some(caller) = caller
    {
        check_may_call(caller, &source.agent)?;
    }
    if request.definition == DefinitionChoice::Recorded || source.agent.ad_hoc.is_some() {
        if request.is_by_admin {
            check_recorded_paths(engine, &source.agent).await?;
            return recorded(engine, source, caller.is_none()).await;
        }
        let definition = restricted(engine, source, caller).await?;
        check_recorded_paths(engine, &definition.agent).await?;
        return Ok(definition);
    }
    let agents = engine.catalog.current();
    let agent = agents.get(&source.run.agent).map_err(StartError::from)?;
    let (mut agent, pinned) = match caller {
        Some(caller) => {
            let mut agent = Arc::clone(agent);
            child_run::inherit_hosts(caller, &mut agent);
            (agent, None)
        }
        None => {
            let PinnedRoot { agent, pinned } =
                (engine.agent_pins).pin(&engine.agent_snapshots, &agents, agent);
            (agent, pinned)
        }
    };
    if let Some(settings) = settings {
        let overridden = apply_request(&agent, &source.agent, settings)?;
        check_recorded_paths(engine, &overridden).await?;
        agent = Arc::new(overridden);
    }
    Ok(Definition {
        agent,
        json: None,
        pinned,
    })
}

/// The definition as recorded. The fork of a root calls other agents in the definitions that the source calls them in.
async fn recorded(
    engine: &Engine,
    source: &SourceRun,
    is_root: bool,
) -> Result<Definition, ForkError> {
    let as_recorded = |pinned| Definition {
        agent: Arc::clone(&source.agent),
        json: Some(Arc::clone(&source.agent_json)),
        pinned,
    };
    if !is_root || source.agent.sub_agents.is_empty() {
        return Ok(as_recorded(None));
    }
    let (store, pins) = (engine.journal.store(), &engine.agent_pins);
    let pinned = pins.load(&**store, source.run.id, &source.agent).await?;
    if pinned.is_some() {
        return Ok(as_recorded(pinned));
    }
    let agents = engine.catalog.current();
    let PinnedRoot { agent, pinned } =
        pins.pin_anew(&engine.agent_snapshots, &agents, &source.agent);
    Ok(Definition {
        agent,
        json: None,
        pinned,
    })
}

/// The definition as recorded, cut to what the agent's file of today allows. The fork of a root calls other agents in the
/// definitions that the source calls them in, each of them cut too.
async fn restricted(
    engine: &Engine,
    source: &SourceRun,
    caller: Option<&Agent>,
) -> Result<Definition, ForkError> {
    let definition = recorded(engine, source, caller.is_none()).await?;
    let agents = engine.catalog.current();
    let mut agent = match caller {
        Some(caller) if source.agent.ad_hoc.is_some() => {
            restrict::restrict_ad_hoc(&definition.agent, caller)
        }
        _ => {
            let current = agents.get(&source.run.agent).map_err(StartError::from)?;
            restrict::restrict(&definition.agent, current)
        }
    };
    let Some(caller) = caller else {
        let called = definition.pinned.iter().flat_map(|it| &it.agents);
        let called = called.filter_map(|(name, called)| {
            let current = agents.get(name).ok()?;
            Some((name.clone(), Arc::new(restrict::restrict(called, current))))
        });
        let PinnedRoot { agent, pinned } =
            (engine.agent_pins).pin_to(&engine.agent_snapshots, called.collect(), &agent);
        return Ok(Definition {
            agent,
            json: None,
            pinned,
        });
    };
    agent.pinned_agents = None;
    let mut agent = Arc::new(agent);
    child_run::inherit_hosts(caller, &mut agent);
    Ok(Definition {
        agent,
        json: None,
        pinned: None,
    })
}

/// A child continues only if its caller may start it today.
fn check_may_call(caller: &Agent, called: &Agent) -> Result<(), ForkError> {
    let is_allowed = match called.ad_hoc {
        Some(_) => caller.subagent.is_some(),
        None => caller.sub_agents.contains(&called.name),
    };
    if is_allowed {
        return Ok(());
    }
    let reason = format!(
        "the file of {} does not let it start {} any more",
        caller.name, called.name
    );
    Err(ForkError::field("/definition", reason))
}

/// The definition of today with what the request of the source has set.
fn apply_request(
    current: &Agent,
    recorded: &Agent,
    request: &RequestSettings,
) -> Result<Agent, StartError> {
    let mut agent = Agent::clone(current);
    if let Some(model) = &request.model {
        agent.model = model.parse().map_err(StartError::Model)?;
    }
    if request.skill.is_some() {
        agent.skill.clone_from(&recorded.skill);
        agent.has_requested_skill = recorded.has_requested_skill;
    }
    if request.workdir.is_some() {
        agent.workdir.clone_from(&recorded.workdir);
        agent.requested_root.clone_from(&recorded.requested_root);
    }
    request.params.apply_to(&mut agent.params);
    if let Ok(budget) = request.budget.clone().into_budget() {
        prepare::tighten_budget(&mut agent.budget, &budget);
    }
    Ok(agent)
}

/// A request may have set the directory or the skill: they must still be in the server's roots.
async fn check_recorded_paths(engine: &Arc<Engine>, agent: &Agent) -> Result<(), ForkError> {
    let agents = engine.catalog.current();
    let current = agents.get(&agent.name).ok();
    if agent.has_requested_skill
        && let Some(skill) = &agent.skill
    {
        prepare::resolve_in_roots("skill", skill.into(), engine).await?;
    }
    if let Some(workdir) = &agent.workdir
        && agent.ad_hoc.is_none()
        && current.is_none_or(|current| current.workdir.as_ref() != Some(workdir))
    {
        prepare::resolve_in_roots("workdir", workdir.clone(), engine).await?;
    }
    Ok(())
}

/// Applies what the request sets of the whole tree.
pub fn apply_to_root(
    engine: &Engine,
    request: &ForkRequest,
    definition: &mut Definition,
) -> Result<(), StartError> {
    let new_run = &request.new_run;
    prepare::check_provider_keys(engine, &new_run.provider_keys, &definition.agent)?;
    let mut agent = Agent::clone(&definition.agent);
    agent.keeps_memory = !request.adds_memory;
    agent.given_keys = new_run.provider_keys.keys().cloned().collect();
    prepare::tighten_budget(&mut agent.budget, &new_run.overrides.budget);
    definition.replace(agent);
    Ok(())
}

/// Applies the edits of the forked run's settings. `root` is the agent of the fork's root.
pub fn apply_edit(
    engine: &Engine,
    request: &ForkRequest,
    root: Option<&Agent>,
    period_budgets: &TreeBudgets,
    definition: &mut Definition,
) -> Result<(), ForkError> {
    let edit = &request.edit;
    if edit.model.is_none() && edit.params.is_empty() && edit.max_turns.is_none() {
        return Ok(());
    }
    let mut agent = Agent::clone(&definition.agent);
    if let Some(model) = &edit.model {
        agent.model = model
            .parse()
            .map_err(|error| ForkError::EditedModel(StartError::Model(error)))?;
        prepare::check_requested_price(engine, &agent, root, period_budgets)
            .map_err(ForkError::EditedModel)?;
    }
    prepare::check_params(engine, &agent, &edit.params).map_err(|error| match error {
        StartError::Param { field, reason } => {
            ForkError::field(format!("/edit/params/{field}"), reason)
        }
        error => error.into(),
    })?;
    edit.params.apply_to(&mut agent.params);
    if let Some(max_turns) = edit.max_turns {
        if !(1..=MAX_TURNS).contains(&max_turns) {
            let reason = format!("must be from 1 to {MAX_TURNS}");
            return Err(ForkError::field("/edit/max_turns", reason));
        }
        let agents = engine.catalog.current();
        // An ad-hoc child has no file: what its record allows is the most.
        let most = agents
            .get(&agent.name)
            .map_or(agent.limits.max_turns, |it| it.limits.max_turns);
        if !request.is_by_admin && max_turns > most {
            let reason = format!("must be at most {most}, the limit of the agent's file");
            return Err(ForkError::field("/edit/max_turns", reason));
        }
        agent.limits.max_turns = max_turns;
    }
    definition.replace(agent);
    Ok(())
}
