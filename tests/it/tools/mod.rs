//! Built-in tools, MCP servers, approvals, questions to people, waits, one effect for each call.

mod approval_arguments;
mod approval_restarts;
pub mod approvals;
pub mod ask_person;
mod asleep;
mod call_results;
mod command_processes;
mod command_sandbox;
mod deferred;
mod effects;
mod files;
mod http_tools;
mod mcp;
mod mcp_faults;
mod mcp_floods;
mod mcp_http;
mod mcp_login_refusals;
mod mcp_logins;
mod mcp_oauth;
mod mcp_odd;
mod openapi;
mod pending_approvals;
pub mod run_command;
mod skills;
pub mod wait;
pub mod web;
mod workdirs;
