//! Service tiers: some providers sell slower replies at a lower price, and faster ones at a higher one.

use serde_json::{Map, Value};

use crate::settings::choice::choice;

choice! {
    /// The tier of a provider's service.
    #[derive(Default)]
    #[schemars(rename = "ServiceTier")]
    pub enum Service {
        /// Immediately, at the standard price.
        #[default]
        Default = "default",
        /// Slower and cheaper; rejected (429) if the provider is busy.
        Flex = "flex",
        /// Within a day, in a batch.
        Batch = "batch",
    }
}

/// How a request is billed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Billing {
    pub tier: Tier,
    /// Whether it stays within a region.
    pub is_regional: bool,
}

/// What a reply says of its billing; `None` for what it does not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReportedBilling {
    pub tier: Option<Tier>,
    pub is_regional: Option<bool>,
}

/// Where Anthropic's `inference_geo` does not leave the region open.
pub fn is_regional(inference_geo: &str) -> bool {
    !matches!(inference_geo, "" | "global" | "not_available")
}

impl Billing {
    /// As a request of this service is billed if its reply does not say otherwise. The first of `extras` with a field wins,
    /// as in the body that they are merged into.
    pub fn requested(service: Option<Service>, extras: [&Map<String, Value>; 2]) -> Self {
        let field = |key| {
            let mut extras = extras.iter();
            extras.find_map(|extra| extra.get(key)?.as_str())
        };
        let tier = field("service_tier").and_then(Tier::named);
        let speed = field("speed").and_then(Tier::named);
        Self {
            tier: tier
                .or(speed)
                .unwrap_or_else(|| service.unwrap_or_default().into()),
            is_regional: field("inference_geo").is_some_and(is_regional),
        }
    }
}

/// The tier of a provider's service that is billed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tier {
    #[default]
    Standard,
    Flex,
    Batch,
    /// OpenAI's `priority`, Anthropic's fast mode.
    Priority,
    Ultrafast,
    /// One without a known price.
    Unknown,
}

impl From<Service> for Tier {
    fn from(service: Service) -> Self {
        match service {
            Service::Default => Self::Standard,
            Service::Flex => Self::Flex,
            Service::Batch => Self::Batch,
        }
    }
}

impl Tier {
    /// Reads a service's name of a tier. `None` if it leaves the choice to the service.
    pub fn named(name: &str) -> Option<Self> {
        Some(match name {
            "" | "auto" => return None,
            "default" | "standard" | "standard_only" | "on_demand" | "scale" => Self::Standard,
            "flex" => Self::Flex,
            "batch" => Self::Batch,
            "priority" | "fast" => Self::Priority,
            "ultrafast" => Self::Ultrafast,
            _ => Self::Unknown,
        })
    }
}
