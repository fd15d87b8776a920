//! Resumes unfinished runs from their record after a restart, or once a failed store works again: no run stays
//! `running` without an owner.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::sync::{Arc, OnceLock};

use tokio::time::Instant;

use crate::domain::agent::Agent;
use crate::domain::run::{Run, RunId, Scope, Status, now};
use crate::engine::context::{Engine, RunContext};
use crate::engine::record::agent_snapshots;
use crate::engine::state::active_run::{ActiveRun, RestoredState};
use crate::engine::state::ad_hoc_quotas::AdHocQuotas;
use crate::engine::state::budget::Budgets;
use crate::engine::state::deadline::{self, Deadline};
use crate::engine::state::evaluated_tree::EvaluatedTree;
use crate::engine::state::inbox::Inbox;
use crate::engine::state::pause::{Calls, Pause};
use crate::engine::state::prompt_leads::PromptLeads;
use crate::engine::state::provider_keys::ProviderKeys;
use crate::engine::state::root_permit::RootPermit;
use crate::engine::state::run_workdir::RunWorkdir;
use crate::engine::state::tree::{Tree, TreeSuspension};
use crate::engine::state::tree_trace::TreeTrace;
use crate::store::runs::UnfinishedRun;
use crate::store::{ResumeState, StoreError};

pub mod interrupted_runs;
pub mod sleeping;

/// Resumes an orphaned child below `parent`, once, and adds it to the active runs. `accounts` are those that it draws on
/// beside its own. `None` if it is not among the orphans or cannot be resumed.
pub fn recover_child(
    parent: &RunContext,
    child: RunId,
    accounts: &[usize],
) -> Option<(Arc<ActiveRun>, Run)> {
    let engine = &parent.engine;
    engine.orphans.take(child, |orphan| {
        let active_run = recover(engine, &orphan, Some(&parent.run), accounts)?;
        engine.active_runs.add(&active_run);
        engine.suspension.changed.notify_waiters();
        Some((active_run, orphan.run))
    })
}

/// A root run that can be resumed.
pub struct RecoveredRun {
    pub active_run: Arc<ActiveRun>,
    pub run: Arc<Run>,
    /// The time limit in seconds from its start, if it has not started.
    pub timeout: u64,
}

/// Recovers the root runs of `unfinished`, which has parents before their children, and keeps its order. Their children
/// become orphans until their parents reach them. Runs that cannot be resumed fail as `interrupted`, children first.
pub async fn recover_all(
    engine: &Engine,
    unfinished: Vec<UnfinishedRun>,
) -> Result<Vec<RecoveredRun>, StoreError> {
    let mut recovered = Vec::new();
    let mut recovered_ids = HashSet::new();
    let mut orphans = Vec::new();
    for unfinished_run in unfinished {
        match unfinished_run.run.parent_id {
            None => match recover(engine, &unfinished_run, None, &[]) {
                Some(active_run) => {
                    pin(engine, &active_run).await?;
                    recovered_ids.insert(unfinished_run.run.id);
                    let timeout = unfinished_run
                        .resume_state
                        .map_or(0, |continuation| continuation.timeout);
                    recovered.push(RecoveredRun {
                        active_run,
                        run: Arc::new(unfinished_run.run),
                        timeout,
                    });
                }
                None => orphans.push(unfinished_run),
            },
            Some(parent) if recovered_ids.contains(&parent) => {
                recovered_ids.insert(unfinished_run.run.id);
                engine.orphans.insert(unfinished_run);
            }
            Some(_) => orphans.push(unfinished_run),
        }
    }
    interrupted_runs::interrupt_all(engine, orphans).await?;
    Ok(recovered)
}

/// Pins the tree of a recovered root to the definitions that it was accepted with.
async fn pin(engine: &Engine, root: &ActiveRun) -> Result<(), StoreError> {
    let store = engine.journal.store();
    let pinned = engine
        .agent_pins
        .load(&**store, root.scope.run, &root.agent);
    root.tree.pin(pinned.await?);
    Ok(())
}

