//! Service tiers: some providers sell slower replies at a lower price.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::domain::agent::settings::Choice;

/// The tier of a provider's service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(rename = "ServiceTier")]
pub enum Service {
    /// Immediately, at the standard price.
    #[default]
    Default,
    /// Slower and cheaper; rejected (429) if the provider is busy.
    Flex,
    /// Within a day, in a batch.
    Batch,
}

impl Choice for Service {
    const NAMES: &'static [(&'static str, Self)] = &Self::ALL;
}

impl Service {
    pub const ALL: [(&'static str, Self); 3] = [
        ("default", Self::Default),
        ("flex", Self::Flex),
        ("batch", Self::Batch),
    ];

    pub fn as_str(self) -> &'static str {
        Self::ALL[self as usize].0
    }
}
