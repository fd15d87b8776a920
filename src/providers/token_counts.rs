//! Parses the usage that services report. Invalid counts are treated as missing, so that they never fail the reply.

use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use crate::domain::usage::TokenUsage;
use crate::providers::{Delta, lenient_json, wire_json};

/// Larger counts are invalid. With this limit, sums cannot overflow.
const MAX_TOKEN_COUNT: u64 = 1 << 40;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TokenCount {
    #[default]
    Absent,
    Reported(u64),
    /// Not a non-negative integer, or too large.
    Invalid,
}

impl TokenCount {
    pub fn or_zero(self) -> u64 {
        match self {
            Self::Reported(count) => count,
            Self::Absent | Self::Invalid => 0,
        }
    }
}

impl<'de> Deserialize<'de> for TokenCount {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let json = <&'de RawValue>::deserialize(deserializer)?.get();
        Ok(match lenient_json::parse(json) {
            Ok(Some(count)) if count <= MAX_TOKEN_COUNT => Self::Reported(count),
            Ok(None) => Self::Absent,
            Ok(Some(_)) | Err(_) => Self::Invalid,
        })
    }
}

/// `None` if the value is missing or does not parse.
#[derive(Clone, Copy, Debug)]
pub struct Lenient<T>(pub Option<T>);

impl<T> Default for Lenient<T> {
    fn default() -> Self {
        Self(None)
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Lenient<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let json = <&'de RawValue>::deserialize(deserializer)?.get();
        // Serde would read a list as the fields of a struct in order.
        let json = Some(json).filter(|json| !json.starts_with('['));
        Ok(Self(json.and_then(|json| wire_json::parse(json).ok())))
    }
}

/// Parses only the `usage` of a reply that failed to parse for another reason.
pub fn parse_usage_only<'a, T: Deserialize<'a>>(reply: &'a str) -> Option<T> {
    #[derive(Deserialize)]
    #[serde(bound = "T: Deserialize<'de>")]
    struct UsageOnly<T> {
        #[serde(default)]
        usage: Lenient<T>,
    }
    wire_json::parse::<UsageOnly<T>>(reply).ok()?.usage.0
}

/// Merges a report into the usage so far, and passes the sum on. Services repeat reports as they grow; what says nothing, such
/// as an empty report at the end, or zeros, replaces nothing.
pub fn update(
    usage: &mut Option<TokenUsage>,
    report: Option<TokenUsage>,
    deltas: &mut dyn FnMut(Delta<'_>),
) {
    let Some(mut report) = report else { return };
    let earlier = usage.unwrap_or_default();
    for (count, earlier) in [
        (&mut report.input, earlier.input),
        (&mut report.output, earlier.output),
        (&mut report.cache_read, earlier.cache_read),
        (&mut report.cache_write, earlier.cache_write),
        (&mut report.reasoning, earlier.reasoning),
    ] {
        if *count == 0 {
            *count = earlier;
        }
    }
    *usage = Some(report);
    deltas(Delta::Usage(report));
}

/// The token details that OpenAI's wires report for the input or the output.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub struct TokenDetails {
    #[serde(default)]
    cached_tokens: TokenCount,
    #[serde(default)]
    cache_write_tokens: TokenCount,
    #[serde(default)]
    reasoning_tokens: TokenCount,
}

/// The counts of one reply. The details are parts of `input` and, with most services, of `output`.
#[derive(Clone, Copy, Debug, Default)]
pub struct TokenCounts {
    pub input: TokenCount,
    pub output: TokenCount,
    /// Of both. Some services leave reasoning out of `output`, but not out of the total.
    pub total: TokenCount,
    pub input_details: Lenient<TokenDetails>,
    pub output_details: Lenient<TokenDetails>,
}

