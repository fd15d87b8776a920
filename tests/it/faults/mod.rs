//! Faults of the disk and of the store.

mod damaged_rows;
mod disk;
mod failing_writes;
