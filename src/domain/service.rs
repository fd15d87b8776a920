//! How soon a provider has to answer, which some services sell at different prices.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::domain::agent::settings::Choice;

/// A service's tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Service {
    /// At once, at the usual price.
    #[default]
    Default,
    /// At once or not at all: slower, cheaper, and refused (429) when the service is busy.
    Flex,
    /// Within a day, in a batch.
    Batch,
}

impl Choice for Service {
    const NAMES: &'static [(&'static str, Self)] = &Self::ALL;
}

impl Service {
    /// All by name.
    pub const ALL: [(&'static str, Self); 3] = [
        ("default", Self::Default),
        ("flex", Self::Flex),
        ("batch", Self::Batch),
    ];

    /// Its name.
    pub fn as_str(self) -> &'static str {
        Self::ALL[self as usize].0
    }
}
