//! The OpenAPI 3.1 document, built from the route table and from the types of requests and responses.

pub mod batch_operations;
pub mod document;
pub mod examples;
pub mod operation;
pub mod operations;
pub mod recordings;
pub mod schedule_operations;
pub mod schemas;
pub mod start_run;
pub mod steering;
pub mod tidy;
pub mod trigger_operations;
pub mod turn_operations;
pub mod usage_operations;
