//! What agents remember over runs.

pub mod memory;
pub mod memory_gc;
