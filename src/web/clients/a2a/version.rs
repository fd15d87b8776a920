//! The version of the protocol that a client speaks: the header `A2A-Version`, or the query parameter of that name.

use axum::extract::FromRequestParts;
use axum::http::request::Parts;

use crate::web::clients::a2a::types::VERSION;
use crate::web::error::{Problem, quote};
use crate::web::problem_code::ProblemCode;
use crate::web::state::AppState;
use url::form_urlencoded;

pub const HEADER: &str = "A2A-Version";
/// What the protocol takes a request without a version for.
const ASSUMED: &str = "0.3";

/// The client speaks [`VERSION`].
pub struct Version1;

impl FromRequestParts<AppState> for Version1 {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &AppState) -> Result<Self, Problem> {
        let header = parts.headers.get(HEADER).and_then(|it| it.to_str().ok());
        let header = header.map(str::trim).filter(|version| !version.is_empty());
        if let Some(version) = header {
            return check(version);
        }
        let query = parts.uri.query().unwrap_or_default();
        let mut pairs = form_urlencoded::parse(query.as_bytes());
        match pairs.find(|(name, value)| name == HEADER && !value.is_empty()) {
            Some((_, version)) => check(&version),
            None => Err(unsupported(format!(
                "the request does not name its version, which means {ASSUMED}: send the header {HEADER}: {VERSION}"
            ))),
        }
    }
}

fn check(version: &str) -> Result<Version1, Problem> {
    // Versions of patches do not count.
    let mut parts = version.splitn(3, '.');
    match (parts.next(), parts.next()) {
        (Some("1"), Some("0")) => Ok(Version1),
        _ => Err(unsupported(format!(
            "version {} is not supported; send the header {HEADER}: {VERSION}",
            quote(version)
        ))),
    }
}

fn unsupported(detail: String) -> Problem {
    Problem::new(ProblemCode::UnsupportedVersion, detail)
}

#[cfg(test)]
mod tests {
    use super::check;

    #[test]
    fn patches_do_not_count() {
        assert!(check("1.0").is_ok() && check("1.0.7").is_ok());
        for other in ["0.3", "1", "1.1", "2.0", "1.00", "x"] {
            assert!(check(other).is_err(), "{other}");
        }
    }
}
