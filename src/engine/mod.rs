//! Runs agents: the loop, delegation, budgets, the record. Knows nothing of HTTP and nothing of storage engines.

pub mod add_message;
pub mod admission;
pub mod agent_check;
pub mod approval;
pub mod blocking;
pub mod cancel;
pub mod client_results;
pub mod context;
pub mod delegation;
pub mod dry_run;
pub mod fork;
pub mod hold;
pub mod memory;
pub mod prepare;
pub mod record;
pub mod replay;
pub mod request;
pub mod retention;
pub mod root_run;
pub mod run_loop;
pub mod run_spans;
pub mod runner;
pub mod runner_control;
pub mod settings;
pub mod state;
pub mod workdir;
