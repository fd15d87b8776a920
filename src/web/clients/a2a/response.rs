//! Responses with the media type of A2A.

use axum::body::Body;
use axum::http::StatusCode;
use axum::http::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use crate::domain::run::RunId;
use crate::web::error::Problem;

pub const MEDIA_TYPE: &str = "application/a2a+json";
pub const RUN_ID: HeaderName = HeaderName::from_static("x-run-id");

pub fn json(value: &impl Serialize) -> Result<Response, Problem> {
    let body = serde_json::to_vec(value)
        .map_err(|error| Problem::internal(format!("a response cannot be serialized: {error}")))?;
    let headers = [(CONTENT_TYPE, MEDIA_TYPE)];
    Ok((StatusCode::OK, headers, Body::from(body)).into_response())
}

/// The response names the run that the task is.
pub fn with_run_id(mut response: Response, run: RunId) -> Response {
    if let Ok(id) = HeaderValue::try_from(run.to_string()) {
        response.headers_mut().insert(RUN_ID, id);
    }
    response
}
