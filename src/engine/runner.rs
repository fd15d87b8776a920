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
use crate::engine::approval::{self, DecideError, Desk};
use crate::engine::ask::{DryRun, RunAsk, StartError};
use crate::engine::budget::Budgets;
use crate::engine::definitions::Definitions;
use crate::engine::journal::Listener;
use crate::engine::live::{LiveRun, LiveRuns, Tree, TreeSuspension};
use crate::engine::memory::{GcReport, MemoryEntry, MemoryError};
use crate::engine::parts::{Engine, Parts};
use crate::engine::provider_keys::ProviderKeys;
use crate::engine::quotas::Quotas;
use crate::engine::recovery::Left;
use crate::engine::remains::Decided;
use crate::engine::resolve::{self, Input};
use crate::engine::root::{self, Root};
use crate::engine::root_slot::RootSlot;
use crate::engine::sessions::{OnBusy, Seat, SessionKey, Sessions};
use crate::engine::spans::Trace;
use crate::engine::suspension::Suspension;
use crate::engine::{cancel, collect, record, recovery, take_up, webhook};
use crate::fair::queue::Queue;
use crate::store::{RunStore, StoreError};
use crate::telemetry::metrics::{Metrics, Now};

/// The engine's front: cheap to clone.
#[derive(Clone)]
pub struct Runner {
    engine: Arc<Engine>,
}

