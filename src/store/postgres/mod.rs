//! The store in a PostgreSQL database, with one writer and a few connections for reading.

pub mod error;
mod rows;
mod run_rows;
mod schema;
