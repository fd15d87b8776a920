//! What every part of the engine can reach: the catalogue, the providers, the journal, the active runs. Only data.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::catalog::reload::Catalog;
use crate::engine::admission::sessions::Sessions;
use crate::engine::memory::memory::Memories;
use crate::engine::record::agent_snapshots::AgentSnapshots;
use crate::engine::record::journal::Journal;
use crate::engine::replay::suspension::Suspension;
use crate::engine::settings::Settings;
use crate::engine::state::active_run::ActiveRun;
use crate::engine::state::active_runs::ActiveRuns;
use crate::engine::state::orphans::OrphanedChildren;
use crate::engine::state::pending_approvals::PendingApprovals;
use crate::fair::admission::AdmissionQueue;
use crate::providers::registry::ProviderRegistry;
use crate::telemetry::metrics::Metrics;
use crate::telemetry::traces::SpanSender;
use crate::tools::mcp::pool::McpConnectionPool;
use crate::tools::registry::ToolRegistry;
use crate::workdirs::registry::Workdirs;

/// What the runner is built over.
pub struct EngineDeps {
    /// Where agents come from.
    pub catalog: Arc<Catalog>,
    /// Who answers turns.
    pub providers: ProviderRegistry,
    /// The built-in tools.
    pub tool_registry: ToolRegistry,
    /// The directories that runs work in.
    pub workdirs: Arc<Workdirs>,
    /// The tools of MCP servers.
    pub mcp: Arc<McpConnectionPool>,
    /// Who writes the record.
    pub journal: Journal,
    /// What the agents remember.
    pub memories: Memories,
    /// What the configuration says of runs.
    pub settings: Settings,
    /// Who is sent traces; none where nobody is.
    pub traces: Option<SpanSender>,
}

pub type SuperviseFn = fn(Arc<Engine>) -> BoxFuture<'static, ()>;

/// The engine's parts, shared by all runs.
pub struct Engine {
    /// Where agents come from.
    pub catalog: Arc<Catalog>,
    /// Who answers turns.
    pub providers: ProviderRegistry,
    /// The built-in tools.
    pub tool_registry: ToolRegistry,
    /// The directories that runs work in.
    pub workdirs: Arc<Workdirs>,
    /// The connections to MCP servers.
    pub mcp: Arc<McpConnectionPool>,
    /// Who writes the record.
    pub journal: Journal,
    /// What the agents remember.
    pub memories: Memories,
    /// The definitions as the record keeps them.
    pub agent_snapshots: AgentSnapshots,
    /// Children that an earlier process left unfinished.
    pub orphans: OrphanedChildren,
    /// Runs at work.
    pub active_runs: Arc<ActiveRuns>,
    /// Trees that go on once the store works again.
    pub suspension: Suspension,
    /// The task that resumes suspended trees; it ends when none is left.
    pub supervise_suspended: SuperviseFn,
    /// What is counted for whoever watches the daemon.
    pub metrics: Arc<Metrics>,
    /// Where spans go; none where nobody traces.
    pub traces: Option<SpanSender>,
    /// What the configuration says of runs.
    pub settings: Settings,
    /// Slots for root runs, and the line for them.
    pub queue: AdmissionQueue,
    /// Calls that wait for a person's word.
    pub pending_approvals: PendingApprovals,
    /// No new runs; those that wait for a person are let go of.
    pub draining: CancellationToken,
    /// Sessions at work.
    pub sessions: Sessions,
    /// Owns every root run's task.
    pub tasks: TaskTracker,
    /// Drops every run where it stands, for a stop that does not wait.
    pub shutdown: CancellationToken,
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
}
