//! Webhooks.

mod deliveries;
mod messages;
