//! What a write stores, in the form in which it is stored: the same for every engine.

pub mod clock_skew;
pub mod columns;
pub mod definition_cache;
pub mod encoded_write;
pub mod ended_runs;
pub mod entries;
pub mod input_changes;
pub mod integers;
pub mod notified_event;
pub mod run_values;
pub mod turn_requests;
pub mod turns;
pub mod usage_report;
