//! Configuration and agent files.

mod agent_files;
mod client_keys;
mod reload;
mod server;
mod start;
