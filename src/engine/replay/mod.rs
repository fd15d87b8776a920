//! Runs that continue after a restart or a store failure, from their recorded steps.

pub mod history;
pub mod recovery;
pub mod resume_suspended;
pub mod run_log;
pub mod suspension;
