//! What agents remember across runs.

pub mod memory;
pub mod memory_gc;
