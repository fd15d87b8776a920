//! What the server can do now, for its operator.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;

use crate::domain::mcp::McpServer;
use crate::domain::rate_limit::RateStatus;
use crate::engine::blocking::run_blocking;
use crate::engine::context::Engine;
use crate::engine::gauges;
use crate::engine::node_tasks::other_agents;
use crate::engine::runner::Runner;
use crate::telemetry::metrics::ProviderRequests;
use crate::tools::mcp::ConnectionState;
use crate::tools::mcp::oauth::logins::LoginId;

pub struct Overview {
    pub max_running: usize,
    pub max_queued: usize,
    pub max_tree: usize,
    pub max_timeout: Duration,
    /// Sorted by name.
    pub providers: Vec<ProviderOverview>,
    /// Those that are known, by provider and model.
    pub rate_limits: Vec<RateStatus>,
    /// Sorted by agent.
    pub mcp_servers: Vec<McpServerOverview>,
}

pub struct ProviderOverview {
    pub name: String,
    /// Why it cannot take requests.
    pub unavailable: Option<String>,
    /// How many more requests it takes at once; `None` without a limit.
    pub free_requests: Option<usize>,
    /// Since the start.
    pub requests: ProviderRequests,
}

pub struct McpServerOverview {
    pub name: String,
    /// The agent whose file names it.
    pub agent: String,
    pub state: ConnectionState,
    /// How many tools it listed last.
    pub tools: Option<usize>,
    /// `None` if it needs no login.
    pub login: Option<LoginOverview>,
}

pub enum LoginOverview {
    /// Nobody has logged in. This command does.
    Missing(String),
    /// The access token is renewed without the operator.
    Renewed,
    /// When the access token expires, if it does.
    Until(Option<Timestamp>),
    /// Why the login cannot be read.
    Unreadable(String),
}

impl Runner {
    /// Reads the files of logins.
    pub async fn overview(&self) -> Overview {
        let engine = Arc::clone(&self.engine);
        run_blocking(move || Overview::of(&engine)).await
    }

    /// The name of this node; `None` if no other process can share the store.
    pub fn node(&self) -> Option<&str> {
        let engine = &self.engine;
        let is_shared = engine.journal.store().cluster().is_some();
        is_shared.then_some(engine.settings.node.as_str())
    }

    /// The nodes whose agents, providers or roots differ from those of this one, with what differs; `None` if no other process can
    /// share the store.
    pub fn differing_nodes(&self) -> Option<Vec<String>> {
        other_agents::differing_nodes(&self.engine)
    }
}

impl Overview {
    fn of(engine: &Engine) -> Self {
        let settings = &engine.settings;
        let provider = |name: &str| {
            let handle = engine.providers.get(name);
            let permits = handle.as_ref().ok().and_then(|it| it.permits.as_ref());
            ProviderOverview {
                name: name.to_owned(),
                requests: engine.metrics.provider_requests(name),
                free_requests: permits.map(|permits| permits.available_permits()),
                unavailable: handle.as_ref().err().map(ToString::to_string),
            }
        };
        let agents = engine.catalog.current();
        let definitions = agents.entries.values().filter_map(|it| it.agent.as_deref());
        let servers = definitions.flat_map(|agent| {
            let servers = agent.mcp_servers.iter();
            servers.map(|server| {
                let (state, tools) = engine.mcp.state(server);
                McpServerOverview {
                    name: server.name.clone(),
                    agent: agent.name.clone(),
                    state,
                    tools,
                    login: login(engine, server),
                }
            })
        });
        Self {
            max_running: settings.runs.max_running,
            max_queued: settings.runs.max_queued,
            max_tree: settings.runs.max_tree,
            max_timeout: settings.max_timeout,
            mcp_servers: servers.collect(),
            rate_limits: gauges::rate_limits(engine),
            providers: engine.providers.names().map(provider).collect(),
        }
    }
}

fn login(engine: &Engine, server: &McpServer) -> Option<LoginOverview> {
    let id = LoginId::of(server)?;
    Some(match engine.mcp.logins().status(&id) {
        Ok(None) => LoginOverview::Missing(id.command()),
        Ok(Some(status)) if status.is_renewable => LoginOverview::Renewed,
        Ok(Some(status)) => LoginOverview::Until(status.expires_at),
        Err(error) => LoginOverview::Unreadable(error.to_string()),
    })
}
