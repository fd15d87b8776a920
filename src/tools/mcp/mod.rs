//! Tools of MCP servers: one connection per server definition, shared by all runs. Knows no agent and no loop; `rmcp` is
//! named in this room only.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::load::Environment;
use crate::domain::mcp::{McpServer, McpTransport, TOOL_NAME_SEPARATOR};
use crate::tools::Tool;
use crate::tools::mcp::connection::Connection;
use crate::tools::mcp::tool::McpTool;

mod connection;
mod content;
mod failure;
mod http;
mod http_response;
mod list;
mod requests;
mod secrets;
mod session;
mod stderr;
mod stdio;
mod tool;

/// The longest that closing all connections takes at a stop.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(8);

/// The connections to all servers that anybody has needed lately. Cheap to hand in; made once.
pub struct McpConnectionPool {
    connections: Mutex<HashMap<ServerKey, Arc<Connection>>>,
    shared: Arc<SharedState>,
}

/// What one connection stands for: servers that differ only in the tools that are offered share it.
type ServerKey = (String, McpTransport);

/// What all connections share.
struct SharedState {
    /// Where `${VAR}` and the few variables of every process come from.
    environment: Environment,
    /// Owns the task of every open connection.
    tasks: TaskTracker,
    /// Closes them all.
    stop: CancellationToken,
}

/// What a run is offered of its agent's servers.
#[derive(Default)]
pub struct McpToolset {
    /// The tools by the names that models know.
    pub tools: Vec<(String, Arc<dyn Tool>)>,
    /// Servers whose tools nobody knows, and why.
    pub unavailable: Vec<UnavailableServer>,
    /// What is to be told of them.
    pub warnings: Vec<String>,
    /// Why a server that the run cannot do without is not available.
    pub required_failure: Option<String>,
}

/// A server whose tools nobody knows.
pub struct UnavailableServer {
    /// What its tools' names begin with.
    pub prefix: String,
    /// For the model, naming the server.
    pub reason: String,
}

impl McpConnectionPool {
    /// Without a connection.
    pub fn new(environment: Environment) -> Self {
        Self {
            connections: Mutex::default(),
            shared: Arc::new(SharedState {
                environment,
                tasks: TaskTracker::new(),
                stop: CancellationToken::new(),
            }),
        }
    }

    /// The tools of these servers as they are now. A server that does not answer costs some seconds at most, and its
    /// tools are those that it had last, if any.
    pub async fn list_tools(&self, servers: &[McpServer]) -> McpToolset {
        let mut toolset = McpToolset::default();
        let listings = servers.iter().map(|server| async move {
            let connection = self.connection(server);
            let tool_list = connection.list_tools().await;
            (server, connection, tool_list)
        });
        for (server, connection, tool_list) in join_all(listings).await {
            let tool_list = match tool_list {
                Ok(tool_list) => tool_list,
                Err(reason) => match connection.cached_tools() {
                    _ if server.required => {
                        let failure = format!("a required MCP server did not start: {reason}");
                        toolset.required_failure.get_or_insert(failure);
                        continue;
                    }
                    Some(cached) => {
                        let name = &server.name;
                        let warning = format!(
                            "the tools of MCP server \"{name}\" are those that it had last: {reason}"
                        );
                        toolset.warnings.push(warning);
                        cached
                    }
                    None => {
                        toolset.warnings.push(format!(
                            "the tools of MCP server \"{}\" are missing: {reason}",
                            server.name
                        ));
                        toolset.unavailable.push(UnavailableServer {
                            prefix: format!("{}{TOOL_NAME_SEPARATOR}", server.name),
                            reason,
                        });
                        continue;
                    }
                },
            };
            for wanted in &server.tools {
                if !tool_list
                    .tools
                    .iter()
                    .any(|tool| tool.original_name == *wanted)
                {
                    let name = &server.name;
                    toolset
                        .warnings
                        .push(format!("MCP server \"{name}\" has no tool \"{wanted}\""));
                }
            }
            let is_selected =
                |own_name: &String| server.tools.is_empty() || server.tools.contains(own_name);
            for tool in tool_list
                .tools
                .iter()
                .filter(|tool| is_selected(&tool.original_name))
            {
                let name = tool.spec.name.clone();
                let tool = McpTool::new(Arc::clone(&connection), Arc::clone(tool), server.timeout);
                toolset.tools.push((name, Arc::new(tool)));
            }
        }
        toolset
    }

    /// Closes every connection: processes are ended, sessions are given back.
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
        // Files change: what no run holds and no task keeps open is forgotten when something new comes.
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
