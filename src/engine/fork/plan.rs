//! What a fork's record is: for each copied run its new record, its steps and its first events.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::domain::agent::Agent;
use crate::domain::event::EventKind;
use crate::domain::message::shorten;
use crate::domain::run::{Fork, ForkedFrom, Reused, Run, RunId, Scope};
use crate::domain::usage::{TreeUsage, Usage};
use crate::engine::context::Engine;
use crate::engine::fork::cut::{self, Cut, KeptSteps, OpenCall};
use crate::engine::fork::definitions::{self, Definition};
use crate::engine::fork::request::{DefinitionChoice, ForkError, ForkRequest};
use crate::engine::fork::source::{self, RecordedRequest, SourceRun, SourceTree};
use crate::engine::history::run_log;
use crate::engine::prepare;
use crate::engine::record::journal;
use crate::engine::recovery;
use crate::engine::run_loop::call_records;
use crate::engine::state::period_budgets::TreeBudgets;
use crate::engine::state::pinned_agents::{PinnedAgents, SubAgents};
use crate::record::entry::Entry;
use crate::store::turn_record::TurnEntry;
use crate::tools::Effect;

/// A run of the fork, not yet recorded.
pub struct PlannedRun {
    pub run: Run,
    pub agent: Arc<Agent>,
    pub agent_json: Arc<str>,
    /// What the tree of this root is pinned to.
    pub pinned: Option<Arc<PinnedAgents>>,
    pub steps: Vec<Entry>,
    /// The copied turns.
    pub turns: Vec<TurnEntry>,
    /// The starts of the delegations that the fork continues.
    pub events: Vec<EventKind>,
    scope: Scope,
}

/// The runs of a fork, parents before their children; the root is the first.
pub struct ForkPlan {
    pub runs: Vec<PlannedRun>,
    /// What the request of the source's root set.
    pub request: RecordedRequest,
}

/// A run to be copied.
struct Copy {
    source: RunId,
    new: RunId,
    /// The position of its parent among the planned runs.
    parent: Option<usize>,
}

pub struct Planner<'a> {
    engine: &'a Arc<Engine>,
    request: &'a ForkRequest,
    tree: SourceTree,
    /// The runs from the root to the forked one.
    path: Vec<RunId>,
    forked_from: ForkedFrom,
    /// Those that hold for the fork.
    period_budgets: TreeBudgets,
    planned: Vec<PlannedRun>,
}

/// Reads what the fork copies, and checks the request against it. `root` is the id of the new root.
pub async fn plan(
    engine: &Arc<Engine>,
    request: &ForkRequest,
    tree: SourceTree,
    root: RunId,
) -> Result<ForkPlan, ForkError> {
    let at_run = request.at.run.unwrap_or(request.source);
    let path = tree.path_to(at_run).ok_or_else(|| {
        let reason = format!("is not a run of the tree of {}", tree.root.id);
        ForkError::field("/at/run", reason)
    })?;
    let forked_from = ForkedFrom {
        run: tree.root.id,
        at_run,
        turn: request.at.turn.unwrap_or(0),
    };
    let source_root = tree.root.id;
    let labels = request.labels.as_ref().unwrap_or(&tree.root.labels);
    let owner = request.new_run.owner.as_deref();
    let period_budgets = (engine.period_budgets).of_root(owner, &tree.root.agent, labels);
    let mut planner = Planner {
        engine,
        request,
        tree,
        path,
        forked_from,
        period_budgets,
        planned: Vec::new(),
    };
    let mut copies = VecDeque::from([Copy {
        source: source_root,
        new: root,
        parent: None,
    }]);
    while let Some(copy) = copies.pop_front() {
        copies.extend(planner.copy(&copy).await?);
    }
    Ok(planner.finish())
}

impl ForkPlan {
    pub fn root(&self) -> &PlannedRun {
        &self.runs[0]
    }

    /// Whether the root is the run at which the tree was forked.
    pub fn is_root_forked(&self) -> bool {
        let fork = self.root().run.fork.as_ref();
        let from = fork.and_then(|fork| fork.from);
        from.is_some_and(|from| from.run == from.at_run)
    }
}

