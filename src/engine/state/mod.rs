//! Data of active runs and their trees. Imports nothing else of the engine.

pub mod active_run;
pub mod active_runs;
pub mod ad_hoc_quotas;
pub mod approval_decision;
pub mod budget;
pub mod client_calls;
pub mod clock;
pub mod cluster_permits;
pub mod deadline;
pub mod failures;
pub mod inbox;
pub mod live_text;
pub mod orphans;
pub mod pause;
pub mod pending_approvals;
pub mod pending_batch;
pub mod period_budgets;
pub mod provider_keys;
pub mod root_permit;
pub mod run_warnings;
pub mod run_workdir;
pub mod tree;
pub mod tree_trace;
pub mod turn_error;
pub mod turn_log;
pub mod usage;
