//! JSON that a client may keep and revalidate (RFC 9110, section 13): with an `ETag`; 304 if the client has it already.

use std::convert::Infallible;
use std::fmt::Write;

use axum::body::Body;
use axum::extract::FromRequestParts;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE, ETAG, IF_NONE_MATCH};
use axum::http::request::Parts;
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use serde::Serialize;
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::web::error::Problem;
use crate::web::route::{Input, Route};

/// What a response contains depends on the key, and may change at any time.
const CACHE: (HeaderName, &str) = (CACHE_CONTROL, "private, no-cache");

/// The entity tags that the client has. A copy, because the header is a slice of the connection's read buffer.
pub struct IfNoneMatch(Option<Box<str>>);

impl IfNoneMatch {
    /// 200 with the value, or 304.
    pub fn json_response(&self, value: &impl Serialize) -> Response {
        match serde_json::to_vec(value) {
            Ok(body) => self.bytes_response(body.into()),
            Err(error) => {
                let why = format!("a response cannot be serialized: {error}");
                Problem::internal(why).into_response()
            }
        }
    }

    /// 200 with these bytes of JSON, or 304.
    pub fn bytes_response(&self, json: Bytes) -> Response {
        let tag = entity_tag(&json);
        self.tagged_response(json, &tag)
    }

    /// 200 with these bytes of JSON, or 304. `tag` is their [`entity_tag`].
    pub fn tagged_response(&self, json: Bytes, tag: &HeaderValue) -> Response {
        let is_known = tag.to_str().is_ok_and(|tag| self.matches(tag));
        let mut response = match is_known {
            true => (StatusCode::NOT_MODIFIED, [CACHE]).into_response(),
            false => {
                let headers = [(CONTENT_TYPE, "application/json"), CACHE];
                (StatusCode::OK, headers, Body::from(json)).into_response()
            }
        };
        response.headers_mut().insert(ETAG, tag.clone());
        response
    }

    /// Compares as weak tags.
    fn matches(&self, tag: &str) -> bool {
        let opaque = |tag: &str| tag.strip_prefix("W/").unwrap_or(tag).to_owned();
        let known = self.0.as_deref().unwrap_or_default();
        known
            .split(',')
            .map(str::trim)
            .any(|one| one == "*" || opaque(one) == opaque(tag))
    }
}

/// Identifies a content. Weak, because the bytes that are sent may be compressed.
pub fn entity_tag(content: &[u8]) -> HeaderValue {
    let mut tag = String::from("W/\"");
    for byte in &Sha256::digest(content)[..16] {
        let _ = write!(tag, "{byte:02x}");
    }
    tag.push('"');
    HeaderValue::try_from(tag).unwrap_or(HeaderValue::from_static("*"))
}

impl Input for IfNoneMatch {
    fn describe(route: Route) -> Route {
        route
            .header(
                "If-None-Match",
                json!({"type": "string"}),
                "The `ETag` of the response that the client has.",
            )
            .empty_response(304, "The client has this response already.")
            .response_header(
                &[200, 304],
                "ETag",
                "Identifies the content; of a run only once it has ended.",
            )
    }
}

impl<S: Sync> FromRequestParts<S> for IfNoneMatch {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        let values = parts.headers.get_all(IF_NONE_MATCH).iter();
        let texts: Vec<&str> = values.filter_map(|value| value.to_str().ok()).collect();
        Ok(Self((!texts.is_empty()).then(|| texts.join(",").into())))
    }
}

#[cfg(test)]
mod tests {
    use super::IfNoneMatch;

    #[test]
    fn tags_are_compared_as_weak_tags() {
        let matches = |known: Option<&str>| IfNoneMatch(known.map(Into::into)).matches("W/\"a1\"");
        for known in ["W/\"a1\"", "\"a1\"", "\"b\", W/\"a1\"", "*", " \"a1\" "] {
            assert!(matches(Some(known)), "{known}");
        }
        for other in [None, Some(""), Some("a1"), Some("\"b\""), Some("W/\"a\"")] {
            assert!(!matches(other), "{other:?}");
        }
    }
}
