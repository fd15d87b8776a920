//! The usage of runs: tokens, model calls, tool calls and money. Money is counted in picodollars, so sums are exact.

use serde::{Deserialize, Serialize};

/// A limit of a budget that refuses calls, and its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CallLimit {
    ToolCalls(u64),
    Runs(u64),
}

/// The tokens of one reply as the provider reported them. `input` includes cached tokens for every API.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenUsage {
    /// The tokens of the prompt, including those read from and written to the provider's cache.
    pub input: u64,
    /// Tokens that the model produced.
    pub output: u64,
    /// The part of `input` that was read from the provider's cache.
    pub cache_read: u64,
    /// The part of `input` that was written to the provider's cache.
    pub cache_write: u64,
    /// The part of `output` that is reasoning, if the provider reports it. Only for single replies; sums do not have it.
    #[serde(default)]
    pub reasoning: u64,
}

impl TokenUsage {
    /// Input and output together. Saturates, because providers may report any number.
    pub fn total(&self) -> u64 {
        self.input.saturating_add(self.output)
    }
}

/// An amount of money in picodollars (10⁻¹² USD), so that sums over a tree stay exact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Cost(pub u64);

impl Cost {
    /// Converts US dollars; clamps amounts outside the range.
    pub fn from_usd(usd: f64) -> Self {
        Self((usd * 1e12).round().clamp(0.0, u64::MAX as f64) as u64)
    }

    pub fn to_usd(self) -> f64 {
        self.0 as f64 / 1e12
    }
}

/// Prices of one model, in USD per million tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Price {
    /// Input tokens that are not cached.
    pub input: f64,
    /// Output tokens.
    pub output: f64,
    /// Input tokens read from the cache; unset means the price of `input`.
    pub cache_read: Option<f64>,
    /// Input tokens written to the cache; unset means the price of `input`.
    pub cache_write: Option<f64>,
    /// Input tokens written to a cache that keeps them for an hour; unset means the price of `cache_write`.
    pub cache_write_1h: Option<f64>,
    /// The prices of a request with a long input.
    pub long: Option<LongPrice>,
}

/// Prices for the whole request if its input, including cached tokens, has more than `above` tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LongPrice {
    /// The threshold, in input tokens.
    pub above: u64,
    /// See [`Price::input`].
    pub input: f64,
    /// See [`Price::output`].
    pub output: f64,
    /// See [`Price::cache_read`].
    pub cache_read: Option<f64>,
    /// See [`Price::cache_write`].
    pub cache_write: Option<f64>,
    /// See [`Price::cache_write_1h`].
    pub cache_write_1h: Option<f64>,
}

impl Price {
    /// The prices of a request with so many input tokens.
    fn for_input_length(&self, input: u64) -> Self {
        match self.long.filter(|long| input > long.above) {
            Some(long) => Self {
                input: long.input,
                output: long.output,
                cache_read: long.cache_read,
                cache_write: long.cache_write,
                cache_write_1h: long.cache_write_1h,
                long: None,
            },
            None => *self,
        }
    }

    /// The prices of requests whose cached tokens are kept for an hour.
    pub fn with_hour_cache(self) -> Self {
        Self {
            cache_write: self.cache_write_1h.or(self.cache_write),
            long: self.long.map(|long| LongPrice {
                cache_write: long.cache_write_1h.or(long.cache_write),
                ..long
            }),
            ..self
        }
    }

    /// Whether input tokens cost less if they are read from the cache.
    pub fn is_cache_cheaper(&self) -> bool {
        self.cache_read.is_some_and(|price| price < self.input)
    }

    /// Multiplies each price by `factor`.
    pub fn scaled(self, factor: f64) -> Self {
        let part = |price: Option<f64>| price.map(|price| price * factor);
        Self {
            input: self.input * factor,
            output: self.output * factor,
            cache_read: part(self.cache_read),
            cache_write: part(self.cache_write),
            cache_write_1h: part(self.cache_write_1h),
            long: self.long.map(|long| LongPrice {
                above: long.above,
                input: long.input * factor,
                output: long.output * factor,
                cache_read: part(long.cache_read),
                cache_write: part(long.cache_write),
                cache_write_1h: part(long.cache_write_1h),
            }),
        }
    }

