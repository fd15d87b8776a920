//! Access tokens for remote MCP servers that require OAuth, as MCP's authorization text says: discovery (RFC 9728 and
//! 8414), the client credentials grant, the `resource` parameter (RFC 8707), and more scopes on demand.
//!
//! A token is sent only to the URL of the server that it was issued for. A client's secret is sent only to the
//! authorization server that the agent's file names, or to one on the MCP server's own host.

pub mod challenge;
mod client_parameters;
mod discovery;
pub mod endpoint;
mod grant;
pub mod logins;
pub mod sources;
pub mod token;
pub mod token_source;