impl Planner<'_> {
    fn is_forked(&self, source: RunId) -> bool {
        self.path.last() == Some(&source)
    }

    /// Where the record of a run is cut.
    fn cut_of(&self, source: RunId) -> Result<Cut, ForkError> {
        let at = self.request.at;
        if self.is_forked(source) {
            return match at.turn {
                None if at.after_reply => {
                    Err(ForkError::field("/at/turn", "is required with after"))
                }
                None => Ok(self.tree.end_of(source)),
                Some(0) if at.after_reply => Err(ForkError::field(
                    "/at/turn",
                    "must be at least 1: turn 0 has no reply",
                )),
                Some(turn) if at.after_reply => Ok(Cut::AfterReply(turn)),
                Some(turn) => Ok(Cut::BeforeTurn(turn)),
            };
        }
        let position = self.path.iter().position(|id| *id == source);
        let next = position.and_then(|position| self.path.get(position + 1));
        let call = next.and_then(|next| self.tree.call_of(*next));
        Ok(call.map_or_else(
            || self.tree.end_of(source),
            |call| Cut::InCall(call.to_owned()),
        ))
    }

    /// Plans the copy of a run. Returns its children that are copied too.
    async fn copy(&mut self, copy: &Copy) -> Result<Vec<Copy>, ForkError> {
        let source = self.tree.load_run(self.engine, copy.source).await?;
        let at = self.cut_of(copy.source)?;
        let is_forked = self.is_forked(copy.source);
        let mut kept = cut::cut(source.steps.clone(), &at)
            .map_err(|reason| ForkError::field("/at/turn", reason))?;
        if is_forked {
            self.check_reply_edit(&at)?;
            kept.edit(&self.request.edit)?;
            if self.request.at.turn.is_none() {
                self.forked_from.turn = first_own_turn(&kept);
            }
        }
        self.check_background(copy.source, &source, &kept, &at)
            .await?;
        let definition = self.definition(copy, &source).await?;
        if is_forked {
            check_max_turns(&kept, &definition.agent)?;
        }
        let scope = self.scope(copy, &definition.agent)?;
        let mut open_children = Vec::new();
        if !matches!(at, Cut::AfterReply(_)) {
            let mut others = Vec::new();
            for open in &kept.open_calls {
                match self.tree.child(copy.source, &open.call.id) {
                    Some(child) => open_children.push((child, open.clone())),
                    None => others.push(open),
                }
            }
            self.check_interrupted(&source, &definition.agent, &scope, &others)
                .await?;
        }
        let continued = open_children.iter_mut().map(|(_, open)| open);
        kept.apply_changed_arguments(continued.collect());
        let position = self.planned.len();
        let children = self
            .planned_children(position, scope.depth.0, open_children)
            .await?;
        let (copies, events): (Vec<Copy>, Vec<Vec<EventKind>>) = children.into_iter().unzip();
        let started = u64::try_from(copies.len()).unwrap_or(u64::MAX);
        let run = self.new_run(copy, &source, &definition, &scope, &kept, started);
        let turns = match kept.turns {
            0 => Vec::new(),
            last => {
                let store = self.engine.journal.store();
                let copied = journal::fork_entries([], kept.steps.clone());
                let copied = store.copied_turns(copy.source, last, copied);
                copied.await?
            }
        };
        self.planned.push(PlannedRun {
            run,
            turns,
            agent_json: definition.json(self.engine),
            pinned: definition.pinned,
            agent: definition.agent,
            steps: kept.steps,
            events: events.into_iter().flatten().collect(),
            scope,
        });
        Ok(copies)
    }

    /// Whether the kept steps have the ends of all children in the background that the kept calls have started: the fork has no copies
    /// of these children, so nothing could deliver their ends later. A run that has ended waits for none.
    async fn check_background(
        &self,
        id: RunId,
        source: &SourceRun,
        kept: &KeptSteps,
        at: &Cut,
    ) -> Result<(), ForkError> {
        let is_at_end = matches!(at, Cut::AtEnd { .. }) && source.run.status.is_terminal();
        if is_at_end || !source.agent.delegation.background {
            return Ok(());
        }
        let calls = run_log::load_calls(self.engine, id).await?;
        let is_open = |call: &String| matches!(at, Cut::InCall(open) if open == call);
        let is_kept = |call: &String| kept.recorded_calls.contains(call) || is_open(call);
        let is_delivered = |call: &String| {
            let returned_in = calls.returned.get(call);
            returned_in.is_some_and(|it| match (&it.awaited_by, it.message) {
                (Some(by), _) => kept.recorded_calls.contains(by),
                (None, message) => message.is_some_and(|number| number <= kept.messages),
            })
        };
        let mut started = calls.background.iter().filter(|call| is_kept(call));
        match started.find(|call| is_open(call) || !is_delivered(call)) {
            None => Ok(()),
            Some(call) => {
                let reason = format!(
                    "is a point at which {id} has a sub-agent in the background (call {}) whose result it does not have yet: fork it at \
                     another turn",
                    shorten(call, 80)
                );
                Err(ForkError::field("/at/turn", reason))
            }
        }
    }

    fn check_reply_edit(&self, at: &Cut) -> Result<(), ForkError> {
        match (&self.request.edit.reply, at) {
            (None, _) | (Some(_), Cut::AfterReply(_)) => Ok(()),
            (Some(_), _) => Err(ForkError::field(
                "/edit/reply",
                "replaces a reply that is kept: set at.turn, and at.after to \"reply\"",
            )),
        }
    }

    async fn definition(&self, copy: &Copy, source: &SourceRun) -> Result<Definition, ForkError> {
        let parent = copy.parent.and_then(|parent| self.planned.get(parent));
        let caller = parent.map(|parent| &*parent.agent);
        let settings = Some(&self.tree.request.settings).filter(|_| copy.parent.is_none());
        let resolved = definitions::resolve(self.engine, source, self.request, caller, settings);
        let mut definition = resolved.await?;
        if copy.parent.is_none() {
            definitions::apply_to_root(self.engine, self.request, &mut definition)?;
        }
        let root = self.planned.first().map(|root| &*root.agent);
        let (edit, budgets) = (&self.request.edit, &self.period_budgets);
        let replaces_model = self.is_forked(copy.source) && edit.model.is_some();
        if !replaces_model && self.may_have_clients_model(caller, &definition.agent) {
            prepare::check_requested_price(self.engine, &definition.agent, root, budgets)?;
        }
        if self.is_forked(copy.source) {
            definitions::apply_edit(self.engine, self.request, root, budgets, &mut definition)?;
        }
        if copy.parent.is_none() || self.is_forked(copy.source) {
            prepare::check_provider(self.engine, &definition.agent)?;
        }
        Ok(definition)
    }

    /// Whether a client may have chosen the model of this copy. The record of a child does not say whether an earlier fork
    /// has edited its model: so each that is not its agent's of today counts.
    fn may_have_clients_model(&self, caller: Option<&Agent>, agent: &Agent) -> bool {
        let Some(caller) = caller else {
            return self.tree.request.settings.model.is_some();
        };
        if agent.ad_hoc.is_some() {
            let settings = caller.subagent.as_ref();
            let model = settings.and_then(|settings| settings.model.as_ref());
            return agent.model != *model.unwrap_or(&caller.model);
        }
        let agents = self.engine.catalog.current();
        let current = agents.get(&agent.name).ok();
        current.is_none_or(|current| current.model != agent.model)
    }

    fn scope(&self, copy: &Copy, agent: &Agent) -> Result<Scope, ForkError> {
        let Some(parent) = copy.parent.and_then(|parent| self.planned.get(parent)) else {
            return Ok(Scope::root(copy.new, agent.delegation.max_depth));
        };
        recovery::child_scope(&parent.scope, &parent.agent, copy.new, agent).ok_or_else(|| {
            let reason = format!(
                "the definitions of today allow no run at the depth of {}, an agent {}",
                copy.source, agent.name
            );
            ForkError::field("/definition", reason)
        })
    }

    /// The copies of children whose calls continue, each with the events of its call.
    async fn planned_children(
        &self,
        parent: usize,
        depth: u8,
        open: Vec<(RunId, OpenCall)>,
    ) -> Result<Vec<(Copy, Vec<EventKind>)>, ForkError> {
        let store = self.engine.journal.store();
        let mut children = Vec::new();
        for (source, OpenCall { turn, call }) in open {
            let run = store
                .run(source)
                .await?
                .ok_or(ForkError::NotFound(source))?;
            let new = RunId::new();
            let called = EventKind::AgentCalled {
                tool_call_id: call.id.clone(),
                child_id: new,
                child_agent: run.agent,
                child_depth: depth + 1,
                task: shorten(run.task.as_deref().unwrap_or_default(), 80),
                background: false,
            };
            let copy = Copy {
                source,
                new,
                parent: Some(parent),
            };
            children.push((copy, vec![call_records::started(turn, &call), called]));
        }
        Ok(children)
    }

    /// Whether none of these calls, which started no child, had begun and must not be repeated.
    async fn check_interrupted(
        &self,
        source: &SourceRun,
        agent: &Agent,
        scope: &Scope,
        open: &[&OpenCall],
    ) -> Result<(), ForkError> {
        if open.is_empty() {
            return Ok(());
        }
        let run = &source.run;
        let calls = run_log::load_calls(self.engine, run.id).await?;
        let begun = open.iter().filter(|open| {
            let id = &open.call.id;
            calls.started.contains_key(id)
                && !calls.completed.contains(id)
                && !calls.is_suspended(&open.call)
        });
        let begun: Vec<&&OpenCall> = begun.collect();
        if begun.is_empty() {
            return Ok(());
        }
        let offer = self.engine.mcp.list_tools(&agent.mcp_servers).await;
        // Only the effects of the tools are looked at.
        let sub_agents = SubAgents::new(None, &self.engine.catalog);
        let toolbox = prepare::build_toolbox(self.engine, agent, scope, None, offer, &sub_agents);
        for open in begun {
            let call = toolbox.resolve(open.call.clone());
            // The calls of the fork have other keys.
            let effect = toolbox.effect(&call.name);
            if matches!(effect, Some(Effect::Mutating | Effect::Keyed)) {
                return Err(ForkError::NotForkable {
                    run: run.id,
                    call: call.id,
                    tool: shorten(&call.name, 200),
                });
            }
        }
        Ok(())
    }

    fn new_run(
        &self,
        copy: &Copy,
        source: &SourceRun,
        definition: &Definition,
        scope: &Scope,
        kept: &KeptSteps,
        started_calls: u64,
    ) -> Run {
        let new_run = &self.request.new_run;
        let is_root = copy.parent.is_none();
        let edit = self.is_forked(copy.source).then_some(&self.request.edit);
        let (mut reused_runs, mut reused) = self
            .tree
            .reused(&source.run, |call| kept.recorded_calls.contains(call));
        // Children of one reply may have been created in any order.
        let calls = kept.call_order();
        reused_runs.sort_by_key(|link| calls.get(link.tool_call_id.as_str()).copied());
        reused.turns += u64::from(kept.turns);
        let agent = &definition.agent;
        let message = edit.and_then(|edit| edit.message.clone());
        let usage = Usage {
            tool_calls: started_calls,
            ..Usage::default()
        };
        let labels = match (&self.request.labels, is_root) {
            (Some(labels), true) => labels.clone(),
            _ => source.run.labels.clone(),
        };
        Run {
            owner: new_run.owner.clone(),
            session: new_run.session.clone().filter(|_| is_root),
            tool_call_id: source.run.tool_call_id.clone(),
            agent_version: agent.version.clone(),
            input: message.map_or_else(|| source.run.input.clone(), |it| it.into_redacted()),
            task: source.run.task.clone(),
            label: source.run.label.clone(),
            labels,
            model: agent.model.model.clone(),
            turns: kept.turns,
            usage,
            tree: TreeUsage { runs: 1, usage },
            fork: Some(Box::new(Fork {
                from: None,
                copied_turns: kept.turns,
                copied_messages: kept.messages,
                assembles_prompt: self.assembles_prompt(copy, source),
                reused,
                reused_runs,
            })),
            ..Run::queued(scope, agent.name.clone())
        }
    }

    /// Whether the prompt of the copy is assembled when it starts: of a run that had none, and where the request says so.
    fn assembles_prompt(&self, copy: &Copy, source: &SourceRun) -> bool {
        if source.run.started_at.is_none() {
            let fork = source.run.fork.as_ref();
            return fork.is_none_or(|fork| fork.assembles_prompt);
        }
        let request = self.request;
        self.is_forked(copy.source)
            && request.edit.system.is_none()
            && (request.at.turn == Some(0) || request.definition == DefinitionChoice::Current)
    }

    /// Sums up what the runs below each run use and reuse.
    fn finish(mut self) -> ForkPlan {
        let positions: HashMap<RunId, usize> = (self.planned.iter().enumerate())
            .map(|(position, planned)| (planned.run.id, position))
            .collect();
        for position in (1..self.planned.len()).rev() {
            let run = &self.planned[position].run;
            let (tree, reused) = (run.tree, reused_by(run));
            let parent = run.parent_id.and_then(|parent| positions.get(&parent));
            let Some(parent) = parent.map(|parent| &mut self.planned[*parent].run) else {
                continue;
            };
            parent.tree.runs += tree.runs;
            parent.tree.usage.add(&tree.usage);
            if let Some(fork) = &mut parent.fork {
                source::add(&mut fork.reused, reused);
            }
        }
        if let Some(fork) = self
            .planned
            .first_mut()
            .and_then(|root| root.run.fork.as_mut())
        {
            fork.from = Some(self.forked_from);
        }
        ForkPlan {
            runs: self.planned,
            request: self.tree.request,
        }
    }
}

fn reused_by(run: &Run) -> Reused {
    run.fork
        .as_ref()
        .map_or_else(Reused::default, |fork| fork.reused)
}

/// The turn whose calls are executed next, or that is requested next.
fn first_own_turn(kept: &KeptSteps) -> u32 {
    match kept.open_calls.is_empty() && !kept.is_final {
        true => kept.turns + 1,
        false => kept.turns.max(1),
    }
}

/// A fork that needs a further turn must have one left.
fn check_max_turns(kept: &KeptSteps, agent: &Agent) -> Result<(), ForkError> {
    if kept.is_final || kept.turns < agent.limits.max_turns {
        return Ok(());
    }
    let reason = format!(
        "must be more than the {} turns that the fork keeps (the limit is {})",
        kept.turns, agent.limits.max_turns
    );
    Err(ForkError::field("/edit/max_turns", reason))
}
