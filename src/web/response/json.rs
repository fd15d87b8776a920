//! JSON responses.

use axum::body::Body;
use axum::http::StatusCode;
use axum::http::header::{CONTENT_TYPE, HeaderValue};
use axum::response::{IntoResponse, Response};
use schemars::JsonSchema;
use serde::Serialize;

use crate::domain::json_buffer::JsonBuffer;
use crate::web::error::Problem;

/// More than the JSON of most runs.
const USUAL_BYTES: usize = 1536;

/// A complete list.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "{T}List")]
pub struct ListResponse<T> {
    /// The entries.
    pub data: Vec<T>,
}

pub fn json_response(status: StatusCode, value: &impl Serialize) -> Response {
    match JsonBuffer::json(value, USUAL_BYTES) {
        Ok(body) => {
            let mut response = (status, Body::from(body)).into_response();
            response
                .headers_mut()
                .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
            response
        }
        Err(error) => {
            Problem::internal(format!("a response cannot be serialized: {error}")).into_response()
        }
    }
}
