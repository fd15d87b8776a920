//! Rate limits of providers: the units that services count, and which requests come first.

use serde::{Deserialize, Serialize};

use crate::settings::choice::choice;

choice! {
    /// Which requests to a provider come first while its rate limit makes some wait.
    #[derive(Default)]
    pub enum Priority {
        /// Somebody waits for the reply.
        #[default]
        Interactive = "interactive",
        /// After the interactive ones, but never less than a tenth of the limit.
        Background = "background",
    }
}

/// The units, by their names in metrics. The index of a name is the unit's in [`PerUnit`].
pub const UNITS: [&str; 4] = ["requests", "input_tokens", "output_tokens", "tokens"];
pub const REQUESTS: usize = 0;
pub const INPUT_TOKENS: usize = 1;
pub const OUTPUT_TOKENS: usize = 2;
/// Input and output together.
pub const TOKENS: usize = 3;

/// One value for each unit.
pub type PerUnit<T> = [T; UNITS.len()];

/// What a service allows in a minute; `None` if that is not limited, or not known.
pub type Limits = PerUnit<Option<u64>>;

/// A limit as metrics and the console show it.
#[derive(Clone, Debug, PartialEq)]
pub struct RateStatus {
    pub provider: String,
    /// A model, or the pattern of a group of models.
    pub model: String,
    pub limits: Limits,
    /// In the last minute.
    pub used: PerUnit<u64>,
    /// Requests that have not been sent yet.
    pub waiting: usize,
    /// For how much longer the service wants no requests, in milliseconds; 0 if it takes them.
    pub paused_ms: u64,
}

impl RateStatus {
    /// Adds the limit of another key of the same model.
    pub fn add(&mut self, other: &Self) {
        for unit in 0..UNITS.len() {
            self.used[unit] += other.used[unit];
            self.limits[unit] = match (self.limits[unit], other.limits[unit]) {
                (Some(one), Some(other)) => Some(one + other),
                (one, other) => one.or(other),
            };
        }
        self.waiting += other.waiting;
        self.paused_ms = self.paused_ms.max(other.paused_ms);
    }
}

/// What a node has used of a limit since it last reported that, and what it has learned of the limit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RateReport {
    pub provider: String,
    /// The beginning of the provider key's digest; 0 without a key.
    pub key: u64,
    /// As [`RateStatus::model`].
    pub model: String,
    /// Negative if it gave back more than it used.
    pub used: PerUnit<f64>,
    /// What replies said.
    pub limits: Limits,
    /// Requests a minute, as guessed from refusals.
    pub guess: Option<f64>,
    /// See [`RateStatus::paused_ms`].
    pub paused_ms: u64,
}
