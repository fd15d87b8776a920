//! Restarts: kills, drains, clocks.

mod after_kill;
mod background;
mod clocks;
pub mod drain;
mod lost_answers;
mod model;
mod model_outcome;
mod queued_runs;
mod random_kills;
mod restart;
mod resumed_state;
mod unreadable_record;
