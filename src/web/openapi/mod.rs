//! The OpenAPI 3.1 document, built from the routes and from the types of requests and responses.

pub mod document;
pub mod examples;
pub mod schemas;
pub mod tidy;
