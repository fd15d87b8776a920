//! `[retry]` of an agent: how failed requests to providers are repeated.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::settings::choice::choice;
use crate::settings::kinds::{Milliseconds, OneOf, Whole};
use crate::settings::section::section;
use crate::settings::table_reader::MAX_COUNT;

section! {
    /// `[retry]`: how failed provider requests are retried.
    #[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct Retry in "AgentRetry" {
        /// Attempts after the first.
        pub max_retries: u32 = 2, Whole(0..=MAX_COUNT);
        /// How the delay grows with each retry: exponential, linear or fixed.
        pub backoff: Backoff, OneOf;
        /// The longest delay before the first retry, in milliseconds.
        pub initial_delay ("initial_delay_ms"): Duration = Duration::from_millis(500), Milliseconds(0..=MAX_COUNT);
        /// The longest delay before any retry, in milliseconds.
        pub max_delay ("max_delay_ms"): Duration = Duration::from_secs(30), Milliseconds(0..=MAX_COUNT);
    }
}

choice! {
    /// How the delay before a retry grows with the number of retries.
    #[derive(Default)]
    #[schemars(rename = "RetryBackoff")]
    pub enum Backoff {
        /// The delay doubles.
        #[default]
        Exponential = "exponential",
        /// The delay grows by the initial delay.
        Linear = "linear",
        /// The delay does not change.
        Fixed = "fixed",
    }
}
