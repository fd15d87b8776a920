//! The handlers, one file for each resource.

pub mod agents;
pub mod approvals;
pub mod batches;
pub mod create_run;
pub mod deliveries;
pub mod diffs;
pub mod evals;
pub mod events;
pub mod feedback;
pub mod forks;
pub mod health;
pub mod inputs;
pub mod messages;
pub mod metrics;
pub mod pause;
pub mod recordings;
pub mod rollouts;
pub mod runs;
pub mod schedules;
pub mod scores;
pub mod sessions;
pub mod tickets;
pub mod triggers;
pub mod turns;
pub mod usage;
pub mod world_events;