    /// The cost of these tokens.
    pub fn cost(&self, tokens: &TokenUsage) -> Cost {
        let price = self.for_input_length(tokens.input);
        let uncached = tokens
            .input
            .saturating_sub(tokens.cache_read.saturating_add(tokens.cache_write));
        let part = |count: u64, usd_per_million: f64| count as f64 * usd_per_million * 1e6;
        let pico = part(uncached, price.input)
            + part(tokens.output, price.output)
            + part(tokens.cache_read, price.cache_read.unwrap_or(price.input))
            + part(tokens.cache_write, price.cache_write.unwrap_or(price.input));
        Cost(pico.round().clamp(0.0, u64::MAX as f64) as u64)
    }
}

/// The usage of one run, or the sum of several runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// The tokens of all replies.
    pub tokens: TokenUsage,
    /// The number of replies from providers.
    pub model_calls: u64,
    /// Executed tool calls, including failed ones.
    pub tool_calls: u64,
    /// The cost; `None` if no price is known for any of the models that answered.
    pub cost: Option<Cost>,
    /// Billed provider requests without reported usage, for example because they were interrupted.
    pub unreported: u64,
}

impl Usage {
    /// Saturates, because providers may report any number.
    pub fn add(&mut self, other: &Usage) {
        let add = |sum: &mut u64, more: u64| *sum = sum.saturating_add(more);
        add(&mut self.tokens.input, other.tokens.input);
        add(&mut self.tokens.output, other.tokens.output);
        add(&mut self.tokens.cache_read, other.tokens.cache_read);
        add(&mut self.tokens.cache_write, other.tokens.cache_write);
        add(&mut self.model_calls, other.model_calls);
        add(&mut self.tool_calls, other.tool_calls);
        self.cost = match (self.cost, other.cost) {
            (Some(a), Some(b)) => Some(Cost(a.0.saturating_add(b.0))),
            (a, b) => a.or(b),
        };
        add(&mut self.unreported, other.unreported);
    }

    /// Without tool calls.
    pub fn of_requests(self) -> Self {
        Self {
            tool_calls: 0,
            ..self
        }
    }

    /// Whether every request's usage is known.
    pub fn is_complete(&self) -> bool {
        self.unreported == 0
    }
}

/// The usage of the replies of one model within a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelUsage {
    /// As the provider named it; the requested one if no reply named any.
    pub model: String,
    /// Without tool calls. Its `reasoning` is a sum.
    pub usage: Usage,
}

impl ModelUsage {
    /// Adds usage of this model, with its reasoning tokens.
    pub fn add(&mut self, usage: &Usage) {
        self.usage.add(usage);
        let reasoning = &mut self.usage.tokens.reasoning;
        *reasoning = reasoning.saturating_add(usage.tokens.reasoning);
    }
}

/// The usage of a run with all its descendants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeUsage {
    /// The number of runs, including this one.
    pub runs: u64,
    /// The sum of their usage.
    pub usage: Usage,
}

#[cfg(test)]
mod tests {
    use super::{Cost, LongPrice, Price, TokenUsage, Usage};

    #[test]
    fn a_long_request_has_prices_of_its_own() {
        let price = Price {
            input: 2.0,
            output: 10.0,
            cache_read: Some(0.2),
            cache_write: Some(2.5),
            cache_write_1h: Some(4.0),
            long: Some(LongPrice {
                above: 1000,
                input: 4.0,
                output: 15.0,
                ..LongPrice::default()
            }),
        };
        let tokens = |input, cache_write| TokenUsage {
            input,
            output: 100,
            cache_write,
            ..TokenUsage::default()
        };
        assert_eq!(price.cost(&tokens(1000, 0)), Cost::from_usd(0.003));
        assert_eq!(price.cost(&tokens(1001, 0)), Cost::from_usd(0.005504));
        assert_eq!(price.cost(&tokens(1000, 1000)), Cost::from_usd(0.0035));
        let hour = price.with_hour_cache();
        assert_eq!(hour.cost(&tokens(1000, 1000)), Cost::from_usd(0.005));
    }

    #[test]
    fn absurd_claims_do_not_overflow() {
        let claimed = Usage {
            tokens: TokenUsage {
                input: u64::MAX,
                ..TokenUsage::default()
            },
            cost: Some(Cost(u64::MAX)),
            ..Usage::default()
        };
        let mut sum = claimed;
        sum.add(&claimed);
        assert_eq!(sum, claimed);
    }
}
