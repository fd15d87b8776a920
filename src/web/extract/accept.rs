//! `Accept`: whether a client wants an event stream or JSON (RFC 9110, section 12.5.1).

use std::convert::Infallible;

use axum::extract::FromRequestParts;
use axum::http::HeaderMap;
use axum::http::header::ACCEPT;
use axum::http::request::Parts;

use crate::web::route::Input;

const STREAM: &str = "text/event-stream";
const JSON: &str = "application/json";

/// Whether the client names an event stream, not only by a wildcard, and does not like JSON better.
pub fn prefers_stream(headers: &HeaderMap) -> bool {
    let stream = quality(headers, &[STREAM]);
    let json = quality(headers, &[JSON, "application/*", "*/*"]);
    stream.is_some_and(|stream| stream > 0.0 && json.is_none_or(|json| stream >= json))
}

/// What [`prefers_stream`] says of a request.
pub struct WantsStream(pub bool);

impl<S: Sync> FromRequestParts<S> for WantsStream {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(Self(prefers_stream(&parts.headers)))
    }
}

impl Input for WantsStream {}

/// Whether the client takes an event stream at all.
pub fn takes_stream(headers: &HeaderMap) -> bool {
    quality(headers, &[STREAM]).is_some_and(|quality| quality > 0.0)
}

/// The quality of the first of these media ranges that the client names.
fn quality(headers: &HeaderMap, ranges: &[&str]) -> Option<f64> {
    ranges.iter().find_map(|range| {
        let values = headers.get_all(ACCEPT).iter();
        let named = values
            .filter_map(|value| value.to_str().ok())
            .flat_map(|value| value.split(','))
            .filter_map(|named| {
                let mut parts = named.split(';').map(str::trim);
                let is_same = parts.next()?.eq_ignore_ascii_case(range);
                is_same.then(|| parts.find_map(weight).unwrap_or(1.0))
            });
        named.reduce(f64::max)
    })
}

/// The value of a parameter `q`; 1 if it is no number.
fn weight(parameter: &str) -> Option<f64> {
    let (name, value) = parameter.split_once('=')?;
    let is_weight = name.trim().eq_ignore_ascii_case("q");
    is_weight.then(|| {
        value
            .trim()
            .parse::<f64>()
            .map_or(1.0, |it| it.clamp(0.0, 1.0))
    })
}

#[cfg(test)]
mod tests {
    use super::{prefers_stream, takes_stream};

    #[test]
    fn a_stream_is_sent_to_who_names_it_and_likes_nothing_better() {
        for (accept, takes, prefers) in [
            ("text/event-stream", true, true),
            ("application/json, text/event-stream", true, true),
            (
                "application/json;q=0.5, Text/Event-Stream; q=0.9",
                true,
                true,
            ),
            ("text/event-stream, */*;q=0.1", true, true),
            (
                "text/event-stream;charset=utf-8;q=0.8, text/html",
                true,
                true,
            ),
            ("application/json;q=0, text/event-stream;q=0.1", true, true),
            ("text/event-stream;q=0.5, application/json", true, false),
            ("text/event-stream; Q=.5, */*", true, false),
            ("text/event-stream;q=0.8, application/*;q=0.9", true, false),
            ("application/json, text/event-stream;q=0", false, false),
            ("application/json, text/event-stream;q=0.000", false, false),
            ("text/*", false, false),
            ("*/*", false, false),
            ("", false, false),
        ] {
            let mut headers = axum::http::HeaderMap::new();
            headers.insert("accept", accept.parse().expect("a value"));
            assert_eq!(takes_stream(&headers), takes, "{accept}");
            assert_eq!(prefers_stream(&headers), prefers, "{accept}");
        }
    }
}
