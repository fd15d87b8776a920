//! The MCP server at `/mcp`: agents are tools, runs are resources and tasks. Speaks 2026-07-28, which has no sessions, and
//! the versions with an `initialize` handshake. The types of messages are those of rmcp; its HTTP server is not used, because
//! it spawns tasks that nobody awaits and answers errors as text.

use std::sync::Arc;

use axum::Extension;
use axum::routing::post;

use crate::web::clients::mcp::open_calls::OpenCalls;
use crate::web::clients::mcp::rpc::ERRORS;
use crate::web::route::{Route, of_protocol};

pub mod approvals;
pub mod call;
pub mod call_result;
pub mod call_stream;
pub mod handler;
pub mod open_calls;
pub mod progress;
pub mod protocol;
pub mod resources;
pub mod rpc;
pub mod server_info;
pub mod subscription;
pub mod tasks;
pub mod tools;

pub fn routes() -> Vec<Route> {
    let open_calls = Extension(Arc::<OpenCalls>::default());
    let handler = post(handler::post).layer(open_calls);
    vec![of_protocol("post", "/mcp", handler, ERRORS).with_any_key()]
}
