//! The public face of the engine: starts and finds runs, waits for them; `runner_control` changes them. Knows nothing of HTTP.

use std::collections::{BTreeMap, HashMap};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::catalog::reload::Catalog;
use crate::domain::agent::Agent;
use crate::domain::counted::counted;
use crate::domain::memory_entry::MemoryEntry;
use crate::domain::run::{self, Run, RunId, Scope};
use crate::domain::usage::TreeUsage;
use crate::engine::admission::acceptance::Acceptance;
use crate::engine::admission::enter::{self, EnteredSession};
use crate::engine::admission::placement;
use crate::engine::approval::person_wait;
use crate::engine::capture::{RecordingError, capture_tree};
use crate::engine::cluster::{follow, wait};
use crate::engine::context::{Driven, Engine, EngineDeps, RunContext};
use crate::engine::control::cancel_anywhere;
use crate::engine::dry_run;
use crate::engine::fork::plan as fork_plan;
use crate::engine::fork::request::{ForkError, ForkRequest};
use crate::engine::fork::source::SourceTree;
use crate::engine::fork::start::{self as fork_start, ForkAdmission, NewFork, RootSettings};
use crate::engine::history::tree_reads;
use crate::engine::memories::{GcReport, MemoryError};
use crate::engine::memory_gc;
use crate::engine::node_tasks::resume_suspended;
use crate::engine::node_tasks::{self, claims};
use crate::engine::prepare;
use crate::engine::record::agent_pins::AgentPins;
use crate::engine::record::agent_snapshots::AgentSnapshots;
use crate::engine::record::recorded_request::recorded_request;
use crate::engine::record::run_record;
use crate::engine::record::webhook_events;
use crate::engine::recording::text;
use crate::engine::recovery;
use crate::engine::request::{DryRun, RunRequest, StartError};
use crate::engine::root_run::{self, NewRoot};
use crate::engine::state::active_run::ActiveRun;
use crate::engine::state::active_runs::ActiveRuns;
use crate::engine::state::broadcaster::Subscription;
use crate::engine::state::client_calls::ClientCalls;
use crate::engine::state::cluster_permits::{self, ClusterPermits};
use crate::engine::state::evaluated_tree::EvaluatedTree;
use crate::engine::state::followed_trees::FollowedTrees;
use crate::engine::state::orphans::OrphanedChildren;
use crate::engine::state::pending_inputs::PendingInputs;
use crate::engine::state::period_budgets::PeriodBudgets;
use crate::engine::state::pinned_agents::PinnedRoot;
use crate::engine::state::prompt::RunInput;
use crate::engine::state::provider_keys::ProviderKeys;
use crate::engine::state::queued_bytes::QueuedBytes;
use crate::engine::state::remote_followers::RemoteFollowers;
use crate::engine::state::rollouts::Rollouts;
use crate::engine::state::sessions::{OnBusy, SessionKey, Sessions};
use crate::engine::state::sleeping_trees::SleepingTrees;
use crate::engine::state::suspension::Suspension;
use crate::engine::state::tree::Tree;
use crate::engine::state::tree_trace::TreeTrace;
use crate::engine::state::watched_runs::WatchedRuns;
use crate::fair::admission::AdmissionQueue;
use crate::instruments::{CallCounters, Family};
use crate::store::cluster::TreeOwner;
use crate::store::leadership::Leadership;
use crate::store::run_store::RunStore;
use crate::store::{QueueEntry, StoreError};
use crate::telemetry::metrics::Metrics;

/// How long one look at a run waits for its end.
const MAX_WAIT: Duration = Duration::from_secs(3600);
/// Root runs of evaluations at work, unless there are fewer permits.
const MAX_BACKGROUND_RUNS: usize = 128;

/// Cheap to clone.
#[derive(Clone)]
pub struct Runner {
    pub(in crate::engine) engine: Arc<Engine>,
}

