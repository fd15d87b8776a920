//! The task of one root run: waits for its permit, drives the run, and suspends it when the daemon shuts down.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::value::RawValue;
use tokio_util::sync::CancellationToken;

use crate::domain::counted::counted;
use crate::domain::event::EventKind;
use crate::domain::run::{Run, RunId, Status};
use crate::domain::waiting_for::WaitingFor;
use crate::engine::admission::acceptance::Acceptance;
use crate::engine::admission::placement;
use crate::engine::admission::run_permits::RunPermits;
use crate::engine::approval::pause;
use crate::engine::cluster::permits;
use crate::engine::context::{Engine, RunContext};
use crate::engine::control::cancel::{self, PendingCancels};
use crate::engine::control::cancel_anywhere::{self, Replacement};
use crate::engine::delete_at_end;
use crate::engine::history::run_log;
use crate::engine::record::journal;
use crate::engine::record::run_record;
use crate::engine::recovery::RecoveredRun;
use crate::engine::run_loop::drive;
use crate::engine::run_loop::ending::{Ending, LoopOutcome};
use crate::engine::run_loop::finish;
use crate::engine::run_loop::limits;
use crate::engine::run_loop::start::RunStart;
use crate::engine::state::active_run::ActiveRun;
use crate::engine::state::cluster_permits::QueuedTree;
use crate::engine::state::deadline::Deadline;
use crate::engine::state::prompt::RunInput;
use crate::engine::state::queued_bytes::HeldBytes;
use crate::engine::state::sessions::{SessionGuard, SessionKey};
use crate::engine::state::suspension::SuspendedTree;
use crate::engine::workdir;
use crate::fair::admission::{Admission, RunPermit};
use crate::record::entry::Entry;
use crate::standing_task;
use crate::store::{Change, IdempotencyClaim, NewRun, QueueEntry, ResumeState};

/// A root run that has been checked.
pub struct NewRoot {
    pub context: RunContext,
    /// One shared record for the store, the caller and the run: thousands of runs may wait at once.
    pub run: Arc<Run>,
    /// The messages for the model, without the session's history.
    pub input: RunInput,
    /// The time limit, from the run's start.
    pub timeout: Duration,
    pub claim: Option<IdempotencyClaim>,
    /// What the request set, for the run's first event.
    pub request: Option<Arc<RawValue>>,
    pub admission: Admission,
    /// Until it starts; `None` if it starts at once.
    pub held_bytes: Option<HeldBytes>,
    pub session_guard: Option<SessionGuard>,
    /// Its place in the queue of all nodes, if several share the database.
    pub entry: Option<QueuedTree>,
    /// See [`QueueEntry::known_runs`].
    pub known_runs: Option<Vec<RunId>>,
    /// Whether this node can drive it; else it is left to another one.
    pub is_here: bool,
    pub replacement: Replacement,
}

impl NewRoot {
    /// Commits the run, answers its caller, and drives the run until it ends or the daemon shuts down.
    pub async fn run_task(mut self: Box<Self>, entry: QueueEntry, acceptance: Acceptance) {
        let context = self.context.clone();
        delete_at_end::track(&context, &self.run);
        let mut session_guard = self.session_guard.take();
        let session_suspended = session_guard.as_ref().map(SessionGuard::suspended);
        tokio::select! {
            () = self.run_to_end(entry, acceptance, &mut session_guard) => {}
            () = context.engine.shutdown.cancelled() => return suspend(&context),
            () = pause::suspended(&context, session_suspended) => return park(&context).await,
        }
        keep_if_suspended(&context, session_guard);
    }

    async fn run_to_end(
        self: Box<Self>,
        entry: QueueEntry,
        acceptance: Acceptance,
        session_guard: &mut Option<SessionGuard>,
    ) {
        let timeout = self.timeout;
        let context = self.context.clone();
        // Both are boxed: a task has space for every future that it awaits, and thousands of runs wait for their providers.
        let begun = Box::pin(self.begin(entry, acceptance, session_guard)).await;
        let Some(BegunRoot {
            run,
            input,
            permit,
            start,
        }) = begun
        else {
            return;
        };
        // The run's time starts when it starts, not while it is queued.
        context.run.set_deadline(Deadline::within(timeout));
        let permits = RunPermits {
            run_permit: Some(permit),
            session_guard: Some(session_guard),
        };
        Box::pin(drive::drive(&context, run, input, start, permits)).await;
    }

