//! The engine's front: starts runs, finds them, stops them. Knows nothing of HTTP.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, MaybeDone, maybe_done};
use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore, oneshot};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::catalog::prompt;
use crate::catalog::reload::Catalog;
use crate::domain::event::EventKind;
use crate::domain::run::{Run, RunId, Scope};
use crate::domain::usage::TreeUsage;
use crate::engine::ask::{DryRun, RunAsk, StartError};
use crate::engine::budget::Budgets;
use crate::engine::definitions::Definitions;
use crate::engine::drive;
use crate::engine::entry::{Accepted, Entry};
use crate::engine::journal::{Journal, Listener};
use crate::engine::live::{Deadline, LiveRun, LiveRuns, Tree};
use crate::engine::memory::{GcReport, Memories, MemoryEntry, MemoryError};
use crate::engine::parts::{Engine, Settings};
use crate::engine::quotas::Quotas;
use crate::engine::recovery::{Left, Revived};
use crate::engine::spans::Trace;
use crate::engine::{close, collect, record, recovery, remains, resolve, turn, webhook};
use crate::providers::registry::Registry;
use crate::store::{Change, Claim, Continuation, Opening, RunStore, Step, StoreError};
use crate::telemetry::metrics::{Metrics, Now};
use crate::telemetry::traces::Traces;
use crate::tools::mcp::Servers;
use crate::tools::shelf::Shelf;

/// The engine's front: cheap to clone.
#[derive(Clone)]
pub struct Runner {
    engine: Arc<Engine>,
}

impl Runner {
    /// Over these parts.
    pub fn new(
        catalog: Arc<Catalog>,
        providers: Registry,
        shelf: Shelf,
        mcp: Arc<Servers>,
        journal: Journal,
        memories: Memories,
        settings: Settings,
        traces: Option<Traces>,
    ) -> Self {
        let slots = Arc::new(Semaphore::new(
            settings.max_running.min(Semaphore::MAX_PERMITS),
        ));
        let engine = Engine {
            catalog,
            providers,
            shelf,
            mcp,
            journal,
            memories,
            definitions: Definitions::default(),
            left: Left::default(),
            live: LiveRuns::default(),
            metrics: Arc::default(),
            traces,
            settings,
            slots,
            queued: AtomicUsize::new(0),
            draining: AtomicBool::new(false),
            tasks: TaskTracker::new(),
            halt: CancellationToken::new(),
        };
        Self {
            engine: Arc::new(engine),
        }
    }

    /// Checks and accepts a root run, commits it, and sets it going. Returns its record as accepted.
    /// The run does not depend on the caller's future from then on.
    pub async fn start(&self, ask: RunAsk) -> Result<Arc<Run>, StartError> {
        let (root, place) = self.check(ask).await?;
        self.set_going(root, place).await
    }

    /// As [`Runner::start`], with a listener that stands before the run is set going: it hears the tree's first event
    /// and everything after it.
    pub async fn start_listening(&self, ask: RunAsk) -> Result<(Arc<Run>, Listener), StartError> {
        let (root, place) = self.check(ask).await?;
        let listener = self.engine.journal.bells().listen(root.live.scope.run);
        let run = self.set_going(root, place).await?;
        Ok((run, listener))
    }

    /// A root run for this wish, and where it begins.
    async fn check(&self, ask: RunAsk) -> Result<(Root, Place), StartError> {
        let engine = &self.engine;
        if self.is_draining() {
            return Err(StartError::Draining);
        }
        let agent = resolve::agent(engine, &ask).await?;
        resolve::check_provider(engine, &agent)?;
        let timeout = resolve::timeout(&engine.settings, &ask, &agent);
        if agent.budget.max_cost.is_some()
            && engine
                .settings
                .prices
                .get(&agent.model.to_string())
                .is_none()
        {
            tracing::warn!(
                agent = %agent.name,
                "Agent {} has a budget in money, but the price of {} is not known, so that nothing is counted for it: add [prices.\"{}\"] to the configuration", agent.name, agent.model, agent.model
            );
        }
        let webhook = webhook::of(&engine.settings, &ask, &agent)?;
        let place = self.place()?;
        let message = prompt::root_message(ask.input.as_deref(), ask.context.as_deref());
        let scope = Scope::root(RunId::new(), agent.delegation.max_depth);
        let tree = Arc::new(Tree {
            budgets: Budgets::default(),
            stream: ask.stream.unwrap_or(agent.stream),
            owner: ask.owner,
            quotas: Quotas::default(),
            is_revived: false,
            webhook,
            trace: Trace::of(engine.traces.as_ref(), ask.trace.as_deref(), scope.run),
        });
        let accounts = tree.budgets.open(&agent.budget, &[], &TreeUsage::default());
        // A root's own run counts; it is never refused, whatever its budget says.
        let _ = tree.budgets.take_run(&accounts);
        let definition = engine.definitions.text(&agent);
        let live = LiveRun::new(scope, agent, tree, None, accounts, definition);
        let run = Arc::new(Run {
            input: ask.input.unwrap_or_default(),
            labels: ask.labels,
            ..record::new(&live)
        });
        let root = Root {
            live,
            run,
            message,
            timeout,
            claim: ask.claim,
        };
        Ok((root, place))
    }

