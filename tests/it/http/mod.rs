//! The HTTP API: keys, errors, events, streams.

mod auth;
mod browsers;
mod connections;
mod conversation_events;
mod errors;
mod events;
mod idempotency;
mod nginx;
mod openapi;
mod openapi_document;
mod openapi_rules;
mod proxies;
mod streams;
mod transfer;
