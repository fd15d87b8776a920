//! The `X-Provider-Key` header: the client's own provider keys for one run. Errors never quote its value.

use axum::extract::FromRequestParts;
use axum::http::HeaderMap;
use axum::http::request::Parts;

use crate::engine::state::provider_keys::Keys;
use crate::web::error::Problem;
use crate::web::problem_code::ProblemCode;
use crate::web::route::{Input, Route};

const HEADER: &str = "X-Provider-Key";
/// Maximum characters of a key.
const MAX_KEY: usize = 4096;

/// The request's keys by provider: one key per header, or several separated by commas, because a proxy may join headers.
pub fn read(headers: &HeaderMap) -> Result<Keys, Problem> {
    let mut keys = Keys::new();
    for value in headers.get_all(HEADER) {
        let value = value.to_str().map_err(|_| malformed())?;
        for pair in value.split(',') {
            let (provider, key) = pair.trim().split_once('=').ok_or_else(malformed)?;
            let (provider, key) = (provider.trim_end(), key.trim_start());
            let is_key =
                (1..=MAX_KEY).contains(&key.len()) && key.bytes().all(|c| c.is_ascii_graphic());
            if provider.is_empty() || !is_key {
                return Err(malformed());
            }
            if keys.insert(provider.to_owned(), key.into()).is_some() {
                return Err(Problem::parameter(HEADER, "has two keys for one provider"));
            }
        }
    }
    Ok(keys)
}

/// A request without keys of its own.
pub struct NoProviderKeys;

impl<S: Sync> FromRequestParts<S> for NoProviderKeys {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        refuse(&parts.headers).map(|()| Self)
    }
}

impl Input for NoProviderKeys {
    fn describe(route: Route) -> Route {
        route.problems(&[ProblemCode::ProviderKeyRefused])
    }
}

/// Refuses keys for runs that cannot use them: a client would take it that they are paid with its own.
pub fn refuse(headers: &HeaderMap) -> Result<(), Problem> {
    match headers.contains_key(HEADER) {
        false => Ok(()),
        true => {
            let why = "these runs take no keys of clients: they start later, and keys are not stored; leave the header out";
            Err(Problem::new(
                ProblemCode::ProviderKeyRefused,
                format!("{HEADER}: {why}"),
            ))
        }
    }
}

fn malformed() -> Problem {
    let why = format_args!(
        "must be <provider>=<key>, with a key of 1 to {MAX_KEY} visible ASCII characters; send one header for each provider"
    );
    Problem::parameter(HEADER, why)
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderMap, HeaderValue};
    use secrecy::ExposeSecret;

    use super::{HEADER, read};

    fn headers(values: &[&[u8]]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(HEADER, HeaderValue::from_bytes(value).expect("a value"));
        }
        headers
    }

    #[test]
    fn keys_are_read_from_each_header_and_from_joined_ones() {
        assert!(read(&HeaderMap::new()).is_ok_and(|keys| keys.is_empty()));
        let keys = read(&headers(&[
            b"openai=sk-1==",
            b"anthropic = sk-2 , groq=gsk",
        ]));
        let keys = keys.expect("keys");
        let pairs: Vec<_> = keys
            .iter()
            .map(|(name, key)| (name.as_str(), key.expose_secret()))
            .collect();
        assert_eq!(
            pairs,
            [("anthropic", "sk-2"), ("groq", "gsk"), ("openai", "sk-1==")]
        );
    }

    #[test]
    fn malformed_headers_are_refused_and_not_quoted() {
        let long = [b"openai=".as_slice(), &[b's'; 4097]].concat();
        let cases: [&[&[u8]]; 9] = [
            &[b"sk-secret"],
            &[b""],
            &[b"=sk-secret"],
            &[b"openai="],
            &[b"openai=sk secret"],
            &[b"openai=sk-secret,"],
            &[b"openai=sk-secret\xff"],
            &[b"openai=sk-secret", b"openai=sk-other"],
            &[&long],
        ];
        for case in cases {
            let problem = read(&headers(case)).expect_err("a problem");
            let text = String::from_utf8_lossy(&problem.render("", "")).into_owned();
            assert!(text.contains("400") && text.contains(HEADER), "{text}");
            assert!(
                !text.contains("secret") && !text.contains("sk-") && !text.contains("sss"),
                "{text}"
            );
        }
    }
}