    /// Waits for a permit; a run that has to wait is committed before. `None` if it ended meanwhile, or was not accepted.
    async fn begin(
        self: Box<Self>,
        entry: QueueEntry,
        acceptance: Acceptance,
        session_guard: &mut Option<SessionGuard>,
    ) -> Option<BegunRoot> {
        let Self {
            context,
            run,
            mut input,
            timeout,
            claim,
            request,
            admission: place,
            held_bytes: _held_bytes,
            replacement,
            ..
        } = *self;
        let admission = match place {
            Admission::Permit(permit) if entry.has_permit => {
                return Some(BegunRoot {
                    run,
                    input,
                    permit,
                    start: RunStart::New {
                        acceptance: Some(acceptance),
                        claim,
                        request,
                    },
                });
            }
            admission => admission,
        };
        let engine = &context.engine;
        if entry.is_here {
            workdir::record_id(&context).await;
        }
        let replaced = replaced_runs(session_guard.as_ref(), replacement);
        let cancels = cancel::begin_cancels(engine, replaced, run.id).await;
        let queued = EventKind::RunQueued {
            parent_id: None,
            tool_call_id: None,
            request,
        };
        let opening = opening_entry(&context.run, &run, &input, timeout, (claim, entry));
        if !commit_queued(&context, &run, (opening, queued), cancels, acceptance).await {
            return None;
        }
        input.drop_data();
        let acquired = limits::within_deadline(
            &context.run,
            acquire_permit(engine, session_guard.as_mut(), admission, run.id),
        )
        .await;
        let Ok(permit) = acquired else {
            let permits = RunPermits {
                run_permit: None,
                session_guard: Some(session_guard),
            };
            let ending = Ending::new(LoopOutcome::Cancelled);
            finish::finish_without_loop(&context, run, ending, permits).await;
            return None;
        };
        Some(BegunRoot {
            run,
            input,
            permit,
            start: RunStart::Queued,
        })
    }
}

/// A root run that may start.
struct BegunRoot {
    run: Arc<Run>,
    input: RunInput,
    permit: RunPermit,
    start: RunStart,
}

/// A root run that is resumed from its record.
pub struct ResumedRoot {
    pub context: RunContext,
    pub run: Arc<Run>,
    /// The time limit from the run's start, if it has not started.
    pub timeout: Duration,
    /// `None` if the run waits for approval: it needs no permit until it resumes.
    pub admission: Option<Admission>,
    pub session_guard: Option<SessionGuard>,
    /// Of a fork that is not committed yet: see [`QueueEntry::known_runs`].
    pub known_runs: Option<Vec<RunId>>,
}

impl ResumedRoot {
    /// Drives the run until it ends or the daemon shuts down.
    pub async fn run_task(mut self) {
        let context = self.context.clone();
        delete_at_end::track(&context, &self.run);
        let mut session_guard = self.session_guard.take();
        let session_suspended = session_guard.as_ref().map(SessionGuard::suspended);
        tokio::select! {
            () = self.run_to_end(&mut session_guard) => {}
            () = context.engine.shutdown.cancelled() => return suspend(&context),
            () = pause::suspended(&context, session_suspended) => return park(&context).await,
        }
        keep_if_suspended(&context, session_guard);
    }

    async fn run_to_end(self, session_guard: &mut Option<SessionGuard>) {
        let Self {
            context,
            run,
            timeout,
            admission,
            ..
        } = self;
        let is_queued = run.started_at.is_none();
        if admission.is_none() {
            // Before it may wait for one again.
            permits::release(&context.engine, run.id).await;
        }
        // A run that had started and was cancelled or is overdue ends without a permit, after its children.
        let permit = match admission {
            Some(admission) => {
                let bytes = run.input.text_bytes();
                let _held = is_queued.then(|| context.engine.queued_bytes.hold(bytes));
                let permit =
                    acquire_permit(&context.engine, session_guard.as_mut(), admission, run.id);
                limits::within_deadline(&context.run, permit).await.ok()
            }
            None => None,
        };
        let permits = RunPermits {
            run_permit: permit,
            session_guard: Some(session_guard),
        };
        // The copied children of a fork end in order, as those of a run that had started.
        if is_queued && permits.run_permit.is_none() && run.tree.runs <= 1 {
            let ending = Ending::new(LoopOutcome::Cancelled);
            finish::finish_without_loop(&context, run, ending, permits).await;
            return;
        }
        let recorded_run = match run_log::load(&context.engine, &run).await {
            Ok(recorded_run) => recorded_run,
            Err(error) => {
                finish::finish_without_loop(&context, run, error.into(), permits).await;
                return;
            }
        };
        let recorded_messages = &recorded_run.messages;
        let mut messages = context.run.inbox.lock().await;
        messages.restore(&recorded_messages.contents, recorded_messages.read);
        drop(messages);
        // The record of a queued run has its messages; its prompt is assembled when it starts.
        let input = recorded_run.input(&run);
        tracing::info!(
            run.id = %run.id, run.root = %run.root_id, agent = %run.agent, depth = run.depth.0,
            "Resuming {} from its record, after {}", run.id, counted(recorded_run.turns.len(), "reply")
        );
        let start = match is_queued {
            true => {
                context.run.set_deadline(Deadline::within(timeout));
                match run.fork {
                    Some(_) => {
                        RunStart::Forked(Box::new(recorded_run.without_prompt_of_fork(&run)))
                    }
                    None => RunStart::Queued,
                }
            }
            false => RunStart::Resumed(Box::new(recorded_run)),
        };
        drive::drive(&context, run, input, start, permits).await;
    }
}

