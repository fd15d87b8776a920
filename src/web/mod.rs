//! The HTTP surface: routes, the run object, events, errors. Knows no provider, no SQL and no agent file.

pub mod agents;
pub mod approvals;
pub mod auth;
pub mod body;
pub mod browser;
pub mod create;
pub mod deliveries;
pub mod error;
pub mod follower;
pub mod frame;
pub mod health;
pub mod host;
pub mod idempotency;
pub mod messages;
pub mod metrics;
pub mod openapi;
pub mod query;
pub mod router;
pub mod runs;
pub mod serve;
pub mod sessions;
pub mod socket;
pub mod sse;
pub mod state;
pub mod view;
pub mod wait;
