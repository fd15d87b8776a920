//! Reads requests: paths, queries, headers and bodies. Everything is checked here, so that handlers get values that cannot be wrong.

pub mod accept;
pub mod body;
pub mod body_budget;
pub mod content;
pub mod fork_request;
pub mod form;
pub mod gzip;
pub mod idempotency;
pub mod json_body;
pub mod known_fields;
pub mod large_body;
pub mod link_prefix;
pub mod messages;
pub mod path;
pub mod provider_keys;
pub mod public_url;
pub mod query;
pub mod request_body;
pub mod run_request;
pub mod time;
