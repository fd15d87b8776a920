//! Data of runs in progress. Imports nothing else of the engine.

pub mod active_run;
pub mod ad_hoc_quotas;
pub mod budget;
pub mod failures;
pub mod pending_batch;
pub mod provider_keys;
