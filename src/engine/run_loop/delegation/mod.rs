//! Runs that a run starts: children and ad-hoc sub-agents.

pub mod ad_hoc;
pub mod background;
pub mod child_result;
pub mod child_run;
pub mod delegate;
