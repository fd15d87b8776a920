//! Tool calls that wait for a decision, and the pause of their run.

pub mod decision;
pub mod pause;
pub mod person_wait;
pub mod question;
pub mod reconcile;
pub mod world_wait;
