//! Runs that start from what is recorded: after a restart or a store failure, and in tests.

pub mod held_time;
pub mod history;
pub mod interrupted_runs;
pub mod recovery;
pub mod run_diff;
pub mod run_log;
pub mod tree_reads;
