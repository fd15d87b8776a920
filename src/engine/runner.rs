//! The engine's front: starts runs, finds them, stops them. Knows nothing of HTTP.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::catalog::prompt;
use crate::catalog::reload::Catalog;
use crate::domain::run::{Run, RunId, Scope};
use crate::domain::usage::TreeUsage;
use crate::engine::admission::sessions::{OnBusy, SessionGuard, SessionKey, Sessions};
use crate::engine::approval::decision::{self, DecideError};
use crate::engine::cancel;
use crate::engine::context::{Engine, EngineDeps, RunContext};
use crate::engine::memory::memory::{GcReport, MemoryEntry, MemoryError};
use crate::engine::memory::memory_gc;
use crate::engine::prepare::{self, RunInput};
use crate::engine::record::agent_snapshots::AgentSnapshots;
use crate::engine::record::journal::Subscription;
use crate::engine::record::run_record;
use crate::engine::record::webhook_events;
use crate::engine::replay::recovery;
use crate::engine::replay::resume_suspended;
use crate::engine::replay::suspension::Suspension;
use crate::engine::request::{DryRun, RunRequest, StartError};
use crate::engine::root_run::{self, NewRoot};
use crate::engine::state::active_run::ActiveRun;
use crate::engine::state::active_runs::ActiveRuns;
use crate::engine::state::ad_hoc_quotas::AdHocQuotas;
use crate::engine::state::approval_decision::ApprovalDecision;
use crate::engine::state::budget::Budgets;
use crate::engine::state::orphans::OrphanedChildren;
use crate::engine::state::pending_approvals::PendingApprovals;
use crate::engine::state::provider_keys::ProviderKeys;
use crate::engine::state::root_permit::RootPermit;
use crate::engine::state::tree::{Tree, TreeSuspension};
use crate::engine::state::tree_trace::TreeTrace;
use crate::fair::admission::AdmissionQueue;
use crate::store::{RunStore, StoreError};
use crate::telemetry::metrics::{GaugeSnapshot, Metrics};

/// The engine's front: cheap to clone.
#[derive(Clone)]
pub struct Runner {
    engine: Arc<Engine>,
}

impl Runner {
    /// Over these parts.
    pub fn new(deps: EngineDeps) -> Self {
        let EngineDeps {
            catalog,
            providers,
            tool_registry,
            workdirs,
            mcp,
            journal,
            memories,
            settings,
            traces,
        } = deps;
        let queue = AdmissionQueue::new(settings.queue_limits());
        let active_runs = Arc::<ActiveRuns>::default();
        let runs = Arc::clone(&active_runs);
        // Not the engine: its last owner must not be the store's own thread.
        let suspend_tree = move |root| runs.suspend(root, &StoreError::Suspended);
        journal.store().on_write_failed(Box::new(suspend_tree));
        let engine = Engine {
            catalog,
            providers,
            tool_registry,
            workdirs,
            mcp,
            journal,
            memories,
            agent_snapshots: AgentSnapshots::default(),
            orphans: OrphanedChildren::default(),
            active_runs,
            suspension: Suspension::default(),
            supervise_suspended: resume_suspended::supervise,
            metrics: Arc::default(),
            traces,
            settings,
            queue,
            pending_approvals: PendingApprovals::default(),
            draining: CancellationToken::new(),
            sessions: Sessions::default(),
            tasks: TaskTracker::new(),
            shutdown: CancellationToken::new(),
        };
        Self {
            engine: Arc::new(engine),
        }
    }

    /// Checks and accepts a root run, commits it, and sets it going. Returns its record as accepted.
    /// The run does not depend on the caller's future from then on.
    pub async fn start(&self, request: RunRequest) -> Result<Arc<Run>, StartError> {
        let root = self.admit(request).await?;
        self.spawn(root).await
    }

    /// As [`Runner::start`], with a listener that stands before the run is set going: it hears the tree's first event
    /// and everything after it.
    pub async fn start_and_subscribe(
        &self,
        request: RunRequest,
    ) -> Result<(Arc<Run>, Subscription), StartError> {
        let root = self.admit(request).await?;
        let subscription = self
            .engine
            .journal
            .broadcaster()
            .subscribe(root.context.run.scope.run);
        let run = self.spawn(root).await?;
        Ok((run, subscription))
    }

