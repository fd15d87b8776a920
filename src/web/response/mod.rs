//! What clients read: the run object, trees, conversations and event streams.

pub mod conversation;
pub mod eval;
pub mod event_scope;
pub mod event_stream;
pub mod input;
pub mod json;
pub mod revalidation;
pub mod run;
pub mod run_fields;
pub mod sse;
pub mod stream_driver;
pub mod tree;
pub mod turns;
