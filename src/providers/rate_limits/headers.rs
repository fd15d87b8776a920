//! Reads what the headers of a reply say about rate limits: OpenAI's `x-ratelimit-*`, which many services have, and Anthropic's
//! `anthropic-ratelimit-*`. Pure.

use std::time::Duration;

use http::{HeaderMap, HeaderValue};

use crate::domain::rate_limit::{INPUT_TOKENS, Limits, OUTPUT_TOKENS, REQUESTS, TOKENS};

/// A limit that is free again only later is none of a minute: some services have one of a day in the same headers.
const MAX_RESET: Duration = Duration::from_secs(61);

/// What a service says of its limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReportedLimits {
    pub limits: Limits,
    /// How much of each limit is free.
    pub remaining: Limits,
}

impl ReportedLimits {
    /// `None` if the service says nothing.
    pub fn read(headers: &HeaderMap) -> Option<Self> {
        let mut found = Self::default();
        let mut resets = [None; 4];
        for (name, value) in headers {
            let name = name.as_str();
            if let Some(name) = name.strip_prefix("x-ratelimit-") {
                let Some((kind, unit)) = name.split_once('-') else {
                    continue;
                };
                let Some(unit) = unit_index(unit) else {
                    continue;
                };
                match kind {
                    "limit" => found.limits[unit] = number(value),
                    "remaining" => found.remaining[unit] = number(value),
                    "reset" => resets[unit] = duration(value),
                    _ => {}
                }
            } else if let Some(name) = name.strip_prefix("anthropic-ratelimit-") {
                let Some((unit, kind)) = name.rsplit_once('-') else {
                    continue;
                };
                let Some(unit) = unit_index(unit) else {
                    continue;
                };
                match kind {
                    "limit" => found.limits[unit] = number(value),
                    "remaining" => found.remaining[unit] = number(value),
                    _ => {}
                }
            }
        }
        for (unit, reset) in resets.into_iter().enumerate() {
            if reset.is_some_and(|reset| reset > MAX_RESET) {
                (found.limits[unit], found.remaining[unit]) = (None, None);
            }
        }
        // No request could wait for a limit of 0.
        for limit in &mut found.limits {
            *limit = limit.filter(|limit| *limit > 0);
        }
        (found.limits != Limits::default()).then_some(found)
    }
}

fn unit_index(unit: &str) -> Option<usize> {
    Some(match unit {
        "requests" => REQUESTS,
        "input-tokens" => INPUT_TOKENS,
        "output-tokens" => OUTPUT_TOKENS,
        "tokens" => TOKENS,
        _ => return None,
    })
}

fn number(value: &HeaderValue) -> Option<u64> {
    let number: f64 = value.to_str().ok()?.trim().parse().ok()?;
    (number.is_finite() && number >= 0.0).then_some(number as u64)
}

/// `1h2m3.5s`, `20ms`, or seconds.
fn duration(value: &HeaderValue) -> Option<Duration> {
    let text = value.to_str().ok()?.trim();
    if let Ok(seconds) = text.parse::<f64>() {
        return Duration::try_from_secs_f64(seconds).ok();
    }
    let mut seconds = 0.0;
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(|c: char| c.is_ascii_alphabetic())?;
        let (amount, tail) = rest.split_at(end);
        let unit = tail
            .find(|c: char| !c.is_ascii_alphabetic())
            .unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(unit);
        let scale = match unit {
            "d" => 86_400.0,
            "h" => 3600.0,
            "m" => 60.0,
            "s" => 1.0,
            "ms" => 1e-3,
            _ => return None,
        };
        seconds += amount.parse::<f64>().ok()? * scale;
        rest = tail;
    }
    Duration::try_from_secs_f64(seconds).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(headers: &[(&'static str, &'static str)]) -> Option<ReportedLimits> {
        let pairs = headers.iter().map(|(name, value)| {
            (
                http::HeaderName::from_static(name),
                HeaderValue::from_static(value),
            )
        });
        ReportedLimits::read(&pairs.collect())
    }

    #[test]
    fn the_headers_of_openai_are_read() {
        let found = read(&[
            ("content-type", "application/json"),
            ("x-ratelimit-limit-requests", "500"),
            ("x-ratelimit-remaining-requests", "499"),
            ("x-ratelimit-reset-requests", "120ms"),
            ("x-ratelimit-limit-tokens", "30000"),
            ("x-ratelimit-remaining-tokens", "28000"),
            ("x-ratelimit-reset-tokens", "4s"),
        ]);
        let found = found.expect("limits");
        assert_eq!(found.limits, [Some(500), None, None, Some(30_000)]);
        assert_eq!(found.remaining, [Some(499), None, None, Some(28_000)]);
    }

    #[test]
    fn the_headers_of_anthropic_are_read() {
        let found = read(&[
            ("anthropic-ratelimit-requests-limit", "50"),
            ("anthropic-ratelimit-requests-remaining", "49"),
            ("anthropic-ratelimit-requests-reset", "2026-11-29T09:00:01Z"),
            ("anthropic-ratelimit-input-tokens-limit", "30000"),
            ("anthropic-ratelimit-input-tokens-remaining", "0"),
            ("anthropic-ratelimit-output-tokens-limit", "8000"),
            ("anthropic-ratelimit-tokens-limit", "38000"),
            ("anthropic-ratelimit-unified-status", "allowed"),
        ]);
        let found = found.expect("limits");
        let limits = [Some(50), Some(30_000), Some(8_000), Some(38_000)];
        assert_eq!(found.limits, limits);
        assert_eq!(found.remaining, [Some(49), Some(0), None, None]);
    }

    #[test]
    fn limits_of_a_day_and_nonsense_are_ignored() {
        let day = read(&[
            ("x-ratelimit-limit-requests", "14400"),
            ("x-ratelimit-remaining-requests", "14370"),
            ("x-ratelimit-reset-requests", "2m59.56s"),
        ]);
        assert_eq!(day, None);
        for value in ["", "many", "-1", "NaN", "inf"] {
            assert_eq!(
                read(&[("x-ratelimit-limit-tokens", value)]),
                None,
                "{value}"
            );
        }
        let odd = [
            ("x-ratelimit-limit", "5"),
            ("x-ratelimit-limit-images", "5"),
            ("anthropic-ratelimit-", "5"),
        ];
        assert_eq!(read(&odd), None);
    }

    #[test]
    fn waits_have_units() {
        let seconds = |text: &'static str| {
            let read = duration(&HeaderValue::from_static(text));
            read.map(|wait| wait.as_secs_f64())
        };
        assert_eq!(seconds("1h2m3.5s"), Some(3723.5));
        assert_eq!(seconds("6m0s"), Some(360.0));
        assert_eq!(seconds("20ms"), Some(0.02));
        assert_eq!(seconds("12.5"), Some(12.5));
        for wrong in ["s", "1x", "-1s", "soon"] {
            assert_eq!(seconds(wrong), None, "{wrong}");
        }
    }
}
