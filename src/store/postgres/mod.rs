//! The store in a PostgreSQL database, with one writer and a few connections for reading.

mod approvals;
mod attachments;
pub mod error;
mod reader_pool;
mod rows;
mod run_rows;
mod schema;
pub mod sql;
