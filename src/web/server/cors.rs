//! Cross-origin requests (CORS) of web pages, for the origins that `[server.cors]` names.

use std::time::Duration;

use axum::http::header::{ETAG, LOCATION, RETRY_AFTER};
use axum::http::{HeaderName, HeaderValue};
use tower_http::cors::{AllowHeaders, AllowMethods, AllowOrigin, CorsLayer};

use crate::config::{AllowedOrigins, Cors};

/// How long a browser may keep the response to a preflight.
const MAX_AGE: Duration = Duration::from_secs(3600);

/// The response headers that a page may read besides those that every page may.
const EXPOSED: [HeaderName; 8] = [
    LOCATION,
    RETRY_AFTER,
    ETAG,
    HeaderName::from_static("x-request-id"),
    HeaderName::from_static("idempotency-replayed"),
    HeaderName::from_static("x-run-id"),
    HeaderName::from_static("x-should-retry"),
    HeaderName::from_static("mcp-session-id"),
];

/// Answers preflights, which need no key, and lets pages of the configured origins read responses.
pub fn cors_layer(cors: &Cors) -> CorsLayer {
    let origins = match &cors.origins {
        AllowedOrigins::Any => AllowOrigin::any(),
        AllowedOrigins::Only(origins) => {
            let origins = origins.iter();
            AllowOrigin::list(origins.filter_map(|origin| HeaderValue::try_from(origin).ok()))
        }
    };
    CorsLayer::new()
        .allow_origin(origins)
        .allow_credentials(cors.credentials)
        .allow_methods(AllowMethods::mirror_request())
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers(EXPOSED)
        .max_age(MAX_AGE)
}
