//! Usage as services report it. Counts that make no sense count as not reported: they never cost the reply that they came
//! with. Knows no wire.

use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use crate::domain::usage::TokenUsage;

/// The largest count that is believed: sums of such stay exact.
const MAX_TOKEN_COUNT: u64 = 1 << 40;

/// A count as a service reported it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TokenCount {
    /// It is not there.
    #[default]
    Absent,
    /// A number of tokens.
    Reported(u64),
    /// A negative number, a text, more tokens than there are.
    Invalid,
}

impl TokenCount {
    /// The number; 0 where there is none.
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
        Ok(match serde_json::from_str(json) {
            Ok(Some(count)) if count <= MAX_TOKEN_COUNT => Self::Reported(count),
            Ok(None) => Self::Absent,
            Ok(Some(_)) | Err(_) => Self::Invalid,
        })
    }
}

/// What can be read; none where it cannot, or where it is not there.
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
        // A list would be read as the fields in their order.
        let json = Some(json).filter(|json| !json.starts_with('['));
        Ok(Self(json.and_then(|json| serde_json::from_str(json).ok())))
    }
}

/// The usage of a reply that could not be read for other reasons.
pub fn parse_usage_only<'a, T: Deserialize<'a>>(reply: &'a str) -> Option<T> {
    #[derive(Deserialize)]
    #[serde(bound = "T: Deserialize<'de>")]
    struct UsageOnly<T> {
        #[serde(default)]
        usage: Lenient<T>,
    }
    serde_json::from_str::<UsageOnly<T>>(reply).ok()?.usage.0
}

/// What OpenAI's wires tell of the input, or of the output.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub struct TokenDetails {
    #[serde(default)]
    cached_tokens: TokenCount,
    #[serde(default)]
    cache_write_tokens: TokenCount,
    #[serde(default)]
    reasoning_tokens: TokenCount,
}

/// The counts of one reply.
#[derive(Clone, Copy, Debug, Default)]
pub struct TokenCounts {
    /// All of the input.
    pub input: TokenCount,
    /// All of the output.
    pub output: TokenCount,
    /// Of the input.
    pub input_details: Lenient<TokenDetails>,
    /// Of the output.
    pub output_details: Lenient<TokenDetails>,
}

impl TokenCounts {
    /// What they come to; none where it makes no sense, or where nothing was reported.
    pub fn into_usage(self) -> Option<TokenUsage> {
        let totals = [self.input, self.output];
        if totals.contains(&TokenCount::Invalid) || totals == [TokenCount::Absent; 2] {
            return None;
        }
        let (input, output) = (self.input.or_zero(), self.output.or_zero());
        let [input_details, output_details] =
            [self.input_details, self.output_details].map(|details| details.0.unwrap_or_default());
        let cache_read = input_details.cached_tokens.or_zero().min(input);
        Some(TokenUsage {
            input,
            output,
            cache_read,
            cache_write: input_details
                .cache_write_tokens
                .or_zero()
                .min(input - cache_read),
            reasoning: output_details.reasoning_tokens.or_zero().min(output),
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
        assert_eq!(read("null"), TokenCount::Absent);
        for json in [
            "-1",
            "1e30",
            "1.5",
            "\"7\"",
            "[]",
            "{}",
            "true",
            "18446744073709551615",
        ] {
            assert_eq!(read(json), TokenCount::Invalid, "{json}");
        }
    }

    #[test]
    fn usage_needs_input_or_output_that_make_sense() {
        let counts = |input, output| TokenCounts {
            input,
            output,
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
    fn what_cannot_be_read_is_passed_over() {
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