    /// A root run for this wish, with its slot or its place in line.
    async fn admit(&self, request: RunRequest) -> Result<NewRoot, StartError> {
        let engine = &self.engine;
        if self.is_draining() {
            return Err(StartError::Draining);
        }
        if self.is_store_down() {
            return Err(StoreError::Suspended.into());
        }
        let agent = prepare::resolve_agent(engine, &request).await?;
        prepare::check_provider(engine, &agent)?;
        prepare::check_prices(engine, &request, &agent)?;
        let timeout = prepare::root_timeout(&engine.settings, &request, &agent);
        let webhooks = webhook_events::for_run(&engine.settings, &request, &agent)?;
        // In line before its caller is told, so that who comes after that stays behind it.
        let (id, session_guard) = match &request.session {
            Some(name) => {
                let key = SessionKey {
                    owner: request.owner.clone(),
                    name: name.clone(),
                };
                let must_be_free = request.on_busy == OnBusy::Reject;
                match engine.sessions.enter(key, must_be_free) {
                    Ok((id, session_guard)) => (id, Some(session_guard)),
                    Err((run, accepted)) => {
                        if request.claim.is_some() {
                            // It may be this very request, sent twice: its key says so once it is on the record.
                            accepted.cancelled().await;
                        }
                        let session = name.clone();
                        return Err(StartError::SessionBusy { session, run });
                    }
                }
            }
            None => (RunId::new(), None),
        };
        let owner = request.owner.as_deref();
        let admission = match session_guard.as_ref().is_some_and(SessionGuard::is_waiting) {
            true => engine.queue.enter_deferred(owner, &agent.name),
            false => engine.queue.enter(owner, &agent.name),
        };
        let admission = admission.map_err(StartError::QueueFull)?;
        let input = RunInput {
            earlier: request.messages,
            message: prompt::root_message(request.input.as_ref(), request.context.as_deref()),
            compaction: None,
        };
        let scope = Scope::root(id, agent.delegation.max_depth);
        let tree = Arc::new(Tree {
            budgets: Budgets::default(),
            root_permit: RootPermit::default(),
            is_streaming: request.stream.unwrap_or(agent.stream),
            owner: request.owner,
            ad_hoc_quotas: AdHocQuotas::default(),
            is_recovered: false,
            suspension: TreeSuspension::default(),
            webhooks,
            trace: TreeTrace::for_tree(engine.traces.as_ref(), request.trace.as_deref(), scope.run),
            run_count: AtomicU64::new(1),
            provider_keys: ProviderKeys::from_request(request.provider_keys),
        });
        let accounts = tree
            .budgets
            .open_account(&agent.budget, &[], &TreeUsage::default());
        // A root's own run counts; it is never refused, whatever its budget says.
        let _ = tree.budgets.count_run(&accounts);
        let agent_json = engine.agent_snapshots.agent_json(&agent);
        let active_run = ActiveRun::new(scope, agent, tree, None, accounts, agent_json);
        let run = Arc::new(Run {
            input: request.input.unwrap_or_default().into_redacted(),
            labels: request.labels,
            session: request.session,
            ..run_record::new_run(&active_run)
        });
        Ok(NewRoot {
            context: RunContext::new(engine, &active_run),
            run,
            input,
            timeout,
            claim: request.claim,
            admission,
            session_guard,
            cancels_previous: request.on_busy == OnBusy::CancelPrevious,
        })
    }

    /// Hands the run to a task of its own, and waits for its commit.
    async fn spawn(&self, root: NewRoot) -> Result<Arc<Run>, StartError> {
        let engine = &self.engine;
        let accepted_token = root.session_guard.as_ref().map(SessionGuard::accepted);
        let _accepted_guard = accepted_token.map(CancellationToken::drop_guard);
        engine.active_runs.add(&root.context.run);
        let (sender, receiver) = oneshot::channel();
        engine.tasks.spawn(root.run_task(sender));
        receiver
            .await
            .unwrap_or(Err(StoreError::Closed))
            .map_err(StartError::from)
    }

    /// What that run would be. Calls no model and needs no key.
    pub async fn dry_run(&self, request: RunRequest) -> Result<DryRun, StartError> {
        prepare::dry_run(&self.engine, request).await
    }

    /// Waits until the run is terminal, at most for `limit`, and returns its record as it then stands; none where
    /// there is no such run.
    pub async fn wait(&self, id: RunId, timeout: Duration) -> Result<Option<Arc<Run>>, StoreError> {
        if !timeout.is_zero()
            && let Ok(Some(run)) = tokio::time::timeout(timeout, self.wait_for_end(id)).await
        {
            return Ok(Some(run));
        }
        Ok(self.store().run(id).await?.map(Arc::new))
    }

    /// The record at a run's end, over suspensions of its tree; none where nobody drives it any more.
    async fn wait_for_end(&self, id: RunId) -> Option<Arc<Run>> {
        let Engine {
            active_runs,
            orphans,
            suspension,
            ..
        } = &*self.engine;
        loop {
            // Listens before it looks.
            let mut changed = pin!(suspension.changed.notified());
            changed.as_mut().enable();
            match active_runs.get(id) {
                Some(active_run) => match active_run.wait_for_end().await {
                    Some(run) => return Some(run),
                    None if active_run.is_suspended() => {}
                    None => return None,
                },
                // Its parent has not come to it yet.
                None if orphans.contains(id) => {}
                None => return None,
            }
            changed.await;
        }
    }

