//! What every part of the engine can reach: the catalogue, the providers, the journal, the active runs. Only data.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::catalog::reload::Catalog;
use crate::config::Runs;
use crate::config::models::Models;
use crate::engine::admission::sessions::Sessions;
use crate::engine::approval::decision::PendingApprovals;
use crate::engine::memory::memory::Memories;
use crate::engine::record::agent_snapshots::AgentSnapshots;
use crate::engine::record::journal::Journal;
use crate::engine::replay::history::HistoryLimits;
use crate::engine::replay::recovery::OrphanedChildren;
use crate::engine::replay::suspension::Suspension;
use crate::engine::state::active_run::{ActiveRun, ActiveRuns};
use crate::fair::Limits;
use crate::fair::admission::AdmissionQueue;
use crate::providers::registry::ProviderRegistry;
use crate::ssrf::SsrfGuard;
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

/// What the configuration says of runs.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where relative and bare skills are.
    pub config_dir: PathBuf,
    /// Who may be at work at once, and who may wait.
    pub runs: Runs,
    /// A root's deadline where nothing is said.
    pub default_timeout: Duration,
    /// No root's deadline is above this.
    pub max_timeout: Duration,
    /// See [`crate::config::Limits`].
    pub loop_warn: u32,
    /// See [`crate::config::Limits`].
    pub loop_stop: u32,
    /// Most bytes of context files.
    pub max_context_file_bytes: usize,
    /// Most bytes of one run's conversation.
    pub max_conversation_bytes: usize,
    /// How much of its conversation a session's next run goes on with.
    pub history_limits: HistoryLimits,
    /// Where webhooks may point.
    pub webhook_guard: SsrfGuard,
    /// See [`crate::config::Webhooks`].
    pub webhook_secret_env: Option<String>,
    /// The configured keys by their names, with [`crate::config::Key::webhook_secret_env`].
    pub keys: BTreeMap<String, Option<String>>,
    /// What is known of models.
    pub models: Models,
}

impl Settings {
    /// What bounds the line of root runs.
    pub fn queue_limits(&self) -> Limits {
        let Runs {
            max_running,
            max_queued,
            per_agent,
            per_key,
            max_live,
            ..
        } = self.runs.clone();
        Limits {
            max_running,
            max_live,
            max_queued,
            per_agent,
            per_key: per_key.named,
            default_per_key: per_key.others,
            keys: self.keys.keys().cloned().collect(),
            shares_permits: false,
        }
    }
}
