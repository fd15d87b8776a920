//! The provider wires: requests, replies, retries, caching.

mod batches;
mod caching;
mod content_parts;
mod echo;
mod malformed_replies;
mod model_table;
mod models;
mod odd_replies;
mod presets;
mod provider_keys;
mod proxies;
pub mod rate_limits;
mod recordings;
mod rejected_replies;
mod requests;
mod retries;
mod scripted;
mod selection;
mod service_rules;
mod service_tiers;
mod services;
mod thinking;
mod thoughtful;
mod wires;