    /// Hands the run to a task of its own, and waits for its commit.
    async fn set_going(&self, root: Root, place: Place) -> Result<Arc<Run>, StartError> {
        let engine = &self.engine;
        engine.live.add(&root.live);
        let (accepted, told) = oneshot::channel();
        engine
            .tasks
            .spawn(root.work(Arc::clone(engine), place, accepted));
        told.await
            .unwrap_or(Err(StoreError::Closed))
            .map_err(StartError::from)
    }

    /// A slot, or a place in the queue.
    fn place(&self) -> Result<Place, StartError> {
        let engine = &self.engine;
        if let Ok(slot) = Arc::clone(&engine.slots).try_acquire_owned() {
            return Ok(Place::Slot(slot));
        }
        let most = engine.settings.max_queued;
        let (take, now) = (Ordering::AcqRel, Ordering::Acquire);
        match engine
            .queued
            .fetch_update(take, now, |queued| (queued < most).then_some(queued + 1))
        {
            Ok(_) => Ok(Place::Queue(QueueTicket(Arc::clone(engine)))),
            Err(queued) => Err(StartError::Full {
                running: self.load().0,
                queued,
            }),
        }
    }

    /// What that run would be. Calls no model and needs no key.
    pub async fn dry_run(&self, ask: RunAsk) -> Result<DryRun, StartError> {
        resolve::dry_run(&self.engine, ask).await
    }

    /// Waits until the run is terminal, at most for `limit`, and returns its record as it then stands; none where
    /// there is no such run.
    pub async fn wait(&self, id: RunId, limit: Duration) -> Result<Option<Arc<Run>>, StoreError> {
        if let Some(live) = self.engine.live.get(id).filter(|_| !limit.is_zero())
            && let Ok(Some(run)) = tokio::time::timeout(limit, live.ended()).await
        {
            return Ok(Some(run));
        }
        Ok(self.store().run(id).await?.map(Arc::new))
    }

    /// Asks a run and its descendants to stop. Returns with the record as it then stands: `cancelling`, or terminal
    /// where it has ended; none where there is no such run. [`Runner::wait`] settles it.
    pub async fn cancel(
        &self,
        id: RunId,
        reason: Option<String>,
    ) -> Result<Option<Arc<Run>>, StoreError> {
        let engine = &self.engine;
        let reason = reason.unwrap_or_else(|| "requested by client".to_owned());
        let mut live = engine.live.get(id);
        if live.is_none() {
            // A child that an earlier process left, whose parent has not come to it yet.
            if let Some(left) = engine.left.begin_cancel(id, &reason) {
                engine.journal.cancel_left(&left, reason.clone()).await?;
            } else {
                // Its parent may have come to it between the two looks.
                live = engine.live.get(id);
            }
        }
        if let Some(live) = live.filter(|live| live.begin_cancel(&reason)) {
            // Dropped or not, from here on the run stops; the record says so first.
            let _stop = live.stop.clone().drop_guard();
            let asked = vec![EventKind::RunCancelling {
                reason: reason.clone(),
            }];
            engine
                .journal
                .record(&live, Change::Cancelling { reason }, Vec::new(), asked)
                .await?;
        }
        Ok(self.store().run(id).await?.map(Arc::new))
    }

    /// Listens to a tree; none where it is not at work in this process (then the store has all there will be).
    /// Subscribe first, then read the store, then follow.
    pub fn listen(&self, root: RunId) -> Option<Listener> {
        let engine = &self.engine;
        engine.live.get(root)?;
        let listener = engine.journal.bells().listen(root);
        if engine.live.get(root).is_none() {
            // It ended between the two: nobody else would take the bell down.
            engine.journal.bells().silence(root);
            return None;
        }
        Some(listener)
    }

