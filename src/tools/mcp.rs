//! Tools of MCP servers: one connection per server definition, shared by all runs. Knows no agent and no loop; `rmcp` is
//! named in this room only.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::load::Environment;
use crate::domain::mcp::{McpServer, McpTransport, SEPARATOR};
use crate::tools::Tool;
use crate::tools::mcp::connection::Connection;
use crate::tools::mcp::tool::McpTool;

mod connection;
mod contents;
mod failure;
mod http;
mod http_answer;
mod link;
mod list;
mod requests;
mod secrets;
mod stderr;
mod stdio;
mod tool;

/// The longest that closing all connections takes at a stop.
const CLOSING: Duration = Duration::from_secs(8);

/// The connections to all servers that anybody has needed lately. Cheap to hand in; made once.
pub struct Servers {
    connections: Mutex<HashMap<Definition, Arc<Connection>>>,
    common: Arc<Common>,
}

/// What one connection stands for: servers that differ only in the tools that are offered share it.
type Definition = (String, McpTransport);

/// What all connections share.
struct Common {
    /// Where `${VAR}` and the few variables of every process come from.
    environment: Environment,
    /// Owns the task of every open connection.
    tasks: TaskTracker,
    /// Closes them all.
    stop: CancellationToken,
}

/// What a run is offered of its agent's servers.
#[derive(Default)]
pub struct Offer {
    /// The tools by the names that models know.
    pub tools: Vec<(String, Arc<dyn Tool>)>,
    /// Servers whose tools nobody knows, and why.
    pub missing: Vec<Missing>,
    /// What is to be told of them.
    pub warnings: Vec<String>,
    /// Why a server that the run cannot do without is not available.
    pub required: Option<String>,
}

/// A server whose tools nobody knows.
pub struct Missing {
    /// What its tools' names begin with.
    pub prefix: String,
    /// For the model, naming the server.
    pub why: String,
}

impl Servers {
    /// Without a connection.
    pub fn new(environment: Environment) -> Self {
        Self {
            connections: Mutex::default(),
            common: Arc::new(Common {
                environment,
                tasks: TaskTracker::new(),
                stop: CancellationToken::new(),
            }),
        }
    }

    /// The tools of these servers as they are now. A server that does not answer costs some seconds at most, and its
    /// tools are those that it had last, if any.
    pub async fn offer(&self, servers: &[McpServer]) -> Offer {
        let mut offer = Offer::default();
        let asked = servers.iter().map(|server| async move {
            let connection = self.connection(server);
            let listed = connection.tools().await;
            (server, connection, listed)
        });
        for (server, connection, listed) in join_all(asked).await {
            let listed = match listed {
                Ok(listed) => listed,
                Err(why) => match connection.known() {
                    _ if server.required => {
                        let required = format!("a required MCP server did not start: {why}");
                        offer.required.get_or_insert(required);
                        continue;
                    }
                    Some(known) => {
                        let name = &server.name;
                        let warning = format!(
                            "the tools of MCP server \"{name}\" are those that it had last: {why}"
                        );
                        offer.warnings.push(warning);
                        known
                    }
                    None => {
                        offer.warnings.push(format!(
                            "the tools of MCP server \"{}\" are missing: {why}",
                            server.name
                        ));
                        offer.missing.push(Missing {
                            prefix: format!("{}{SEPARATOR}", server.name),
                            why,
                        });
                        continue;
                    }
                },
            };
            for wanted in &server.tools {
                if !listed.tools.iter().any(|tool| tool.own_name == *wanted) {
                    let name = &server.name;
                    offer
                        .warnings
                        .push(format!("MCP server \"{name}\" has no tool \"{wanted}\""));
                }
            }
            let is_wanted =
                |own_name: &String| server.tools.is_empty() || server.tools.contains(own_name);
            for tool in listed.tools.iter().filter(|tool| is_wanted(&tool.own_name)) {
                let name = tool.spec.name.clone();
                let tool = McpTool::new(Arc::clone(&connection), Arc::clone(tool), server.timeout);
                offer.tools.push((name, Arc::new(tool)));
            }
        }
        offer
    }

    /// Closes every connection: processes are ended, sessions are given back.
    pub async fn close(&self) {
        self.common.stop.cancel();
        self.common.tasks.close();
        if tokio::time::timeout(CLOSING, self.common.tasks.wait())
            .await
            .is_err()
        {
            tracing::warn!("Connections to MCP servers did not close within {CLOSING:?}");
        }
    }

    fn connection(&self, server: &McpServer) -> Arc<Connection> {
        let definition = (server.name.clone(), server.transport.clone());
        let mut connections = self
            .connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(connection) = connections.get(&definition) {
            return Arc::clone(connection);
        }
        // Files change: what no run holds and no task keeps open is forgotten when something new comes.
        connections.retain(|_, connection| Arc::strong_count(connection) > 1);
        let connection = Connection::new(
            server.name.clone(),
            server.transport.clone(),
            Arc::clone(&self.common),
        );
        let connection = Arc::new(connection);
        connections.insert(definition, Arc::clone(&connection));
        connection
    }
}
