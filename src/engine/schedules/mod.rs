//! Starts the runs of schedules. Each time of a schedule has an idempotency key, so that it starts one run at most, also if
//! the daemon is killed before it knows of it.

pub mod plan;
pub mod scheduler;
