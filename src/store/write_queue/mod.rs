//! The queue of an engine's writer: its jobs, whom it informs of their results, and the trees that it takes no writes of.

pub mod callbacks;
pub mod deletions;
pub mod failed_runs;
pub mod job;
pub mod queue;
