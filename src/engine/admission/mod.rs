//! When a run may start: sessions and permits.

pub mod acceptance;
pub mod delete_session;
pub mod enter;
pub mod placement;
pub mod run_permits;
