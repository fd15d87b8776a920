//! One file a page.

pub mod add_to_dataset;
pub mod agent;
pub mod agent_versions;
pub mod agents;
pub mod approval_cards;
pub mod approvals;
pub mod chat;
pub mod compare;
pub mod eval;
pub mod eval_cases;
pub mod eval_result;
pub mod evals;
pub mod evaluate;
pub mod input_form;
pub mod inspector;
pub mod missing;
pub mod picture;
pub mod run;
pub mod run_actions;
pub mod run_events;
pub mod runs;
pub mod sessions;
pub mod system;
pub mod tree;
pub mod turn;
pub mod usage;
