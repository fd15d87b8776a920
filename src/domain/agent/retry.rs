//! `[retry]` of an agent's file.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::domain::agent::settings::{Choice, MAX_COUNT, Section, Setting, Visitor};

/// `[retry]`: how a failed provider request is retried.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Retry {
    /// Attempts after the first.
    pub max_retries: u32,
    /// How the longest delay grows with each retry.
    pub backoff: Backoff,
    /// The longest delay before the first retry.
    pub initial_delay: Duration,
    /// The longest delay before any retry.
    pub max_delay: Duration,
}

impl Default for Retry {
    fn default() -> Self {
        Self {
            max_retries: 2,
            backoff: Backoff::Exponential,
            initial_delay: Duration::from_millis(500),
            max_delay: Duration::from_secs(30),
        }
    }
}

impl Section for Retry {
    const SCHEMA: &'static str = "AgentRetry";

    fn visit<V: Visitor>(&mut self, v: &mut V) {
        let Self {
            max_retries,
            backoff,
            initial_delay,
            max_delay,
        } = self;
        v.setting("max_retries", Setting::Whole(0..=MAX_COUNT, max_retries));
        v.setting("backoff", Setting::Choice(backoff));
        v.setting("initial_delay_ms", Setting::Milliseconds(initial_delay));
        v.setting("max_delay_ms", Setting::Milliseconds(max_delay));
    }
}

/// How the delay before a retry grows with the number of retries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "RetryBackoff")]
#[serde(rename_all = "lowercase")]
pub enum Backoff {
    /// The delay doubles.
    #[default]
    Exponential,
    /// The delay grows by the initial delay.
    Linear,
    /// The delay does not change.
    Fixed,
}

impl Choice for Backoff {
    const NAMES: &'static [(&'static str, Self)] = &[
        ("exponential", Self::Exponential),
        ("linear", Self::Linear),
        ("fixed", Self::Fixed),
    ];
}
