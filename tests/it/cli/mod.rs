//! The commands.

mod approvals;
mod chat;
mod checks;
mod commands;
mod datasets;
pub mod home;
mod live_tests;
mod mcp;
mod recorded_runs;
mod recordings;
mod run;
mod runs;
mod sessions;
mod terminal;
#[cfg(target_os = "linux")]
mod threads;
mod usage;
