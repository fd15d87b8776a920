//! JSON responses.

use axum::body::Body;
use axum::http::StatusCode;
use axum::http::header::{CONTENT_TYPE, HeaderValue};
use axum::response::{IntoResponse, Response};
use schemars::JsonSchema;
use serde::Serialize;

use crate::web::error::Problem;

/// A complete list.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "{T}List")]
pub struct ListResponse<T> {
    /// The entries.
    pub data: Vec<T>,
}

pub fn json_response(status: StatusCode, value: &impl Serialize) -> Response {
    match serde_json::to_vec(value) {
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
