//! Configuration and agent files.

mod agent_files;
mod budgets;
mod client_keys;
mod reload;
mod secret_files;
mod server;
mod service_manager;
mod start;
