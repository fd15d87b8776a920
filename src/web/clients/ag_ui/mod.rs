//! AG-UI 1.0 at `/agents/{name}/ag-ui`: a run as the events of a chat. A thread is a session; approvals are interrupts.

use axum::http::StatusCode;
use axum::routing::post;
use serde_json::json;

use crate::config::KeyScope;
use crate::web::error::{ErrorShape, Problem, ShapedError};
use crate::web::route::{Route, of_protocol};

pub mod content;
pub mod events;
pub mod handler;
pub mod input;
pub mod interrupts;
pub mod stream;
pub mod transcript;
pub mod usage;

/// A request that fails is answered with the event that ends a run that fails.
const ERRORS: ErrorShape = ErrorShape(shape);

pub fn routes() -> Vec<Route> {
    let handler = post(handler::post);
    vec![
        of_protocol("post", "/agents/{name}/ag-ui", handler, ERRORS)
            .with_scope(KeyScope::Run)
            .with_scope(KeyScope::Approve),
    ]
}

fn shape(problem: &Problem) -> ShapedError {
    let event = events::run_error(problem.detail(), problem.code());
    let status: StatusCode = problem.status();
    ShapedError {
        status,
        body: json!(event).to_string().into_bytes(),
    }
}
