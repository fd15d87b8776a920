//! Webhooks.

mod deliveries;
pub mod messages;
