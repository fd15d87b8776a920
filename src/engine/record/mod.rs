//! The journal and what goes into it. Only this writes runs, steps and events.

pub mod agent_pins;
pub mod agent_snapshots;
pub mod budget_charges;
pub mod journal;
pub mod recorded_request;
pub mod run_record;
pub mod scores;
pub mod shared_texts;
pub mod webhook_events;
pub mod webhook_message;