impl TokenCounts {
    /// `None` if a total is invalid, or if both are missing.
    pub fn into_usage(self) -> Option<TokenUsage> {
        let totals = [self.input, self.output];
        if totals.contains(&TokenCount::Invalid) || totals == [TokenCount::Absent; 2] {
            return None;
        }
        let input = self.input.or_zero();
        let [input_details, output_details] =
            [self.input_details, self.output_details].map(|details| details.0.unwrap_or_default());
        let reasoning = output_details.reasoning_tokens.or_zero();
        let mut output = self.output.or_zero();
        if totals
            .iter()
            .all(|it| matches!(it, TokenCount::Reported(_)))
        {
            output = output.max(self.total.or_zero().saturating_sub(input));
        }
        if reasoning > output {
            output += reasoning;
        }
        let cache_read = input_details.cached_tokens.or_zero().min(input);
        Some(TokenUsage {
            input,
            output,
            cache_read,
            cache_write: input_details
                .cache_write_tokens
                .or_zero()
                .min(input - cache_read),
            reasoning,
        })
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::{Lenient, TokenCount, TokenCounts, TokenDetails, parse_usage_only};

    #[test]
    fn invalid_counts_differ_from_absent_ones() {
        let read = |json: &str| serde_json::from_str::<TokenCount>(json).expect("a count");
        assert_eq!(read("7"), TokenCount::Reported(7));
        assert_eq!(read("\"7\""), TokenCount::Reported(7));
        assert_eq!(read("7.0"), TokenCount::Reported(7));
        assert_eq!(read("null"), TokenCount::Absent);
        for json in [
            "-1",
            "1e30",
            "1.5",
            "\"many\"",
            "[]",
            "{}",
            "true",
            "18446744073709551615",
        ] {
            assert_eq!(read(json), TokenCount::Invalid, "{json}");
        }
    }

    #[test]
    fn usage_needs_a_valid_input_or_output() {
        let counts = |input, output| TokenCounts {
            input,
            output,
            total: TokenCount::Absent,
            input_details: Lenient(Some(TokenDetails {
                cached_tokens: TokenCount::Reported(9),
                cache_write_tokens: TokenCount::Invalid,
                reasoning_tokens: TokenCount::Absent,
            })),
            output_details: Lenient(None),
        };
        let usage = counts(TokenCount::Reported(5), TokenCount::Absent)
            .into_usage()
            .expect("usage");
        assert_eq!((usage.input, usage.output), (5, 0));
        assert_eq!((usage.cache_read, usage.cache_write), (5, 0));
        assert_eq!(
            counts(TokenCount::Reported(5), TokenCount::Invalid).into_usage(),
            None
        );
        assert_eq!(
            counts(TokenCount::Absent, TokenCount::Absent).into_usage(),
            None
        );
    }

    #[test]
    fn reasoning_that_is_not_part_of_the_output_is_added() {
        let output = |output, total, reasoning| {
            let counts = TokenCounts {
                input: TokenCount::Reported(32),
                output: TokenCount::Reported(output),
                total,
                output_details: Lenient(Some(TokenDetails {
                    reasoning_tokens: reasoning,
                    ..TokenDetails::default()
                })),
                ..TokenCounts::default()
            };
            counts.into_usage().map(|usage| usage.output)
        };
        let (absent, reported) = (TokenCount::Absent, TokenCount::Reported);
        assert_eq!(output(9, reported(170), reported(129)), Some(138));
        assert_eq!(output(9, reported(170), absent), Some(138));
        assert_eq!(output(9, absent, reported(129)), Some(138));
        assert_eq!(output(138, reported(170), reported(129)), Some(138));
        assert_eq!(output(138, absent, reported(129)), Some(138));
        assert_eq!(output(138, reported(12), TokenCount::Invalid), Some(138));
    }

    #[test]
    fn unparsable_usage_is_ignored() {
        #[derive(Deserialize)]
        struct TestUsage {
            n: TokenCount,
        }
        let lenient = |json: &str| {
            serde_json::from_str::<Lenient<TestUsage>>(json)
                .expect("read")
                .0
        };
        assert!(lenient("null").is_none() && lenient("\"much\"").is_none());
        assert_eq!(
            lenient("{\"n\":-1}").map(|used| used.n),
            Some(TokenCount::Invalid)
        );
        let usage = parse_usage_only::<TestUsage>("{\"choices\":7,\"usage\":{\"n\":3}}");
        assert_eq!(usage.map(|used| used.n), Some(TokenCount::Reported(3)));
        assert!(parse_usage_only::<TestUsage>("{\"usage\":{\"n\":3}").is_none());
    }
}
