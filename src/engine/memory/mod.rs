//! What agents remember across runs.

pub mod memories;
pub mod memory_gc;
