//! When a run may start: sessions and permits.

pub mod root_permit;
pub mod sessions;
