//! The parameters of handlers: paths, queries, headers and bodies. Everything is checked here, so that handlers get values that
//! cannot be wrong.

pub mod accept;
pub mod body;
pub mod fork_request;
pub mod idempotency;
pub mod link_prefix;
pub mod messages;
pub mod path;
pub mod provider_keys;
pub mod query;
pub mod run_request;
