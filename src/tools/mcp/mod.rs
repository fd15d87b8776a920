//! Tools of MCP servers. All runs share one connection per server definition. Only this folder uses `rmcp`.

use std::sync::Arc;

use crate::domain::warning::Warning;
use crate::tools::Tool;

mod close_state;
mod connection;
mod content;
mod driver;
mod elicitation;
mod failure;
mod http;
mod http_response;
mod http_transport;
mod in_flight;
mod lines;
mod list;
mod listed_tool;
mod message;
pub mod oauth;
mod open;
mod open_questions;
pub mod pool;
mod requests;
pub mod secrets;
mod session;
mod stderr;
mod stdio;
mod tool;
mod unread;

/// The tools that a run gets from its agent's MCP servers.
#[derive(Default)]
pub struct McpToolset {
    /// The tools by the names that models use.
    pub tools: Vec<(String, Arc<dyn Tool>)>,
    /// Servers that could not list their tools.
    pub unavailable: Vec<UnavailableServer>,
    pub warnings: Vec<Warning>,
    /// Warnings about listed tools that are not offered.
    pub skipped: Vec<Warning>,
    /// Why a required server is not available.
    pub required_failure: Option<String>,
}

/// What a connection does now, for the operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConnectionState {
    Closed,
    Opening,
    Open,
    /// Why the last attempt failed.
    Failed(Arc<str>),
}

/// A server that could not list its tools.
pub struct UnavailableServer {
    /// The prefix of its tools' names.
    pub prefix: String,
    /// An error text for the model that names the server.
    pub reason: String,
}