/// Starts the tasks of recovered root runs. `kept_permits` are the permits and session places of suspended runs.
pub fn resume_all(
    engine: &Arc<Engine>,
    mut recovered: Vec<RecoveredRun>,
    mut kept_permits: HashMap<RunId, (Option<RunPermit>, Option<SessionGuard>)>,
) {
    // Runs that had started come first, because their time runs. The others keep their order, before any new run.
    recovered.sort_by_key(|root| root.run.started_at.is_none());
    let is_shared = engine.journal.store().cluster().is_some();
    for RecoveredRun {
        active_run,
        run,
        timeout,
    } in recovered
    {
        engine.active_runs.add(&active_run);
        let owner = run.owner.as_deref();
        let (permit, session_guard) = kept_permits.remove(&run.id).unwrap_or_default();
        let session_guard = session_guard.or_else(|| {
            if is_shared {
                return None;
            }
            let key = SessionKey {
                owner: run.owner.clone(),
                name: run.session.clone()?,
            };
            Some(engine.sessions.enter_accepted(key, run.id))
        });
        // A run that waits for approval needs no permit until it resumes. Children in the background work, or have ended.
        let is_ready = run.status != Status::Waiting || run.waiting_for == Some(WaitingFor::Agents);
        let admission = match permit {
            Some(permit) => Some(Admission::Permit(permit)),
            None => is_ready.then(|| {
                match session_guard.as_ref().is_some_and(SessionGuard::is_waiting) {
                    true => engine
                        .queue
                        .enter_accepted_deferred(owner, &active_run.agent.name),
                    false => engine.queue.enter_accepted(owner, &active_run.agent.name),
                }
            }),
        };
        let root = ResumedRoot {
            context: RunContext::new(engine, &active_run),
            run,
            timeout: Duration::from_secs(timeout),
            admission,
            session_guard,
            known_runs: None,
        };
        engine.tasks.spawn(root.run_task());
    }
}

/// Waits for the run's turn in its session, then for its permit.
async fn acquire_permit(
    engine: &Engine,
    session_guard: Option<&mut SessionGuard>,
    admission: Admission,
    root: RunId,
) -> RunPermit {
    if engine.journal.store().cluster().is_some() {
        // Given in the order of its session, too.
        engine.cluster_permits.granted(root).await;
    }
    if let Some(session_guard) = session_guard {
        session_guard.acquire().await;
        if engine.shutdown.is_cancelled() || session_guard.suspended().is_cancelled() {
            // The run before it in the session was suspended, and is resumed before this one at the next start.
            std::future::pending::<()>().await;
        }
    }
    admission.permit().await
}

/// Keeps a tree whose tasks have ended without an end of its root, if it is so.
fn keep_if_suspended(context: &RunContext, session_guard: Option<SessionGuard>) {
    let (engine, root) = (&context.engine, context.run.scope.run);
    if context.run.tree.suspension.is_asleep() {
        if let Some(guard) = session_guard
            .as_ref()
            .filter(|_| engine.draining.is_cancelled())
        {
            guard.suspended().cancel();
        }
        engine.cluster_permits.tree_ended(root);
        engine.sleeping_trees.settle(root, session_guard);
    } else if context.run.is_suspended() {
        keep_suspended(context, session_guard);
    }
}

