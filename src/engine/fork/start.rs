//! Commits a planned fork, and continues its root.

use std::sync::Arc;
use std::time::Duration;

use serde_json::value::RawValue;

use crate::domain::event::EventKind;
use crate::domain::run::{Run, RunId};
use crate::domain::webhook::Webhook;
use crate::engine::admission::acceptance::Acceptance;
use crate::engine::admission::placement::{self, Placement};
use crate::engine::context::{Engine, RunContext};
use crate::engine::fork::plan::{ForkPlan, PlannedRun};
use crate::engine::fork::request::{ForkError, ForkRequest};
use crate::engine::prepare;
use crate::engine::record::journal;
use crate::engine::record::recorded_request;
use crate::engine::record::run_record;
use crate::engine::record::webhook_events;
use crate::engine::recovery;
use crate::engine::request::StartError;
use crate::engine::root_run::{self, ResumedRoot};
use crate::engine::state::cluster_permits::QueuedTree;
use crate::engine::state::provider_keys::ProviderKeys;
use crate::engine::state::sessions::SessionGuard;
use crate::engine::state::tree::Tree;
use crate::engine::state::tree_trace::TreeTrace;
use crate::engine::workdir;
use crate::fair::admission::Admission;
use crate::record::entry::RecordedEntry;
use crate::store::runs::UnfinishedRun;
use crate::store::turn_record::TurnEntry;
use crate::store::{Change, IdempotencyClaim, NewRun, QueueEntry, ResumeState, StoreError, Write};

/// A fork that has been checked.
pub struct NewFork {
    pub root: ResumedRoot,
    /// Its place in the queue of all nodes, if several share the database.
    pub entry: Option<QueuedTree>,
    /// Whether this node can drive it; else it is left to another one.
    is_here: bool,
    /// What its source did, and how it begins itself.
    entries: Vec<RecordedEntry>,
    turns: Vec<TurnEntry>,
    claim: Option<IdempotencyClaim>,
    resume_state: ResumeState,
    /// Parents before their children.
    children: Vec<(UnfinishedRun, Write)>,
}

/// How the new root enters the queue.
pub struct ForkAdmission {
    pub admission: Admission,
    pub session_guard: Option<SessionGuard>,
    /// See [`QueueEntry::known_runs`].
    pub known_runs: Option<Vec<RunId>>,
    pub placement: Placement,
    pub entry: Option<QueuedTree>,
}

/// The settings that the new root has of its own.
pub struct RootSettings {
    timeout: Duration,
    webhooks: Vec<Arc<Webhook>>,
    is_streaming: bool,
    /// What the request of the source set and what this one sets, for the first event.
    request: Option<Arc<RawValue>>,
}

impl RootSettings {
    pub fn new(
        engine: &Engine,
        request: &ForkRequest,
        plan: &ForkPlan,
    ) -> Result<Self, StartError> {
        let agent = &plan.root().agent;
        let mut new_run = request.new_run.clone();
        if plan.is_root_forked() {
            new_run.overrides.model.clone_from(&request.edit.model);
            new_run.overrides.params = request.edit.params.clone();
        }
        let recorded = recorded_request::merged(&plan.request.fields, &new_run);
        let overrides = &mut new_run.overrides;
        overrides.timeout = overrides.timeout.or(plan.request.timeout());
        let stream = new_run.stream.or(plan.request.settings.stream);
        Ok(Self {
            timeout: prepare::root_timeout(&engine.settings, &new_run, agent),
            webhooks: webhook_events::for_run(&engine.settings, &new_run, agent)?,
            is_streaming: stream.unwrap_or(agent.stream),
            request: recorded,
        })
    }
}

pub async fn prepare_fork(
    engine: &Arc<Engine>,
    request: &ForkRequest,
    plan: ForkPlan,
    settings: RootSettings,
    admission: ForkAdmission,
) -> Result<NewFork, ForkError> {
    let mut runs = plan.runs.into_iter();
    let incomplete = || ForkError::NotFound(request.source);
    let root = runs.next().ok_or_else(incomplete)?;
    let is_here = admission.placement.is_here;
    let resume_state = ResumeState {
        timeout: settings.timeout.as_secs(),
        stream: settings.is_streaming,
        webhooks: settings.webhooks,
        ..child_state(engine, &root, is_here).await
    };
    let mut children = Vec::new();
    for child in runs {
        children.push(child_write(engine, child, is_here).await);
    }
    let unfinished = UnfinishedRun {
        run: root.run,
        resume_state: Some(resume_state.clone()),
        models: Vec::new(),
    };
    let new_run = &request.new_run;
    let tree = Tree {
        trace: TreeTrace::for_tree(
            engine.traces.as_ref(),
            new_run.trace.as_deref(),
            unfinished.run.id,
            unfinished.run.session.as_deref(),
        ),
        provider_keys: ProviderKeys::from_request(new_run.provider_keys.clone()),
        node_labels: Arc::clone(&admission.placement.labels),
        ..recovery::tree(engine, &unfinished.run, &resume_state, &root.agent)
    };
    let active_run = recovery::restore(&unfinished, root.agent, Arc::new(tree), None, &[]);
    let active_run = active_run.ok_or_else(incomplete)?;
    active_run.tree.pin(root.pinned);
    let queued = EventKind::RunQueued {
        parent_id: None,
        tool_call_id: None,
        request: settings.request,
    };
    let forked = forked_event(request, &unfinished.run);
    let begun = [queued].into_iter().chain(forked).chain(root.events);
    let entries = journal::fork_entries(begun, root.steps);
    let ForkAdmission {
        admission,
        session_guard,
        known_runs,
        entry,
        ..
    } = admission;
    Ok(NewFork {
        is_here,
        entry,
        root: ResumedRoot {
            context: RunContext::new(engine, &active_run),
            run: Arc::new(unfinished.run),
            timeout: settings.timeout,
            admission: Some(admission),
            session_guard,
            known_runs,
        },
        entries,
        turns: root.turns,
        claim: new_run.claim.clone(),
        resume_state,
        children,
    })
}