    /// The agent's memory, oldest first.
    pub async fn memory(&self, agent: &str) -> Result<Vec<MemoryEntry>, MemoryError> {
        collect::entries(&self.engine, agent).await
    }

    /// Has the agent's model analyse its memory, and trims it unless `dry_run`.
    pub async fn collect_memory(
        &self,
        agent: &str,
        dry_run: bool,
    ) -> Result<GcReport, MemoryError> {
        collect::collect(&self.engine, agent, dry_run).await
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
    pub fn load(&self) -> (usize, usize) {
        let running = self
            .engine
            .settings
            .max_running
            .saturating_sub(self.engine.slots.available_permits());
        (running, self.engine.queued.load(Ordering::Acquire))
    }

    /// Goes on with what an earlier process left unfinished, each run from its last committed step, and returns how many
    /// root runs that are. What cannot go on is failed as `interrupted`.
    pub async fn recover(&self) -> Result<usize, StoreError> {
        let engine = &self.engine;
        let revived = recovery::revive_all(engine).await?;
        let count = revived.len();
        for Revived { live, run, timeout } in revived {
            engine.live.add(&live);
            let slots = Arc::clone(&engine.slots);
            let mut slot: InLine = Box::pin(maybe_done(slots.acquire_owned().boxed()));
            // In line in their order, before anybody new.
            let _ = futures_util::poll!(slot.as_mut());
            // They were accepted once, so a full queue does not refuse them.
            engine.queued.fetch_add(1, Ordering::AcqRel);
            let left = LeftRoot {
                live,
                run,
                timeout: Duration::from_secs(timeout),
                slot,
                ticket: QueueTicket(Arc::clone(engine)),
            };
            engine.tasks.spawn(left.work(Arc::clone(engine)));
        }
        Ok(count)
    }

    /// What is counted for whoever watches the daemon.
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.engine.metrics
    }

    /// What stands now, to be shown beside what is counted.
    pub fn now(&self) -> Now {
        let queued = self.engine.queued.load(Ordering::Acquire);
        Now {
            // Those that wait are among the live ones.
            running: self.engine.live.count().saturating_sub(queued),
            queued,
            commits: self.store().commits(),
        }
    }

    /// Refuses new runs from now on.
    pub fn drain(&self) {
        self.engine.draining.store(true, Ordering::Release);
        self.engine.tasks.close();
    }

    /// Whether new runs are refused.
    pub fn is_draining(&self) -> bool {
        self.engine.draining.load(Ordering::Acquire)
    }

    /// Waits until every run has ended. [`Runner::drain`] comes first.
    pub async fn idle(&self) {
        self.engine.tasks.wait().await;
    }

    /// Drops every run where it stands and waits until all are gone. Their records stay as last committed.
    pub async fn halt(&self) {
        self.drain();
        self.engine.halt.cancel();
        self.idle().await;
    }
}

/// Where an accepted root run begins.
enum Place {
    Slot(OwnedSemaphorePermit),
    Queue(QueueTicket),
}

/// One run's place in the count of those that wait.
struct QueueTicket(Arc<Engine>);

