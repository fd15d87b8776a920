//! The record of runs: the facts that are written, once each, and what follows from them. No I/O.

pub mod entry;
pub mod event;
pub mod stored;
