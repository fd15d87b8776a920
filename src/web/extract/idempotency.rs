//! The `Idempotency-Key` header: reads it, and checks that a repeated request is the same. The store keeps the keys.

use axum::extract::FromRequestParts;
use axum::http::header::HeaderName;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue};
use axum::response::Response;
use jiff::{SignedDuration, Timestamp};
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::domain::run::now;
use crate::store::{ClaimedRun, IdempotencyClaim, IdempotencyKey};
use crate::web::body::request_body::RequestBody;
use crate::web::error::Problem;
use crate::web::problem_code::ProblemCode;
use crate::web::route::{Input, Route};

/// The response header of a request whose run or message was accepted by an earlier request.
const REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");

const HEADER: &str = "Idempotency-Key";
/// Maximum characters of a key.
const MAX_KEY: usize = 255;
/// How long a key is kept.
const RETENTION: SignedDuration = SignedDuration::from_hours(24);

/// The key of a request that may be repeated.
pub struct RepeatKey(pub Option<String>);

impl<S: Sync> FromRequestParts<S> for RepeatKey {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        read_key(&parts.headers).map(Self)
    }
}

impl Input for RepeatKey {
    fn describe(route: Route) -> Route {
        route
            .header(
                HEADER,
                json!({"type": "string", "pattern": "^[!-~]{1,255}$"}),
                "A POST that is repeated with the same key and body within 24 hours has no second effect, and is answered as \
                 the first was.",
            )
            .problems(&[ProblemCode::IdempotencyMismatch])
            .response_header(
                &[200, 202],
                "Idempotency-Replayed",
                "`true` if an earlier request with the same `Idempotency-Key` had this effect.",
            )
    }
}

pub fn read_key(headers: &HeaderMap) -> Result<Option<String>, Problem> {
    let mut values = headers.get_all(HEADER).iter();
    let Some(key) = values.next().map(|value| value.as_bytes()) else {
        return Ok(None);
    };
    if values.next().is_some() {
        return Err(Problem::parameter(HEADER, "is given twice"));
    }
    if key.is_empty() || key.len() > MAX_KEY || !key.iter().all(u8::is_ascii_graphic) {
        let why = format_args!("a key has 1 to {MAX_KEY} visible ASCII characters and no spaces");
        return Err(Problem::parameter(HEADER, why));
    }
    Ok(Some(String::from_utf8_lossy(key).into_owned()))
}

/// The fingerprint of a request. The spelling and the parameters of the content type make no difference.
pub fn body_hash(body: &RequestBody) -> [u8; 32] {
    fingerprint(body.content_type().as_bytes(), body.identity_bytes())
}

/// SHA-256 of content type and body. A content type has no newline, so the two cannot be confused.
pub fn fingerprint(content_type: &[u8], body: &[u8]) -> [u8; 32] {
    let mut digest = Sha256::new();
    digest.update(content_type);
    digest.update(b"\n");
    digest.update(body);
    digest.finalize().into()
}

/// The claim of a request's key. `owner` is the name of the principal's key, `route` the method and the path.
pub fn new_claim(
    owner: Option<&str>,
    route: String,
    key: String,
    body_hash: [u8; 32],
) -> IdempotencyClaim {
    IdempotencyClaim {
        key: IdempotencyKey {
            credential: owner.unwrap_or_default().to_owned(),
            route,
            key,
        },
        body_hash,
        expires_at: now().checked_add(RETENTION).unwrap_or(Timestamp::MAX),
    }
}

/// Marks the response to a request whose key an earlier request has used.
pub fn mark_replayed(mut response: Response) -> Response {
    let headers = response.headers_mut();
    headers.insert(REPLAYED, HeaderValue::from_static("true"));
    response
}

/// Refuses a key that was used with another body.
pub fn check_same_body(claim: &IdempotencyClaim, claimed: &ClaimedRun) -> Result<(), Problem> {
    if claim.body_hash == claimed.body_hash {
        return Ok(());
    }
    Err(Problem::new(
        ProblemCode::IdempotencyMismatch,
        format!(
            "this {HEADER} has {} {} with another body or content type; send a new key for a new one",
            claimed.number.map_or("started", |_| "continued"),
            claimed.run
        ),
    ))
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderMap, HeaderValue};

    use super::{HEADER, fingerprint, read_key};

    fn read(value: &[u8]) -> Result<Option<String>, String> {
        let mut headers = HeaderMap::new();
        headers.insert(HEADER, HeaderValue::from_bytes(value).expect("a value"));
        read_key(&headers)
            .map_err(|problem| String::from_utf8_lossy(&problem.render("", "")).into())
    }

    #[test]
    fn a_key_is_short_and_visible() {
        assert_eq!(read_key(&HeaderMap::new()).ok(), Some(None));
        for good in ["k", "\"8e03978e-40d5\"", &"k".repeat(255)] {
            assert_eq!(read(good.as_bytes()), Ok(Some(good.to_owned())));
        }
        for bad in ["", "a b", "ä", &"k".repeat(256)] {
            let error = read(bad.as_bytes()).expect_err(bad);
            assert!(error.contains("400") && error.contains(HEADER), "{error}");
        }
        let mut twice = HeaderMap::new();
        twice.append(HEADER, HeaderValue::from_static("a"));
        twice.append(HEADER, HeaderValue::from_static("a"));
        assert!(read_key(&twice).is_err());
    }

    #[test]
    fn a_fingerprint_separates_type_and_body() {
        assert_eq!(fingerprint(b"a", b"b"), fingerprint(b"a", b"b"));
        assert_ne!(fingerprint(b"a", b"b"), fingerprint(b"", b"ab"));
        assert_ne!(fingerprint(b"a", b"b"), fingerprint(b"a", b"c"));
    }
}
