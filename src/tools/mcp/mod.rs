//! Tools of MCP servers. All runs share one connection per server definition. Only this folder uses `rmcp`.

use std::sync::Arc;

use crate::tools::Tool;

mod close_state;
mod connection;
mod content;
mod driver;
mod failure;
mod http;
mod http_response;
mod list;
mod open;
pub mod pool;
mod requests;
mod secrets;
mod session;
mod stderr;
mod stdio;
mod tool;

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
