//! The store: records, lists, retention.

mod lists;
mod retention;
pub mod shared;
