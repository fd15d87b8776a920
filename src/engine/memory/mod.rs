//! What agents remember across runs.

pub mod memories;
pub mod memory_gc;
pub mod unused_memories;
