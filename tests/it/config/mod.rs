//! Configuration and agent files.

mod agent_files;
mod reload;
mod server;
mod start;