/// Keeps a tree whose tasks have ended until the store works.
pub fn keep_suspended(context: &RunContext, session_guard: Option<SessionGuard>) {
    let engine = &context.engine;
    let tree = SuspendedTree::new(Arc::clone(&context.run), session_guard);
    if engine.suspension.add(tree) {
        let supervised = Arc::clone(engine);
        engine.tasks.spawn(async move {
            // While the daemon drains it is started again, too: it gives up the trees that are left.
            let supervise = |_| (supervised.supervise_suspended)(Arc::clone(&supervised));
            standing_task::run("Resuming runs", &supervised.shutdown, supervise).await;
        });
    }
}

/// Suspends a root run while the daemon drains.
async fn park(context: &RunContext) {
    let (engine, root) = (&context.engine, context.run.scope.run);
    let is_queued = engine.cluster_permits.is_waiting(root);
    suspend(context);
    if is_queued {
        permits::hand_over(engine, root).await;
    }
}

/// Suspends a root run until the next start of the daemon.
pub fn suspend(context: &RunContext) {
    let id = context.run.scope.run;
    tracing::info!(run.id = %id, run.root = %id, depth = 0, "{id} stays as last committed; the next start resumes it");
    unregister(context);
}

/// Removes a root run from the active runs and closes its event channel. Callers that wait for its end get no record of it and
/// read the store.
pub fn unregister(context: &RunContext) {
    let (engine, id) = (&context.engine, context.run.scope.run);
    engine.active_runs.remove(id);
    engine.cluster_permits.tree_ended(id);
    engine.journal.broadcaster().close(id);
    context.run.publish_end(None);
}

/// The runs of this process that a new one replaces, each with a token that is cancelled once the run was accepted.
fn replaced_runs(
    session_guard: Option<&SessionGuard>,
    replacement: Replacement,
) -> Vec<(RunId, CancellationToken)> {
    if !replacement.is_wanted {
        return Vec::new();
    }
    let accepted = CancellationToken::new();
    accepted.cancel();
    let mut runs = session_guard.map_or_else(Vec::new, SessionGuard::preceding_runs);
    runs.extend(
        replacement
            .here
            .into_iter()
            .map(|run| (run, accepted.clone())),
    );
    runs
}

/// The first record of a run that waits for a permit.
fn opening_entry(
    active_run: &ActiveRun,
    run: &Arc<Run>,
    input: &RunInput,
    timeout: Duration,
    (claim, entry): (Option<IdempotencyClaim>, QueueEntry),
) -> (Change, Entry) {
    // The messages are recorded nowhere else. The whole prompt replaces this entry when the run starts.
    let prompt = Entry::Prompted {
        system: String::new(),
        message: input.message.clone(),
        earlier: input.earlier.clone(),
        compaction: None,
    };
    let continuation = ResumeState {
        timeout: timeout.as_secs(),
        ..run_record::continuation(active_run)
    };
    let change = Change::Create(Box::new(NewRun {
        run: Arc::clone(run),
        resume_state: continuation,
        claim,
        entry,
        node_labels: Arc::clone(&active_run.tree.node_labels),
        pinned_agents: run_record::pinned_agents(active_run),
    }));
    (change, prompt)
}

/// Commits a run that waits for a permit, together with the cancels of the runs that it replaces. Returns whether it is for this
/// node to drive it.
async fn commit_queued(
    context: &RunContext,
    run: &Arc<Run>,
    ((change, prompt), queued): ((Change, Entry), EventKind),
    cancels: PendingCancels<'_>,
    acceptance: Acceptance,
) -> bool {
    let engine = &context.engine;
    let (is_here, has_requests) = match &change {
        Change::Create(new_run) => (new_run.entry.is_here, !new_run.entry.requests.is_empty()),
        _ => (true, false),
    };
    let write = journal::build_write(&context.run, change, vec![queued.into(), prompt]);
    let committed = engine
        .journal
        .append_with(&context.run, write, cancels.writes());
    let committed = committed.await;
    cancels.settle(&committed);
    let is_committed = committed.is_ok();
    match &committed {
        Ok(_) if is_here => {}
        Ok(_) => placement::offer(context),
        Err(_) if context.run.is_suspended() => {}
        Err(_) => unregister(context),
    }
    acceptance.answer(committed.map(|_| Arc::clone(run)));
    if is_committed && has_requests {
        cancel_anywhere::announce_requests(engine);
    }
    is_committed && is_here
}