impl Runner {
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
            playbacks,
            period_budgets,
            leadership,
        } = deps;
        let limits = settings.queue_limits();
        let shared_permits = ClusterPermits::new(limits.clone());
        let queue = AdmissionQueue::new(match journal.store().cluster() {
            None => limits,
            Some(_) => cluster_permits::node_limits(limits),
        });
        let active_runs = Arc::<ActiveRuns>::default();
        let runs = Arc::clone(&active_runs);
        // The closure must not own the engine: the engine's last owner must not be the store's own thread.
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
            agent_pins: AgentPins::default(),
            rollouts: Rollouts::default(),
            orphans: OrphanedChildren::default(),
            active_runs,
            suspension: Suspension::default(),
            followed: FollowedTrees::default(),
            remote_followers: RemoteFollowers::default(),
            sent_requests: Arc::default(),
            watched_runs: WatchedRuns::default(),
            supervise_suspended: resume_suspended::supervise,
            metrics: Arc::default(),
            traces,
            queued_bytes: QueuedBytes::new(settings.runs.max_queued_bytes),
            settings,
            queue,
            live_roots: AtomicUsize::new(0),
            sleeping_trees: SleepingTrees::default(),
            cluster_permits: shared_permits,
            free_trees: Notify::new(),
            waits_ended: Notify::new(),
            pending_inputs: PendingInputs::default(),
            client_calls: ClientCalls::default(),
            temporary_runs: Arc::default(),
            inactive_inbox_lock: tokio::sync::Mutex::default(),
            hold_lock: tokio::sync::Mutex::default(),
            draining: CancellationToken::new(),
            sessions: Sessions::default(),
            tasks: TaskTracker::new(),
            shutdown: CancellationToken::new(),
            period_budgets,
            leadership,
            playbacks,
        };
        Self {
            engine: Arc::new(engine),
        }
    }

    /// Checks a root run, commits it and starts it. Returns its record as accepted. The run does not depend on the
    /// caller's future after that.
    pub async fn start(&self, request: RunRequest) -> Result<Arc<Run>, StartError> {
        let start = |request| async move { self.spawn(self.admit(request).await?).await };
        enter::start_in_order(&self.engine, request, start).await
    }

    /// Like [`Runner::start`], and subscribes before the run starts, so that no event of the tree is missed.
    pub async fn start_and_subscribe(
        &self,
        request: RunRequest,
    ) -> Result<(Arc<Run>, Subscription), StartError> {
        let start = |request| async move {
            let root = self.admit(request).await?;
            let id = root.context.run.scope.run;
            let subscription = self.engine.journal.broadcaster().subscribe(id);
            Ok((self.spawn(root).await?, subscription))
        };
        enter::start_in_order(&self.engine, request, start).await
    }

    /// Checks the request and makes a root run with its permit or its place in the queue.
    async fn admit(&self, mut request: RunRequest) -> Result<NewRoot, StartError> {
        let engine = &self.engine;
        self.check_accepting()?;
        let id = RunId::new();
        let (root, variant) = prepare::resolve_agent(engine, &request, Some(id)).await?;
        let PinnedRoot { mut agent, pinned } = root;
        let is_marked = run::are_marks(&request.labels);
        if is_marked {
            let agent = Arc::make_mut(&mut agent);
            agent.keeps_memory = true;
            agent.settings.memory.enabled = false;
        }
        let placement = placement::place(engine, &request, &agent)?;
        if request.playback.as_ref().is_none_or(|it| it.live.models) {
            prepare::check_provider(engine, &agent)?;
        }
        let message = prepare::check_input(&agent, &mut request).await?;
        let period_budgets = prepare::period_budgets(engine, &request, &agent.name);
        prepare::check_period_budgets(engine, &period_budgets).await?;
        let warnings = prepare::check_prices(engine, &request, &agent, &period_budgets)?;
        let timeout = prepare::root_timeout(&engine.settings, &request, &agent);
        let webhooks = match request.playback {
            None if is_marked => Vec::new(),
            None => webhook_events::for_run(&engine.settings, &request, &agent)?,
            // A test sends none.
            Some(_) => Vec::new(),
        };
        let EnteredSession {
            id,
            guard: session_guard,
            predecessors,
        } = self.enter_session(&request, id).await?;
        if let (Some(playbacks), Some(playback)) = (&engine.playbacks, &request.playback) {
            let redactor = &engine.settings.requests.redactor;
            playback.start_root(id, &agent.name, redactor);
            playbacks.insert(id, Arc::clone(playback));
        }
        let quota = (request.owner.as_deref(), &*agent.name);
        let admission = enter::enter_own_queue(engine, quota, session_guard.as_ref(), &placement)?;
        let is_behind = !predecessors.is_empty() || !placement.is_here;
        let entry = enter::enter_queue(engine, &request, &agent.name, is_behind).await?;
        let held_bytes = match placement.is_here {
            true => enter::hold_bytes(
                engine,
                (&admission, entry.as_ref()),
                &message,
                &request.messages,
            )?,
            false => None,
        };
        let recorded_request = recorded_request(&request);
        let input = RunInput {
            earlier: request.messages,
            message,
            compaction: None,
        };
        let scope = Scope::root(id, agent.delegation.max_depth);
        let keys = ProviderKeys::from_request(request.provider_keys);
        let tree = Arc::new(Tree {
            is_streaming: request.stream.unwrap_or(agent.stream),
            is_chat: request.is_chat,
            evaluation: agent
                .evaluation
                .as_deref()
                .map(|it| EvaluatedTree::new(it, &request.labels)),
            trace: TreeTrace::for_tree(
                engine.traces.as_ref(),
                request.trace.as_deref(),
                scope.run,
                request.session.as_deref(),
            ),
            node_labels: placement.labels,
            keeps_memory: is_marked,
            ..Tree::new(request.owner, period_budgets, webhooks, keys)
        });
        tree.pin(pinned);
        let accounts = tree
            .budgets
            .open_account(&agent.budget, &[], &TreeUsage::default());
        // The root counts as a run, but is never refused.
        let _ = tree.budgets.count_run(&accounts);
        let agent_json = engine.agent_snapshots.agent_json(&agent);
        let active_run = ActiveRun::new(scope, agent, tree, None, accounts, agent_json);
        for warning in warnings {
            active_run.warn(warning, None);
        }
        let run = Arc::new(Run {
            input: request.input.unwrap_or_default().into_redacted(),
            labels: request.labels,
            session: request.session,
            variant,
            warnings: active_run.warnings(),
            ..run_record::new_run(&active_run)
        });
        Ok(NewRoot {
            context: RunContext::new(engine, &active_run),
            run,
            input,
            timeout,
            claim: request.claim,
            request: recorded_request,
            admission,
            held_bytes,
            session_guard,
            known_runs: enter::known_runs(request.on_busy, &predecessors),
            is_here: placement.is_here,
            entry,
            replacement: cancel_anywhere::replace(engine, request.on_busy, predecessors, id)?,
        })
    }

    fn check_accepting(&self) -> Result<(), StartError> {
        if self.is_draining() {
            return Err(StartError::Draining);
        }
        self.store_error().map_or(Ok(()), |error| Err(error.into()))
    }

    /// Like [`Runner::start`], of a fork.
    pub async fn fork(&self, request: ForkRequest) -> Result<Arc<Run>, ForkError> {
        let fork = self.admit_fork(request).await?;
        self.spawn_fork(fork).await
    }

    /// Like [`Runner::start_and_subscribe`], of a fork.
    pub async fn fork_and_subscribe(
        &self,
        request: ForkRequest,
    ) -> Result<(Arc<Run>, Subscription), ForkError> {
        let fork = self.admit_fork(request).await?;
        let subscription = self.engine.journal.broadcaster().subscribe(fork.id());
        Ok((self.spawn_fork(fork).await?, subscription))
    }

    async fn admit_fork(&self, request: ForkRequest) -> Result<NewFork, ForkError> {
        let engine = &self.engine;
        self.check_accepting()?;
        let source = SourceTree::load(engine, request.source).await?;
        let source = source.ok_or(ForkError::NotFound(request.source))?;
        // As late as possible: if another node accepts a run of the session before the fork is committed, the fork is refused.
        let EnteredSession {
            id,
            guard: session_guard,
            predecessors,
        } = self.enter_session(&request.new_run, RunId::new()).await?;
        let plan = fork_plan::plan(engine, &request, source, id).await?;
        let root = &plan.root().run;
        let period_budgets = engine.period_budgets.of_run(root);
        prepare::check_period_budgets(engine, &period_budgets).await?;
        let settings = RootSettings::new(engine, &request, &plan)?;
        let agent = &plan.root().agent;
        let placement = placement::place(engine, &request.new_run, agent)?;
        let quota = (request.new_run.owner.as_deref(), &*agent.name);
        let admission = enter::enter_own_queue(engine, quota, session_guard.as_ref(), &placement)?;
        let is_behind = !predecessors.is_empty() || !placement.is_here;
        let entry = enter::enter_queue(engine, &request.new_run, &agent.name, is_behind).await?;
        let admission = ForkAdmission {
            admission,
            session_guard,
            // A fork cancels none.
            known_runs: (request.new_run.on_busy == OnBusy::Reject).then(Vec::new),
            placement,
            entry,
        };
        fork_start::prepare_fork(engine, &request, plan, settings, admission).await
    }

    async fn spawn_fork(&self, mut fork: NewFork) -> Result<Arc<Run>, ForkError> {
        self.engine.active_runs.add(&fork.root.context.run);
        let entry = fork.entry.take();
        let (acceptance, receiver) = Acceptance::new(fork.root.session_guard.as_ref(), entry);
        self.engine.tasks.spawn(fork.run_task(acceptance));
        Ok(receiver.await.unwrap_or(Err(StoreError::Closed))?)
    }

    /// Enters the run's session, where it gets another id. That happens before the caller is answered, so that the runs of a
    /// session are ordered by arrival.
    async fn enter_session(
        &self,
        request: &RunRequest,
        id: RunId,
    ) -> Result<EnteredSession, StartError> {
        let Some(name) = &request.session else {
            return Ok(EnteredSession::new(id, None));
        };
        if let Some(cluster) = self.store().cluster() {
            return enter::enter_shared_session(cluster, request, name).await;
        }
        let key = SessionKey {
            owner: request.owner.clone(),
            name: name.clone(),
        };
        let must_be_free = request.on_busy == OnBusy::Reject;
        let mut awaited = None;
        loop {
            let (run, accepted) = match self.engine.sessions.enter(key.clone(), must_be_free) {
                Ok((id, session_guard)) => {
                    return Ok(EnteredSession::new(id, Some(session_guard)));
                }
                Err(busy) => busy,
            };
            // A client that has seen the end of the run finds the session free: the run leaves it right after the commit.
            if awaited != Some(run) && self.is_recorded_as_ended(run).await {
                self.wait_for_end(run).await;
                awaited = Some(run);
                continue;
            }
            if request.claim.is_some() {
                // The run in the session may be this very request, sent twice: its idempotency key shows that once it
                // is recorded.
                accepted.cancelled().await;
            }
            let session = name.clone();
            return Err(StartError::SessionBusy { session, run });
        }
    }

    async fn is_recorded_as_ended(&self, id: RunId) -> bool {
        let record = self.store().run(id).await.ok().flatten();
        record.is_some_and(|run| run.status.is_terminal())
    }

    /// Starts the run's task and waits until the run is committed.
    async fn spawn(&self, mut root: NewRoot) -> Result<Arc<Run>, StartError> {
        let engine = &self.engine;
        engine.active_runs.add(&root.context.run);
        let queue_entry = QueueEntry {
            has_permit: root.entry.as_ref().is_none_or(|entry| entry.has_permit),
            known_runs: root.known_runs.take(),
            requests: std::mem::take(&mut root.replacement.requests),
            is_here: root.is_here,
        };
        let entry = root.entry.take();
        let (acceptance, receiver) = Acceptance::new(root.session_guard.as_ref(), entry);
        engine
            .tasks
            .spawn(Box::new(root).run_task(queue_entry, acceptance));
        receiver
            .await
            .unwrap_or(Err(StoreError::Closed))
            .map_err(StartError::from)
    }

    /// Returns what the run would be. Sends nothing to a model and needs no key.
    pub async fn dry_run(&self, request: RunRequest) -> Result<DryRun, StartError> {
        dry_run::dry_run(&self.engine, request).await
    }

    /// Waits until the run is terminal, however long that takes; `None` if there is no such run.
    pub async fn wait_until_ended(&self, id: RunId) -> Result<Option<Arc<Run>>, StoreError> {
        loop {
            match self.wait(id, MAX_WAIT).await? {
                Some(run) if !run.status.is_terminal() => {}
                ended => return Ok(ended),
            }
        }
    }

    /// Waits until the run is terminal, at most for `timeout`, and returns its record; `None` if there is no such run.
    pub async fn wait(&self, id: RunId, timeout: Duration) -> Result<Option<Arc<Run>>, StoreError> {
        if !timeout.is_zero()
            && let Ok(Some(run)) = tokio::time::timeout(timeout, self.wait_for_end(id)).await
        {
            return Ok(Some(run));
        }
        Ok(self.run(id).await?.map(Arc::new))
    }

    /// Like [`Runner::wait`], but also returns when the run comes to wait for a person. `seen` is a record in which it
    /// waits for one already: then it returns when it waits no more, or for other calls.
    pub async fn wait_for_end_or_person(
        &self,
        id: RunId,
        seen: Option<&Run>,
        timeout: Duration,
    ) -> Result<Option<Arc<Run>>, StoreError> {
        let changed = async {
            let changed = tokio::select! {
                biased;
                ended = self.wait_for_end_here(id) => ended,
                waiting = person_wait::wait_for_person(&self.engine, id, seen) => Some(waiting),
            };
            if changed.is_some() {
                return changed;
            }
            let is_awaited =
                |run: &Run| run.status.is_terminal() || person_wait::has_changed(run, seen);
            // Boxed here and below: thousands of clients wait, most of them for runs of this process.
            Box::pin(wait::wait(&self.engine, id, is_awaited)).await
        };
        match tokio::time::timeout(timeout, changed).await {
            Ok(Some(run)) => Ok(Some(run)),
            Ok(None) | Err(_) => Ok(self.run(id).await?.map(Arc::new)),
        }
    }

    /// The record at the run's end, whichever node drives it; `None` if none does, or if the daemon stops.
    async fn wait_for_end(&self, id: RunId) -> Option<Arc<Run>> {
        match self.wait_for_end_here(id).await {
            Some(run) => Some(run),
            None => Box::pin(wait::wait(&self.engine, id, |run| run.status.is_terminal())).await,
        }
    }

    /// The record at the run's end, also if its tree is suspended in between; `None` if this process does not drive the
    /// run.
    async fn wait_for_end_here(&self, id: RunId) -> Option<Arc<Run>> {
        loop {
            // Subscribe before looking, so that no change is missed.
            let mut changed = pin!(self.engine.suspension.changed.notified());
            changed.as_mut().enable();
            match self.engine.driven_here(id).await {
                Driven::Now(active_run) => match active_run.wait_for_end().await {
                    Some(run) => return Some(run),
                    None if active_run.is_suspended() => {}
                    None => return None,
                },
                Driven::Later => {}
                Driven::No => return None,
            }
            changed.await;
        }
    }

    /// The record of a run, with whether its tree is suspended here.
    pub async fn run(&self, id: RunId) -> Result<Option<Run>, StoreError> {
        let run = self.store().run(id).await?;
        Ok(run.and_then(|run| self.with_suspensions(vec![run]).pop()))
    }

    /// Records of runs, with whether their trees are suspended here.
    pub fn with_suspensions(&self, mut runs: Vec<Run>) -> Vec<Run> {
        for run in runs.iter_mut().filter(|run| !run.status.is_terminal()) {
            run.suspended = self.engine.active_runs.suspension(run.root_id);
        }
        runs
    }

    /// Whether this process drives the run, or another node the tree of this root.
    pub async fn is_at_work(&self, id: RunId) -> bool {
        if !matches!(self.engine.driven_here(id).await, Driven::No) {
            return true;
        }
        match self.store().cluster() {
            Some(cluster) => matches!(cluster.tree_owner(id).await, Ok(TreeOwner::Node(_))),
            None => false,
        }
    }

    /// Whether other nodes may drive trees: what their models write may get lost on its way.
    pub fn may_lose_texts(&self) -> bool {
        self.store().cluster().is_some()
    }

    /// Subscribes to a tree; `None` if nothing drives it, and the store has all its events. Subscribe first, then read the
    /// store, then follow the subscription.
    pub async fn subscribe(&self, root: RunId) -> Option<Subscription> {
        let engine = &self.engine;
        if engine.followed.get(root).is_none()
            && let Some(subscription) = follow::subscribe_here(engine, root)
        {
            return Some(subscription);
        }
        follow::subscribe(engine, root, true).await
    }

    /// The agent's memory entries of this key, oldest first.
    pub async fn memory(
        &self,
        agent: &str,
        owner: Option<&str>,
    ) -> Result<Vec<MemoryEntry>, MemoryError> {
        memory_gc::entries(&self.engine, agent, owner).await
    }

    /// Asks the agent's model to analyse the memory of this key, and trims the memory unless `dry_run`.
    pub async fn collect_memory(
        &self,
        agent: &str,
        key: Option<&str>,
        dry_run: bool,
    ) -> Result<GcReport, MemoryError> {
        memory_gc::collect(&self.engine, agent, key, dry_run).await
    }

    /// Forgets the playback of a root that has ended.
    pub fn end_playback(&self, root: RunId) {
        if let Some(playbacks) = &self.engine.playbacks {
            playbacks.remove(root);
        }
    }

    /// The recording of a root's tree, as the text of a file.
    pub async fn recording(&self, root: &Run) -> Result<String, RecordingError> {
        let _permit = tree_reads::acquire(root.owner.as_deref()).await;
        let recording = capture_tree::capture(&self.engine, root).await?;
        let header = format!(
            "Recording of {} from {}. axed test runs it against the agents of today.",
            root.id,
            root.created_at.strftime("%Y-%m-%d")
        );
        Ok(text::to_toml(&recording, &header))
    }

    /// Whether the models of this provider cost nothing unless a price is configured.
    pub fn is_free(&self, provider: &str) -> bool {
        let provider = self.engine.providers.get(provider);
        provider.is_ok_and(|provider| provider.is_free)
    }

    /// An agent as a root, whose tree calls others in these definitions.
    pub fn pin(&self, called: BTreeMap<String, Arc<Agent>>, agent: &Agent) -> PinnedRoot {
        let engine = &self.engine;
        let snapshots = &engine.agent_snapshots;
        engine.agent_pins.pin_to(snapshots, called, agent)
    }

    /// Most root runs that what nobody waits for has at work.
    pub fn max_background_runs(&self) -> usize {
        let max_running = self.engine.settings.runs.max_running;
        (max_running / 2).clamp(1, MAX_BACKGROUND_RUNS)
    }

    pub fn period_budgets(&self) -> &PeriodBudgets {
        &self.engine.period_budgets
    }

    pub fn leadership(&self) -> &Leadership {
        &self.engine.leadership
    }

    /// Calls of tools by MCP server.
    pub fn mcp_calls(&self) -> &Family<CallCounters> {
        self.engine.mcp.calls()
    }

    pub fn catalog(&self) -> &Arc<Catalog> {
        &self.engine.catalog
    }

    pub fn store(&self) -> &Arc<dyn RunStore> {
        self.engine.journal.store()
    }

    /// How many root runs are running that are not for scorers or evaluations.
    pub fn live_runs(&self) -> usize {
        self.engine.live_roots.load(Ordering::Relaxed)
    }

    /// How many root runs are running, and how many wait for a permit.
    pub fn queue_load(&self) -> (usize, usize) {
        self.engine.queue.load()
    }

    /// Resumes the runs that an earlier process left unfinished from their last committed steps, and returns the number
    /// of root runs. Runs that cannot be resumed fail as `interrupted`. Of a database that several nodes share, those are
    /// resumed that no node drives, from now on.
    pub async fn recover(&self) -> Result<usize, StoreError> {
        let engine = &self.engine;
        if let Some(cluster) = self.store().cluster() {
            let count = claims::claim_all(engine, cluster).await?;
            node_tasks::start(engine);
            return Ok(count);
        }
        // They come before later runs of their sessions.
        let sleeping = recovery::sleeping::load(engine, None).await?.len();
        let unfinished = self.store().unfinished_runs().await?;
        let recovered = recovery::recover_all(engine, unfinished).await?;
        let count = recovered.len() + sleeping;
        if count > 0 {
            let runs = counted(count, "root run");
            tracing::info!("Resuming {runs} that an earlier process left unfinished");
        }
        root_run::resume_all(engine, recovered, HashMap::new());
        node_tasks::start(engine);
        Ok(count)
    }

    /// Why no run is accepted: a write failed and no probe has succeeded since.
    pub fn store_error(&self) -> Option<StoreError> {
        self.engine.suspension.store_error()
    }

    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.engine.metrics
    }

    pub fn drain(&self) {
        self.engine.draining.cancel();
        self.engine.tasks.close();
    }

    pub fn is_draining(&self) -> bool {
        self.engine.draining.is_cancelled()
    }

    /// Waits until every run has ended. Call [`Runner::drain`] first.
    pub async fn wait_idle(&self) {
        self.engine.tasks.wait().await;
    }

    /// Drops all runs and waits until their tasks have ended. Their records stay as last committed.
    pub async fn shut_down(&self) {
        self.drain();
        self.engine.shutdown.cancel();
        self.wait_idle().await;
        self.engine.followed.tasks.close();
        self.engine.followed.tasks.wait().await;
    }
}
