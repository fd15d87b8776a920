//! The style sheet, the scripts and the icon. Their address has a hash of all of them, so that a browser keeps them for ever
//! and a new version of the daemon has new addresses.

use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::LazyLock;

use axum::body::Body;
use axum::extract::Path;
use axum::http::header::{
    ACCEPT_ENCODING, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_TYPE, ETAG, IF_NONE_MATCH, VARY,
    X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use sha2::{Digest, Sha256};

use crate::web::error::Problem;
use crate::web::problem_code::ProblemCode;

const JAVASCRIPT: &str = "text/javascript; charset=utf-8";

/// Name, content type and text.
const FILES: [(&str, &str, &str); 12] = [
    (
        "console.css",
        "text/css; charset=utf-8",
        include_str!("assets/console.css"),
    ),
    (
        "run.css",
        "text/css; charset=utf-8",
        include_str!("assets/run.css"),
    ),
    ("icon.svg", "image/svg+xml", include_str!("assets/icon.svg")),
    ("theme.js", JAVASCRIPT, include_str!("assets/theme.js")),
    ("console.js", JAVASCRIPT, include_str!("assets/console.js")),
    ("client.js", JAVASCRIPT, include_str!("assets/client.js")),
    ("decided.js", JAVASCRIPT, include_str!("assets/decided.js")),
    ("pages.js", JAVASCRIPT, include_str!("assets/pages.js")),
    ("forms.js", JAVASCRIPT, include_str!("assets/forms.js")),
    ("live.js", JAVASCRIPT, include_str!("assets/live.js")),
    ("keys.js", JAVASCRIPT, include_str!("assets/keys.js")),
    ("tree.js", JAVASCRIPT, include_str!("assets/tree.js")),
];

/// The hash of all files, as hexadecimal digits.
pub static HASH: LazyLock<String> = LazyLock::new(|| {
    let mut digest = Sha256::new();
    for (name, _, text) in FILES {
        digest.update(name);
        digest.update(text);
    }
    let mut hash = String::new();
    for byte in &digest.finalize()[..8] {
        let _ = write!(hash, "{byte:02x}");
    }
    hash
});

/// The files as gzip, in the order of [`FILES`]. Compressed once, at the first request.
static COMPRESSED: LazyLock<Vec<Bytes>> = LazyLock::new(|| {
    let compress = |text: &str| {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
        let written = encoder.write_all(text.as_bytes());
        written.and_then(|()| encoder.finish()).unwrap_or_default()
    };
    FILES
        .iter()
        .map(|(_, _, text)| compress(text).into())
        .collect()
});

/// `GET /ui/assets/{hash}/{file}`: open to everybody, because the sign-in page needs them.
pub async fn get(Path((hash, name)): Path<(String, String)>, headers: HeaderMap) -> Response {
    let found = FILES.iter().position(|(file, _, _)| *file == name);
    let Some(index) = found.filter(|_| hash == *HASH) else {
        let why = "this version of the console has no such file; reload the page";
        return Problem::new(ProblemCode::RouteNotFound, why).into_response();
    };
    let (_, content_type, text) = FILES[index];
    let tag = format!("\"{}\"", *HASH);
    let has_it = headers.get_all(IF_NONE_MATCH).iter();
    let is_known = has_it
        .filter_map(|value| value.to_str().ok())
        .any(|value| value.contains(&tag));
    let accepts_gzip = headers
        .get(ACCEPT_ENCODING)
        .and_then(|value| value.to_str().ok())
        .is_some_and(|value| value.contains("gzip"));
    let mut response = if is_known {
        StatusCode::NOT_MODIFIED.into_response()
    } else if accepts_gzip && !COMPRESSED[index].is_empty() {
        let gzip = [(CONTENT_ENCODING, "gzip")];
        (gzip, Body::from(COMPRESSED[index].clone())).into_response()
    } else {
        Body::from(text).into_response()
    };
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(
        CACHE_CONTROL,
        HeaderValue::from_static("public, max-age=31536000, immutable"),
    );
    headers.insert(VARY, HeaderValue::from_static("accept-encoding"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    if let Ok(tag) = HeaderValue::try_from(tag) {
        headers.insert(ETAG, tag);
    }
    response
}