impl Drop for QueueTicket {
    fn drop(&mut self) {
        self.0.queued.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A root run that has been checked.
struct Root {
    live: Arc<LiveRun>,
    /// One record for the store, the caller and the run itself: thousands wait at once.
    run: Arc<Run>,
    message: String,
    timeout: Duration,
    claim: Option<Claim>,
}

impl Root {
    async fn work(self, engine: Arc<Engine>, place: Place, accepted: Accepted) {
        let halt = engine.halt.clone();
        let id = self.live.scope.run;
        tokio::select! {
            () = self.run_to_its_end(&engine, place, accepted) => {}
            () = halt.cancelled() => park(&engine, id),
        }
    }

    async fn run_to_its_end(self, engine: &Arc<Engine>, place: Place, accepted: Accepted) {
        let Self {
            live,
            run,
            message,
            timeout,
            claim,
        } = self;
        let (_slot, entry) = match place {
            Place::Slot(slot) => (
                slot,
                Entry::New {
                    accepted: Some(accepted),
                    claim,
                },
            ),
            Place::Queue(ticket) => {
                let mut slot = pin!(maybe_done(Arc::clone(&engine.slots).acquire_owned()));
                // It stands in line before its caller is told, so that who comes after that stays behind it.
                let _ = futures_util::poll!(slot.as_mut());
                if !open_queued(engine, &live, &run, &message, timeout, claim, accepted).await {
                    forget(engine, live.scope.run);
                    return;
                }
                tokio::select! {
                    () = slot.as_mut() => {}
                    () = live.stop.cancelled() => return close::cancel_queued(engine, &live, run).await,
                }
                drop(ticket);
                let Some(Ok(slot)) = slot.take_output() else {
                    return;
                };
                (slot, Entry::Queued)
            }
        };
        // Its time starts when it starts, not while it is queued.
        live.set_deadline(Deadline::within(timeout));
        drive::drive(engine, &live, run, message, entry).await;
    }
}

/// Lets go of a root run where it stands.
fn park(engine: &Engine, id: RunId) {
    tracing::info!(run.id = %id, run.root = %id, depth = 0, "{id} stays as last committed; the next start goes on with it");
    forget(engine, id);
}

/// Takes a root run off the list of those at work, and its bell down.
fn forget(engine: &Engine, id: RunId) {
    engine.live.remove(id);
    engine.journal.bells().silence(id);
}

/// A place in line for a slot.
type InLine = Pin<Box<MaybeDone<BoxFuture<'static, Result<OwnedSemaphorePermit, AcquireError>>>>>;

/// A root run that an earlier process left.
struct LeftRoot {
    live: Arc<LiveRun>,
    run: Arc<Run>,
    timeout: Duration,
    slot: InLine,
    ticket: QueueTicket,
}

impl LeftRoot {
    async fn work(self, engine: Arc<Engine>) {
        let halt = engine.halt.clone();
        let id = self.live.scope.run;
        tokio::select! {
            () = self.run_to_its_end(&engine) => {}
            () = halt.cancelled() => return park(&engine, id),
        }
        if let Err(error) = recovery::sweep(&engine, id).await {
            tracing::error!(run.root = %id, "What is left of {id} could not be settled: {error}");
        }
    }

    async fn run_to_its_end(self, engine: &Arc<Engine>) {
        let Self {
            live,
            run,
            timeout,
            mut slot,
            ticket,
        } = self;
        let is_queued = run.started_at.is_none();
        // One that had started ends in order without a slot, its children first, where it is stopped or overdue.
        let _ = turn::bounded(&live, slot.as_mut()).await;
        drop(ticket);
        let _slot = slot.as_mut().take_output();
        if is_queued && live.stop.is_cancelled() {
            return close::cancel_queued(engine, &live, run).await;
        }
        let remains = match remains::load(engine, &run).await {
            Ok(remains) => remains,
            Err(error) => {
                tracing::error!(
                    run.id = %run.id, run.root = %run.root_id, agent = %run.agent, depth = run.depth.0,
                    "{} cannot go on, its record cannot be read: {error}", run.id
                );
                return drop(close::leave(engine, &live, Err(error)));
            }
        };
        // What a queued run was asked stands in its record; its prompt is assembled when it starts.
        let message = match &remains.prompt {
            Some((_, message)) => message.clone(),
            None => run.input.clone(),
        };
        tracing::info!(
            run.id = %run.id, run.root = %run.root_id, agent = %run.agent, depth = run.depth.0,
            "Going on with {}, which an earlier process left after {} replies", run.id, remains.replies.len()
        );
        let entry = match is_queued {
            true => {
                live.set_deadline(Deadline::within(timeout));
                Entry::Queued
            }
            false => Entry::Resumed(Box::new(remains)),
        };
        drive::drive(engine, &live, run, message, entry).await;
    }
}

/// Commits a run that waits for a slot; false where that failed.
async fn open_queued(
    engine: &Engine,
    live: &LiveRun,
    run: &Arc<Run>,
    message: &str,
    timeout: Duration,
    claim: Option<Claim>,
    accepted: Accepted,
) -> bool {
    let queued = vec![EventKind::RunQueued {
        parent_id: None,
        tool_call_id: None,
    }];
    // Its context is in no other place; the whole prompt takes this one's place when it starts.
    let asked = Step::Prompt {
        system: String::new(),
        message: message.to_owned(),
    };
    let continuation = Continuation {
        timeout: timeout.as_secs(),
        ..record::continuation(live)
    };
    let change = Change::Open(Box::new(Opening {
        run: Arc::clone(run),
        continuation,
        claim,
    }));
    let committed = engine
        .journal
        .record(live, change, vec![asked], queued)
        .await;
    let is_committed = committed.is_ok();
    // A caller that went away does not stop the run.
    let _ = accepted.send(committed.map(|_| Arc::clone(run)));
    is_committed
}