fn forked_event(request: &ForkRequest, run: &Run) -> Option<EventKind> {
    let fork = run.fork.as_ref()?;
    Some(EventKind::RunForked {
        forked_from: fork.from?,
        turns: fork.copied_turns,
        reused: fork.reused,
        edited: request.edit.names(),
    })
}

/// What another process needs to continue a copied run.
async fn child_state(engine: &Arc<Engine>, planned: &PlannedRun, is_here: bool) -> ResumeState {
    // An error is reported when the run starts.
    let dir = match is_here && workdir::is_used(engine, &planned.agent) {
        true => workdir::open_dir(engine, &planned.agent, None).await.ok(),
        false => None,
    };
    ResumeState {
        definition: Arc::clone(&planned.agent_json),
        deadline: None,
        timeout: 0,
        stream: false,
        webhooks: Vec::new(),
        waiting_since: None,
        is_held: false,
        workdir: dir.map(|dir| dir.id()),
    }
}

async fn child_write(
    engine: &Arc<Engine>,
    planned: PlannedRun,
    is_here: bool,
) -> (UnfinishedRun, Write) {
    let resume_state = child_state(engine, &planned, is_here).await;
    let PlannedRun {
        run,
        steps,
        events,
        turns,
        ..
    } = planned;
    let queued = EventKind::RunQueued {
        parent_id: run.parent_id,
        tool_call_id: run.tool_call_id.clone(),
        request: None,
    };
    let change = Change::Create(Box::new(NewRun {
        run: Arc::new(run.clone()),
        resume_state: resume_state.clone(),
        claim: None,
        entry: QueueEntry::STARTED,
        node_labels: Arc::default(),
        pinned_agents: None,
    }));
    let begun = std::iter::once(queued).chain(events);
    let write = Write {
        entries: journal::fork_entries(begun, steps),
        turns,
        ..journal::inactive_write(&run, change, Vec::new())
    };
    let unfinished = UnfinishedRun {
        run,
        resume_state: Some(resume_state),
        models: Vec::new(),
    };
    (unfinished, write)
}

impl NewFork {
    pub fn id(&self) -> RunId {
        self.root.run.id
    }

    /// Commits the fork, answers its caller, and drives its root until it ends or the daemon shuts down.
    pub async fn run_task(self, acceptance: Acceptance) {
        let Self {
            mut root,
            is_here,
            entries,
            turns,
            claim,
            resume_state,
            children,
            ..
        } = self;
        let context = root.context.clone();
        let engine = &context.engine;
        let change = Change::Create(Box::new(NewRun {
            run: Arc::clone(&root.run),
            resume_state,
            claim,
            entry: QueueEntry {
                has_permit: false,
                known_runs: root.known_runs.clone(),
                requests: Vec::new(),
                is_here,
            },
            node_labels: Arc::clone(&context.run.tree.node_labels),
            pinned_agents: run_record::pinned_agents(&context.run),
        }));
        let (unfinished, writes): (Vec<_>, Vec<_>) = children.into_iter().unzip();
        let write = journal::build_fork_write(&context.run, change, entries, turns);
        let journal = &engine.journal;
        let committed = tokio::select! {
            committed = journal.append_with(&context.run, write, writes) => committed,
            () = engine.shutdown.cancelled() => Err(StoreError::Closed),
        };
        if let Err(error) = committed {
            match context.run.is_suspended() {
                // It may be in the record nevertheless.
                true => root_run::keep_suspended(&context, root.session_guard.take()),
                false => root_run::unregister(&context),
            }
            acceptance.answer(Err(error));
            return;
        }
        if !is_here {
            placement::offer(&context);
            acceptance.answer(Ok(root.run));
            return;
        }
        for child in unfinished {
            engine.orphans.insert(child);
        }
        acceptance.answer(Ok(Arc::clone(&root.run)));
        root.run_task().await;
    }
}
