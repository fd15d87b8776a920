//! Data that every part of the engine can reach.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use futures_util::future::BoxFuture;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::catalog::reload::Catalog;
use crate::domain::run::RunId;
use crate::engine::memories::Memories;
use crate::engine::record::agent_pins::AgentPins;
use crate::engine::record::agent_snapshots::AgentSnapshots;
use crate::engine::record::journal::Journal;
use crate::engine::recording::playback::{Playback, Playbacks};
use crate::engine::settings::Settings;
use crate::engine::state::active_run::ActiveRun;
use crate::engine::state::active_runs::ActiveRuns;
use crate::engine::state::client_calls::ClientCalls;
use crate::engine::state::cluster_permits::ClusterPermits;
use crate::engine::state::followed_trees::FollowedTrees;
use crate::engine::state::orphans::OrphanedChildren;
use crate::engine::state::pending_inputs::PendingInputs;
use crate::engine::state::period_budgets::PeriodBudgets;
use crate::engine::state::pinned_agents::SubAgents;
use crate::engine::state::queued_bytes::QueuedBytes;
use crate::engine::state::remote_followers::RemoteFollowers;
use crate::engine::state::rollouts::Rollouts;
use crate::engine::state::sent_requests::SentRequests;
use crate::engine::state::sessions::Sessions;
use crate::engine::state::sleeping_trees::SleepingTrees;
use crate::engine::state::suspension::Suspension;
use crate::engine::state::temporary_runs::TemporaryRuns;
use crate::engine::state::watched_runs::WatchedRuns;
use crate::fair::admission::AdmissionQueue;
use crate::providers::registry::ProviderRegistry;
use crate::store::leadership::Leadership;
use crate::telemetry::metrics::Metrics;
use crate::telemetry::traces::SpanSender;
use crate::tools::mcp::pool::McpConnectionPool;
use crate::tools::registry::ToolRegistry;
use crate::workdirs::registry::Workdirs;

pub struct EngineDeps {
    pub catalog: Arc<Catalog>,
    pub providers: ProviderRegistry,
    pub tool_registry: ToolRegistry,
    pub workdirs: Arc<Workdirs>,
    pub mcp: Arc<McpConnectionPool>,
    pub journal: Journal,
    pub memories: Memories,
    pub settings: Settings,
    pub period_budgets: PeriodBudgets,
    pub leadership: Leadership,
    /// `None` if traces are not exported.
    pub traces: Option<SpanSender>,
    /// Only for tests of agents: the recordings that runs are played back from.
    pub playbacks: Option<Playbacks>,
}

pub type SuperviseFn = fn(Arc<Engine>) -> BoxFuture<'static, ()>;

pub struct Engine {
    pub catalog: Arc<Catalog>,
    pub providers: ProviderRegistry,
    pub tool_registry: ToolRegistry,
    pub workdirs: Arc<Workdirs>,
    pub mcp: Arc<McpConnectionPool>,
    pub journal: Journal,
    pub memories: Memories,
    pub agent_snapshots: AgentSnapshots,
    pub agent_pins: AgentPins,
    pub rollouts: Rollouts,
    /// Child runs that an earlier process left unfinished.
    pub orphans: OrphanedChildren,
    pub active_runs: Arc<ActiveRuns>,
    /// Trees whose writes failed, until the store works again.
    pub suspension: Suspension,
    /// Trees of other nodes that clients of this one follow.
    pub followed: FollowedTrees,
    /// Trees of this node that other nodes follow.
    pub remote_followers: RemoteFollowers,
    /// Requests to runs of other nodes.
    pub sent_requests: Arc<SentRequests>,
    /// Runs of other nodes that somebody waits for.
    pub watched_runs: WatchedRuns,
    /// The task that resumes suspended trees; it ends when none is left.
    pub supervise_suspended: SuperviseFn,
    pub metrics: Arc<Metrics>,
    /// `None` if traces are not exported.
    pub traces: Option<SpanSender>,
    pub settings: Settings,
    pub period_budgets: PeriodBudgets,
    /// Whether this process does what one does for all that share the store.
    pub leadership: Leadership,
    /// The permits of root runs, and the runs that wait for one.
    pub queue: AdmissionQueue,
    /// Root runs at work that somebody may wait for: not those of scorers and evaluations.
    pub live_roots: AtomicUsize,
    pub queued_bytes: QueuedBytes,
    /// The limits on root runs of all nodes, if several share the database.
    pub cluster_permits: ClusterPermits,
    /// Wakes what claims trees.
    pub free_trees: Notify,
    /// Notified when an event has perhaps ended a wait.
    pub waits_ended: Notify,
    pub sleeping_trees: SleepingTrees,
    pub pending_inputs: PendingInputs,
    pub client_calls: ClientCalls,
    /// Runs that are deleted after their end.
    pub temporary_runs: Arc<TemporaryRuns>,
    /// Held while a message is recorded for a run that is not driven, and before the record of a recovered child is read,
    /// so that it has the message.
    pub inactive_inbox_lock: tokio::sync::Mutex<()>,
    /// Held while a pause or its end is recorded and until it is in force, so that the last recorded one is.
    pub hold_lock: tokio::sync::Mutex<()>,
    /// Cancelled when the daemon drains: new runs are refused, and runs that wait for approval are suspended.
    pub draining: CancellationToken,
    pub sessions: Sessions,
    /// Owns the task of every root run.
    pub tasks: TaskTracker,
    /// Cancelled for an immediate shutdown: every run is dropped and stays as last committed.
    pub shutdown: CancellationToken,
    /// See [`EngineDeps::playbacks`].
    pub playbacks: Option<Playbacks>,
}