impl Runner {
    /// Over these parts.
    pub fn new(parts: Parts) -> Self {
        let Parts {
            catalog,
            providers,
            shelf,
            workdirs,
            mcp,
            journal,
            memories,
            settings,
            traces,
        } = parts;
        let queue = Queue::new(settings.limits());
        let live = Arc::<LiveRuns>::default();
        let at_work = Arc::clone(&live);
        // Not the engine: its last owner must not be the store's own thread.
        let gap = move |root| at_work.suspend(root, &StoreError::Suspended);
        journal.store().on_gap(Box::new(gap));
        let engine = Engine {
            catalog,
            providers,
            shelf,
            workdirs,
            mcp,
            journal,
            memories,
            definitions: Definitions::default(),
            left: Left::default(),
            live,
            suspension: Suspension::new(take_up::supervise),
            metrics: Arc::default(),
            traces,
            settings,
            queue,
            desk: Desk::default(),
            draining: CancellationToken::new(),
            sessions: Sessions::default(),
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
        let root = self.check(ask).await?;
        self.set_going(root).await
    }

    /// As [`Runner::start`], with a listener that stands before the run is set going: it hears the tree's first event
    /// and everything after it.
    pub async fn start_listening(&self, ask: RunAsk) -> Result<(Arc<Run>, Listener), StartError> {
        let root = self.check(ask).await?;
        let listener = self.engine.journal.bells().listen(root.live.scope.run);
        let run = self.set_going(root).await?;
        Ok((run, listener))
    }

    /// A root run for this wish, with its slot or its place in line.
    async fn check(&self, ask: RunAsk) -> Result<Root, StartError> {
        let engine = &self.engine;
        if self.is_draining() {
            return Err(StartError::Draining);
        }
        if self.is_store_down() {
            return Err(StoreError::Suspended.into());
        }
        let agent = resolve::agent(engine, &ask).await?;
        resolve::check_provider(engine, &agent)?;
        resolve::check_prices(engine, &ask, &agent)?;
        let timeout = resolve::timeout(&engine.settings, &ask, &agent);
        let webhooks = webhook::of(&engine.settings, &ask, &agent)?;
        // In line before its caller is told, so that who comes after that stays behind it.
        let (id, seat) = match &ask.session {
            Some(name) => {
                let key = SessionKey {
                    owner: ask.owner.clone(),
                    name: name.clone(),
                };
                let must_be_free = ask.on_busy == OnBusy::Reject;
                match engine.sessions.enter(key, must_be_free) {
                    Ok((id, seat)) => (id, Some(seat)),
                    Err((run, accepted)) => {
                        if ask.claim.is_some() {
                            // It may be this very request, sent twice: its key says so once it is on the record.
                            accepted.cancelled().await;
                        }
                        let session = name.clone();
                        return Err(StartError::Busy { session, run });
                    }
                }
            }
            None => (RunId::new(), None),
        };
        let owner = ask.owner.as_deref();
        let place = match seat.as_ref().is_some_and(Seat::waits) {
            true => engine.queue.stand_aside(owner, &agent.name),
            false => engine.queue.enter(owner, &agent.name),
        };
        let place = place.map_err(StartError::Full)?;
        let input = Input {
            earlier: ask.messages,
            message: prompt::root_message(ask.input.as_ref(), ask.context.as_deref()),
            compaction: None,
        };
        let scope = Scope::root(id, agent.delegation.max_depth);
        let tree = Arc::new(Tree {
            budgets: Budgets::default(),
            slot: RootSlot::default(),
            stream: ask.stream.unwrap_or(agent.stream),
            owner: ask.owner,
            quotas: Quotas::default(),
            is_revived: false,
            suspension: TreeSuspension::default(),
            webhooks,
            trace: Trace::of(engine.traces.as_ref(), ask.trace.as_deref(), scope.run),
            runs: AtomicU64::new(1),
            provider_keys: ProviderKeys::of(ask.provider_keys),
        });
        let accounts = tree.budgets.open(&agent.budget, &[], &TreeUsage::default());
        // A root's own run counts; it is never refused, whatever its budget says.
        let _ = tree.budgets.take_run(&accounts);
        let definition = engine.definitions.text(&agent);
        let live = LiveRun::new(scope, agent, tree, None, accounts, definition);
        let run = Arc::new(Run {
            input: ask.input.unwrap_or_default().into_shown(),
            labels: ask.labels,
            session: ask.session,
            ..record::new(&live)
        });
        Ok(Root {
            live,
            run,
            input,
            timeout,
            claim: ask.claim,
            place,
            seat,
            cancels: ask.on_busy == OnBusy::CancelPrevious,
        })
    }

    /// Hands the run to a task of its own, and waits for its commit.
    async fn set_going(&self, root: Root) -> Result<Arc<Run>, StartError> {
        let engine = &self.engine;
        let accepted = root.seat.as_ref().map(Seat::accepted);
        let _heard = accepted.map(CancellationToken::drop_guard);
        engine.live.add(&root.live);
        let (accepted, told) = oneshot::channel();
        engine.tasks.spawn(root.work(Arc::clone(engine), accepted));
        told.await
            .unwrap_or(Err(StoreError::Closed))
            .map_err(StartError::from)
    }

    /// What that run would be. Calls no model and needs no key.
    pub async fn dry_run(&self, ask: RunAsk) -> Result<DryRun, StartError> {
        resolve::dry_run(&self.engine, ask).await
    }

    /// Waits until the run is terminal, at most for `limit`, and returns its record as it then stands; none where
    /// there is no such run.
    pub async fn wait(&self, id: RunId, limit: Duration) -> Result<Option<Arc<Run>>, StoreError> {
        if !limit.is_zero()
            && let Ok(Some(run)) = tokio::time::timeout(limit, self.ended(id)).await
        {
            return Ok(Some(run));
        }
        Ok(self.store().run(id).await?.map(Arc::new))
    }

    /// The record at a run's end, over suspensions of its tree; none where nobody drives it any more.
    async fn ended(&self, id: RunId) -> Option<Arc<Run>> {
        let Engine {
            live,
            left,
            suspension,
            ..
        } = &*self.engine;
        loop {
            // Listens before it looks.
            let mut changed = pin!(suspension.changed.notified());
            changed.as_mut().enable();
            match live.get(id) {
                Some(live) => match live.ended().await {
                    Some(run) => return Some(run),
                    None if live.is_suspended() => {}
                    None => return None,
                },
                // Its parent has not come to it yet.
                None if left.contains(id) => {}
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
        let (answer, cancelled) = oneshot::channel();
        let engine = Arc::clone(&self.engine);
        // In a task of its own: a client that goes away leaves no cancel half done.
        self.engine.tasks.spawn(async move {
            tokio::select! {
                cancelled = cancel::cancel(&engine, id, &reason) => drop(answer.send(cancelled)),
                () = engine.halt.cancelled() => {}
            }
        });
        cancelled.await.unwrap_or(Err(StoreError::Closed))?;
        Ok(self.store().run(id).await?.map(Arc::new))
    }

    /// Takes a person's word on a tool call that waits for it, and returns the run's record once the word is committed.
    pub async fn decide(
        &self,
        id: RunId,
        call: &str,
        decided: Decided,
    ) -> Result<Run, DecideError> {
        approval::decide(&self.engine, id, call, decided).await?;
        let run = self.store().run(id).await?;
        run.ok_or(DecideError::NoSuchRun(id))
    }

    /// Whether this process drives the run.
    pub fn is_at_work(&self, id: RunId) -> bool {
        self.engine.live.get(id).is_some()
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

    /// The agent's memory of the key of this name, oldest first.
    pub async fn memory(
        &self,
        agent: &str,
        key: Option<&str>,
    ) -> Result<Vec<MemoryEntry>, MemoryError> {
        collect::entries(&self.engine, agent, key).await
    }

    /// Has the agent's model analyse its memory of the key of this name, and trims it unless `dry_run`.
    pub async fn collect_memory(
        &self,
        agent: &str,
        key: Option<&str>,
        dry_run: bool,
    ) -> Result<GcReport, MemoryError> {
        collect::collect(&self.engine, agent, key, dry_run).await
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
        self.engine.queue.load()
    }

    /// Goes on with what an earlier process left unfinished, each run from its last committed step, and returns how many
    /// root runs that are. What cannot go on is failed as `interrupted`.
    pub async fn recover(&self) -> Result<usize, StoreError> {
        let engine = &self.engine;
        let unfinished = self.store().unfinished().await?;
        let revived = recovery::revive_all(engine, unfinished).await?;
        let count = revived.len();
        if count > 0 {
            tracing::info!(
                "Going on with {count} root runs that an earlier process left unfinished"
            );
        }
        root::go_on(engine, revived, HashMap::new());
        Ok(count)
    }

    /// Whether a write failed and the store has not been seen to work since: nothing is accepted.
    pub fn is_store_down(&self) -> bool {
        self.engine.suspension.is_down()
    }

    /// What is counted for whoever watches the daemon.
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.engine.metrics
    }

    /// What stands now, to be shown beside what is counted.
    pub fn now(&self) -> Now {
        let (_, queued) = self.load();
        Now {
            // The live runs include those that are queued and those that are idle.
            running: (self.engine.live.count()).saturating_sub(queued + self.engine.live.idle()),
            queued,
            commits: self.store().commits(),
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