    /// Asks a run and its descendants to stop. Returns with the record as it then stands: `cancelling`, or terminal
    /// where it has ended; none where there is no such run. [`Runner::wait`] settles it.
    pub async fn cancel(
        &self,
        id: RunId,
        reason: Option<String>,
    ) -> Result<Option<Arc<Run>>, StoreError> {
        let reason = reason.unwrap_or_else(|| "requested by client".to_owned());
        let (sender, receiver) = oneshot::channel();
        let engine = Arc::clone(&self.engine);
        // In a task of its own: a client that goes away leaves no cancel half done.
        self.engine.tasks.spawn(async move {
            tokio::select! {
                cancelled = cancel::cancel(&engine, id, &reason) => drop(sender.send(cancelled)),
                () = engine.shutdown.cancelled() => {}
            }
        });
        receiver.await.unwrap_or(Err(StoreError::Closed))?;
        Ok(self.store().run(id).await?.map(Arc::new))
    }

    /// Takes a person's word on a tool call that waits for it, and returns the run's record once the word is committed.
    pub async fn decide(
        &self,
        id: RunId,
        call: &str,
        decision: ApprovalDecision,
    ) -> Result<Run, DecideError> {
        decision::decide(&self.engine, id, call, decision).await?;
        let run = self.store().run(id).await?;
        run.ok_or(DecideError::RunNotFound(id))
    }

    /// Whether this process drives the run.
    pub fn is_at_work(&self, id: RunId) -> bool {
        self.engine.active_runs.get(id).is_some()
    }

    /// Listens to a tree; none where it is not at work in this process (then the store has all there will be).
    /// Subscribe first, then read the store, then follow.
    pub fn subscribe(&self, root: RunId) -> Option<Subscription> {
        let engine = &self.engine;
        engine.active_runs.get(root)?;
        let subscription = engine.journal.broadcaster().subscribe(root);
        if engine.active_runs.get(root).is_none() {
            // It ended between the two: nobody else would take the bell down.
            engine.journal.broadcaster().close(root);
            return None;
        }
        Some(subscription)
    }

    /// The agent's memory of the key of this name, oldest first.
    pub async fn memory(
        &self,
        agent: &str,
        owner: Option<&str>,
    ) -> Result<Vec<MemoryEntry>, MemoryError> {
        memory_gc::entries(&self.engine, agent, owner).await
    }

    /// Has the agent's model analyse its memory of the key of this name, and trims it unless `dry_run`.
    pub async fn collect_memory(
        &self,
        agent: &str,
        key: Option<&str>,
        dry_run: bool,
    ) -> Result<GcReport, MemoryError> {
        memory_gc::collect(&self.engine, agent, key, dry_run).await
    }

    /// The catalogue that runs start from.
    pub fn catalog(&self) -> &Arc<Catalog> {
        &self.engine.catalog
    }

    /// The record.
    pub fn store(&self) -> &Arc<dyn RunStore> {
        self.engine.journal.store()
    }

    /// Root runs at work, and waiting for a slot.
    pub fn queue_load(&self) -> (usize, usize) {
        self.engine.queue.load()
    }

    /// Goes on with what an earlier process left unfinished, each run from its last committed step, and returns how many
    /// root runs that are. What cannot go on is failed as `interrupted`.
    pub async fn recover(&self) -> Result<usize, StoreError> {
        let engine = &self.engine;
        let unfinished = self.store().unfinished_runs().await?;
        let recovered = recovery::recover_all(engine, unfinished).await?;
        let count = recovered.len();
        if count > 0 {
            tracing::info!(
                "Going on with {count} root runs that an earlier process left unfinished"
            );
        }
        root_run::resume_all(engine, recovered, HashMap::new());
        Ok(count)
    }

    /// Whether a write failed and the store has not been seen to work since: nothing is accepted.
    pub fn is_store_down(&self) -> bool {
        self.engine.suspension.is_store_down()
    }

    /// What is counted for whoever watches the daemon.
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.engine.metrics
    }

    /// What stands now, to be shown beside what is counted.
    pub fn gauges(&self) -> GaugeSnapshot {
        let (_, queued) = self.queue_load();
        GaugeSnapshot {
            // The active runs include those that are queued and those that are idle.
            running: (self.engine.active_runs.count())
                .saturating_sub(queued + self.engine.active_runs.idle_count()),
            queued,
            commits: self.store().commit_count(),
        }
    }

    /// Refuses new runs from now on.
    pub fn drain(&self) {
        self.engine.draining.cancel();
        self.engine.tasks.close();
    }

    /// Whether new runs are refused.
    pub fn is_draining(&self) -> bool {
        self.engine.draining.is_cancelled()
    }

    /// Waits until every run has ended. [`Runner::drain`] comes first.
    pub async fn wait_idle(&self) {
        self.engine.tasks.wait().await;
    }

    /// Drops every run where it stands and waits until all are gone. Their records stay as last committed.
    pub async fn shut_down(&self) {
        self.drain();
        self.engine.shutdown.cancel();
        self.wait_idle().await;
    }
}