/// Whether this process drives a run.
pub enum Driven {
    Now(Arc<ActiveRun>),
    /// Once its tree wakes, or its parent reaches it.
    Later,
    No,
}

impl Engine {
    pub async fn driven_here(&self, id: RunId) -> Driven {
        if let Some(active_run) = self.active_runs.get(id) {
            return Driven::Now(active_run);
        }
        let is_later = self.run_sleeps_here(id).await || self.orphans.contains(id);
        // In this order: it may have been woken meanwhile.
        match self.active_runs.get(id) {
            Some(active_run) => Driven::Now(active_run),
            None if is_later => Driven::Later,
            None => Driven::No,
        }
    }

    /// Whether the tree of this root sleeps, and no other process can wake it.
    pub fn sleeps_here(&self, root: RunId) -> bool {
        self.journal.store().cluster().is_none() && self.sleeping_trees.contains(root)
    }

    /// As [`Engine::sleeps_here`], for the tree of any run.
    async fn run_sleeps_here(&self, id: RunId) -> bool {
        if self.sleeps_here(id) {
            return true;
        }
        if self.journal.store().cluster().is_some() || self.sleeping_trees.count() == 0 {
            return false;
        }
        let run = self.journal.store().run(id).await.ok().flatten();
        run.is_some_and(|run| !run.status.is_terminal() && self.sleeps_here(run.root_id))
    }
}

/// A run that this process drives, and the engine that drives it.
#[derive(Clone)]
pub struct RunContext {
    pub engine: Arc<Engine>,
    pub run: Arc<ActiveRun>,
}

impl RunContext {
    pub fn new(engine: &Arc<Engine>, run: &Arc<ActiveRun>) -> Self {
        Self {
            engine: Arc::clone(engine),
            run: Arc::clone(run),
        }
    }

    /// The agents that the run can call.
    pub fn sub_agents(&self) -> SubAgents {
        let pinned = self.run.tree.pinned_agents.get();
        SubAgents::new(pinned.map(Arc::clone), &self.engine.catalog)
    }

    /// The recording that the run is played back from, in a test.
    pub fn playback(&self) -> Option<Arc<Playback>> {
        let playbacks = self.engine.playbacks.as_ref()?;
        playbacks.get(self.run.scope.root)
    }

    /// As [`RunContext::playback`], unless its models are live.
    pub fn model_playback(&self) -> Option<Arc<Playback>> {
        self.playback().filter(|playback| !playback.live.models)
    }

    /// As [`RunContext::playback`], unless its tools are live.
    pub fn tool_playback(&self) -> Option<Arc<Playback>> {
        self.playback().filter(|playback| !playback.live.tools)
    }
}