/// Restores a run: its agent, scope, accounts, usage, deadline and cancel; `None` if the record is incomplete.
/// `callers` are the accounts that it draws on beside its own.
pub fn recover(
    engine: &Engine,
    unfinished: &UnfinishedRun,
    parent: Option<&Arc<ActiveRun>>,
    callers: &[usize],
) -> Option<Arc<ActiveRun>> {
    let UnfinishedRun {
        run,
        resume_state: continuation,
        ..
    } = unfinished;
    let continuation = continuation.as_ref()?;
    let agent = agent_snapshots::parse(&continuation.definition)?;
    let tree = match parent {
        Some(parent) => Arc::clone(&parent.tree),
        None => Arc::new(tree(engine, run, continuation, &agent)),
    };
    restore(unfinished, agent, tree, parent, callers)
}

/// The tree of a root that continues from its record.
pub fn tree(engine: &Engine, run: &Run, continuation: &ResumeState, agent: &Agent) -> Tree {
    Tree {
        budgets: Budgets::default(),
        period_budgets: engine.period_budgets.of_run(run),
        root_permit: RootPermit::default(),
        is_streaming: continuation.stream,
        owner: run.owner.as_deref().map(Box::from),
        ad_hoc_quotas: AdHocQuotas::default(),
        is_recovered: true,
        has_slept: engine.sleeping_trees.contains(run.id),
        has_slept_here: engine.sleeping_trees.fell_asleep_here(run.id),
        keeps_memory: agent.keeps_memory,
        evaluation: agent
            .evaluation
            .as_deref()
            .map(|it| EvaluatedTree::new(it, &run.labels)),
        suspension: TreeSuspension::default(),
        webhooks: continuation.webhooks.as_slice().into(),
        trace: TreeTrace::for_tree(engine.traces.as_ref(), None, run.id, run.session.as_deref()),
        prompt_leads: PromptLeads::default(),
        is_chat: false,
        conversation_bytes: AtomicUsize::new(0),
        run_count: AtomicU64::new(run.tree.runs),
        provider_keys: ProviderKeys::from_record(&agent.given_keys),
        node_labels: Arc::default(),
        pinned_agents: OnceLock::new(),
    }
}

/// The scope of a child of that run; `None` if it would be deeper than the limits allow.
pub fn child_scope(parent: &Scope, caller: &Agent, child: RunId, agent: &Agent) -> Option<Scope> {
    let limit = match agent.ad_hoc {
        Some(_) => parent.max_ad_hoc_depth(caller.subagent_settings().max_depth),
        None => parent.max_depth,
    };
    parent.child(child, agent.delegation.max_depth, limit)
}

/// Like [`recover`], of this agent in this tree.
pub fn restore(
    unfinished: &UnfinishedRun,
    agent: Arc<Agent>,
    tree: Arc<Tree>,
    parent: Option<&Arc<ActiveRun>>,
    callers: &[usize],
) -> Option<Arc<ActiveRun>> {
    let UnfinishedRun {
        run,
        resume_state: continuation,
        models,
    } = unfinished;
    let continuation = continuation.as_ref()?;
    let scope = match parent {
        None => Scope::root(run.id, agent.delegation.max_depth),
        Some(parent) => child_scope(&parent.scope, &parent.agent, run.id, &agent)?,
    };
    let accounts = tree.budgets.open_account(&agent.budget, callers, &run.tree);
    let recorded = RestoredState {
        agent_json: Arc::clone(&continuation.definition),
        workdir: RunWorkdir::with_id(continuation.workdir),
        usage: run.usage,
        tree_usage: run.tree,
        models: models.clone(),
        warnings: run.warnings.clone(),
        inbox: Inbox::unrestored(),
        is_held: continuation.is_held,
    };
    let active_run = ActiveRun::resume(scope, agent, tree, parent.cloned(), accounts, recorded);
    active_run.clock().waiting_since = continuation.waiting_since;
    if let Some((at, seconds)) = continuation.deadline {
        // The time that a run waited for approval does not count, also while no daemon ran.
        let since = continuation.waiting_since.unwrap_or_else(now);
        active_run.set_deadline(Deadline {
            at: Instant::now() + deadline::remaining_time(since.duration_until(at), seconds),
            seconds,
        });
        if continuation.waiting_since.is_some() {
            let mut clock = active_run.clock();
            clock.pause = Pause::Resuming(Calls::default());
            clock.recorded = run.waiting_for;
        }
    }
    if run.status == Status::Cancelling {
        active_run.cancel(
            run.cancel_reason
                .as_deref()
                .unwrap_or("requested by client"),
        );
    }
    Some(active_run)
}
