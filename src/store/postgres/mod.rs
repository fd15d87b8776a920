//! The store in a PostgreSQL database, with one writer and a few connections for reading.

mod approvals;
mod attachments;
mod batch_queries;
mod changed_runs;
mod connect;
mod connection;
mod delete;
pub mod error;
mod lists;
mod outbox_queries;
mod push_configs;
mod queries;
mod reader_pool;
mod retention_queries;
mod rows;
mod run_changes;
mod run_rows;
mod schedules;
mod schema;
mod search;
mod sessions;
pub mod sql;
mod statements;
mod tls;
mod turns;
mod usage_queries;
