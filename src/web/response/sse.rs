//! Responses that are streams of Server-Sent Events.

use std::convert::Infallible;
use std::fmt::Write;

use axum::body::Body;
use axum::http::StatusCode;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::Stream;
use serde::Serialize;

pub const MEDIA_TYPE: &str = "text/event-stream";
const ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// Caches must not keep a stream, and proxies must not compress it, because that delays events.
pub const NO_CACHE: (HeaderName, &str) = (CACHE_CONTROL, "no-store, no-transform");

/// Appends an event without a name.
pub fn push_data(frames: &mut String, data: &impl Serialize) {
    let json = serde_json::to_string(data).unwrap_or_default();
    let _ = write!(frames, "data: {json}\n\n");
}

pub fn response(
    chunks: impl Stream<Item = Result<Bytes, Infallible>> + Send + 'static,
) -> Response {
    let headers = [
        (CONTENT_TYPE, MEDIA_TYPE),
        NO_CACHE,
        (ACCEL_BUFFERING, "no"),
    ];
    (StatusCode::OK, headers, Body::from_stream(chunks)).into_response()
}
