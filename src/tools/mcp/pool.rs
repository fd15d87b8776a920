//! The connections to MCP servers, and the tools that they provide to a run.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::Logins;
use crate::config::environment::Environment;
use crate::domain::mcp::{McpServer, McpTransport, TOOL_NAME_SEPARATOR};
use crate::domain::warning::{Warning, WarningCode};
use crate::instruments::{CallCounters, Family};
use crate::tools::mcp::connection::{Connection, SharedState};
use crate::tools::mcp::failure::ServerUnavailable;
use crate::tools::mcp::list::ToolList;
use crate::tools::mcp::oauth::endpoint::OauthHttp;
use crate::tools::mcp::oauth::logins::store::LoginStore;
use crate::tools::mcp::oauth::sources::TokenSources;
use crate::tools::mcp::oauth::token_source::OauthContext;
use crate::tools::mcp::tool::McpTool;
use crate::tools::mcp::{ConnectionState, McpToolset, UnavailableServer};

/// Servers whose calls are counted: agent files name them.
const MAX_COUNTED_SERVERS: usize = 500;
const CLOSE_TIMEOUT: Duration = Duration::from_secs(8);

/// The connections to all servers that were used recently. There is one pool per daemon.
pub struct McpConnectionPool {
    connections: Mutex<HashMap<ServerKey, Arc<Connection>>>,
    shared: Arc<SharedState>,
}

/// Identifies a connection. Servers that differ only in the selected tools share one.
type ServerKey = (String, McpTransport);

impl McpConnectionPool {
    pub fn new(environment: Environment, logins: &Logins) -> Self {
        let tasks = TaskTracker::new();
        let token_sources = TokenSources::new(OauthContext {
            http: OauthHttp::default(),
            environment: environment.clone(),
            logins: LoginStore::new(logins, environment.clone()),
            tasks: tasks.clone(),
        });
        Self {
            connections: Mutex::default(),
            shared: Arc::new(SharedState {
                environment,
                token_sources,
                tasks,
                stop: CancellationToken::new(),
                calls: Family::new(MAX_COUNTED_SERVERS),
            }),
        }
    }

    /// Lists the current tools of these servers. A server that does not answer costs its `open_timeout` at most; the tools
    /// that it listed last are offered instead, if any.
    pub async fn list_tools(&self, servers: &[McpServer]) -> McpToolset {
        let mut toolset = McpToolset::default();
        let listings = servers.iter().map(|server| async move {
            let connection = self.connection(server);
            let tool_list = connection.list_tools(server.open_timeout).await;
            (server, connection, tool_list)
        });
        for (server, connection, tool_list) in join_all(listings).await {
            let tool_list = match tool_list {
                Ok(tool_list) => Some(tool_list),
                Err(error) => toolset.report_unavailable(server, &error, connection.cached_tools()),
            };
            if let Some(tool_list) = tool_list {
                toolset.add_tools(server, &connection, &tool_list);
            }
        }
        toolset
    }

    /// The state of the connection to this server, and the number of tools that it listed last.
    pub fn state(&self, server: &McpServer) -> (ConnectionState, Option<usize>) {
        let key = (server.name.clone(), server.transport.clone());
        let connections = self
            .connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let Some(connection) = connections.get(&key) else {
            return (ConnectionState::Closed, None);
        };
        let tool_list = connection.cached_tools();
        (connection.state(), tool_list.map(|list| list.tools.len()))
    }

    /// Whether this server could be connected to when that was last tried; `None` if it was not needed so far.
    pub fn is_up(&self, server: &McpServer) -> Option<bool> {
        let key = (server.name.clone(), server.transport.clone());
        let connections = self
            .connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        connections.get(&key).map(|connection| connection.is_up())
    }

    /// Calls of tools by server.
    pub fn calls(&self) -> &Family<CallCounters> {
        &self.shared.calls
    }

    /// The names of those servers that have neither failed nor listed their tools yet.
    pub fn starting_servers<'s>(&self, servers: &'s [McpServer]) -> Vec<&'s str> {
        let is_starting = |server: &&McpServer| {
            matches!(
                self.state(server),
                (ConnectionState::Opening, _) | (ConnectionState::Open, None)
            )
        };
        let starting = servers.iter().filter(is_starting);
        starting.map(|server| server.name.as_str()).collect()
    }

    /// Where the operator's logins are.
    pub fn logins(&self) -> &LoginStore {
        self.shared.token_sources.logins()
    }

    /// Closes every connection: ends processes and deletes sessions.
    pub async fn close(&self) {
        self.shared.stop.cancel();
        self.shared.tasks.close();
        if tokio::time::timeout(CLOSE_TIMEOUT, self.shared.tasks.wait())
            .await
            .is_err()
        {
            tracing::warn!("Connections to MCP servers did not close within {CLOSE_TIMEOUT:?}");
        }
    }

    fn connection(&self, server: &McpServer) -> Arc<Connection> {
        let key = (server.name.clone(), server.transport.clone());
        let mut connections = self
            .connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(connection) = connections.get(&key) {
            return Arc::clone(connection);
        }
        // Agent files change, so drop connections that no run holds and no task drives.
        connections.retain(|_, connection| Arc::strong_count(connection) > 1);
        let connection = Connection::new(
            server.name.clone(),
            server.transport.clone(),
            Arc::clone(&self.shared),
        );
        let connection = Arc::new(connection);
        connections.insert(key, Arc::clone(&connection));
        connection
    }
}

impl McpToolset {
    /// Records that a server did not list its tools. Returns the tools that it listed last, to be offered instead.
    fn report_unavailable(
        &mut self,
        server: &McpServer,
        error: &ServerUnavailable,
        cached: Option<Arc<ToolList>>,
    ) -> Option<Arc<ToolList>> {
        let name = &server.name;
        if server.required {
            let failure = format!("a required MCP server did not start: {error}");
            self.required_failure.get_or_insert(failure);
            return None;
        }
        if cached.is_some() {
            let message = format!(
                "the tools of MCP server \"{name}\" are those that it listed last: {error}"
            );
            self.warn(WarningCode::McpServerUnavailable, &message);
            return cached;
        }
        let message = format!("the tools of MCP server \"{name}\" are missing: {error}");
        self.warn(WarningCode::McpServerUnavailable, &message);
        self.unavailable.push(UnavailableServer {
            prefix: format!("{name}{TOOL_NAME_SEPARATOR}"),
            reason: error.to_string(),
        });
        None
    }

    fn warn(&mut self, code: WarningCode, message: &str) {
        self.warnings.push(Warning::new(code, message));
    }

    /// Adds the listed tools that the server's definition selects.
    fn add_tools(
        &mut self,
        server: &McpServer,
        connection: &Arc<Connection>,
        tool_list: &ToolList,
    ) {
        let skipped = tool_list.skipped.iter();
        let skipped = skipped.map(|it| Warning::new(WarningCode::McpToolMissing, it));
        self.skipped.extend(skipped);
        for wanted in &server.tools {
            let mut tools = tool_list.tools.iter();
            if !tools.any(|tool| tool.original_name == *wanted) {
                let message = format!("MCP server \"{}\" has no tool \"{wanted}\"", server.name);
                self.warn(WarningCode::McpToolMissing, &message);
            }
        }
        let is_selected = |name: &String| server.tools.is_empty() || server.tools.contains(name);
        let tools = tool_list.tools.iter();
        for tool in tools.filter(|tool| is_selected(&tool.original_name)) {
            let name = tool.spec.name.clone();
            let tool = McpTool::new(Arc::clone(connection), Arc::clone(tool), server);
            self.tools.push((name, Arc::new(tool)));
        }
    }
}
