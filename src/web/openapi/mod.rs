//! The OpenAPI 3.1 document: what it says beside its operations, and the schemas of the types of requests and responses.
//! A route describes its own operation.

pub mod document;
pub mod examples;
pub mod schemas;
pub mod tidy;
