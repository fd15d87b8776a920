//! Usage as services report it. Counts that make no sense count as not reported: they never cost the reply that they came
//! with. Knows no wire.

use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use crate::domain::usage::TokenUsage;

/// The largest count that is believed: sums of such stay exact.
const MOST: u64 = 1 << 40;

/// A count as a service reported it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Count {
    /// It is not there.
    #[default]
    Absent,
    /// A number of tokens.
    Known(u64),
    /// A negative number, a text, more tokens than there are.
    Senseless,
}

impl Count {
    /// The number; 0 where there is none.
    pub fn known(self) -> u64 {
        match self {
            Self::Known(count) => count,
            Self::Absent | Self::Senseless => 0,
        }
    }
}

impl<'de> Deserialize<'de> for Count {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let json = <&'de RawValue>::deserialize(deserializer)?.get();
        Ok(match serde_json::from_str(json) {
            Ok(Some(count)) if count <= MOST => Self::Known(count),
            Ok(None) => Self::Absent,
            Ok(Some(_)) | Err(_) => Self::Senseless,
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
pub fn of_unread<'a, T: Deserialize<'a>>(reply: &'a str) -> Option<T> {
    #[derive(Deserialize)]
    #[serde(bound = "T: Deserialize<'de>")]
    struct Unread<T> {
        #[serde(default)]
        usage: Lenient<T>,
    }
    serde_json::from_str::<Unread<T>>(reply).ok()?.usage.0
}

/// What OpenAI's wires tell of the input, or of the output.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub struct Details {
    #[serde(default)]
    cached_tokens: Count,
    #[serde(default)]
    cache_write_tokens: Count,
    #[serde(default)]
    reasoning_tokens: Count,
}

/// The counts of one reply.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// All of the input.
    pub input: Count,
    /// All of the output.
    pub output: Count,
    /// Of the input.
    pub input_details: Lenient<Details>,
    /// Of the output.
    pub output_details: Lenient<Details>,
}

impl Counts {
    /// What they come to; none where it makes no sense, or where nothing was reported.
    pub fn usage(self) -> Option<TokenUsage> {
        let main = [self.input, self.output];
        if main.contains(&Count::Senseless) || main == [Count::Absent; 2] {
            return None;
        }
        let (input, output) = (self.input.known(), self.output.known());
        let [of_input, of_output] =
            [self.input_details, self.output_details].map(|details| details.0.unwrap_or_default());
        let cache_read = of_input.cached_tokens.known().min(input);
        Some(TokenUsage {
            input,
            output,
            cache_read,
            cache_write: of_input.cache_write_tokens.known().min(input - cache_read),
            reasoning: of_output.reasoning_tokens.known().min(output),
        })
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::{Count, Counts, Details, Lenient, of_unread};

    #[test]
    fn counts_that_make_no_sense_are_told_apart_from_none() {
        let read = |json: &str| serde_json::from_str::<Count>(json).expect("a count");
        assert_eq!(read("7"), Count::Known(7));
        assert_eq!(read("null"), Count::Absent);
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
            assert_eq!(read(json), Count::Senseless, "{json}");
        }
    }

    #[test]
    fn usage_needs_input_or_output_that_make_sense() {
        let of = |input, output| Counts {
            input,
            output,
            input_details: Lenient(Some(Details {
                cached_tokens: Count::Known(9),
                cache_write_tokens: Count::Senseless,
                reasoning_tokens: Count::Absent,
            })),
            output_details: Lenient(None),
        };
        let usage = of(Count::Known(5), Count::Absent).usage().expect("usage");
        assert_eq!((usage.input, usage.output), (5, 0));
        assert_eq!((usage.cache_read, usage.cache_write), (5, 0));
        assert_eq!(of(Count::Known(5), Count::Senseless).usage(), None);
        assert_eq!(of(Count::Absent, Count::Absent).usage(), None);
    }

    #[test]
    fn what_cannot_be_read_is_passed_over() {
        #[derive(Deserialize)]
        struct Used {
            n: Count,
        }
        let lenient = |json: &str| serde_json::from_str::<Lenient<Used>>(json).expect("read").0;
        assert!(lenient("null").is_none() && lenient("\"much\"").is_none());
        assert_eq!(
            lenient("{\"n\":-1}").map(|used| used.n),
            Some(Count::Senseless)
        );
        let used = of_unread::<Used>("{\"choices\":7,\"usage\":{\"n\":3}}");
        assert_eq!(used.map(|used| used.n), Some(Count::Known(3)));
        assert!(of_unread::<Used>("{\"usage\":{\"n\":3}").is_none());
    }
}
