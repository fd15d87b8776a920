//! Built-in tools, MCP servers, approvals.

mod approvals;
mod deferred;
mod files;
mod mcp;
mod mcp_faults;
mod run_command;
pub mod web;
mod workdirs;
