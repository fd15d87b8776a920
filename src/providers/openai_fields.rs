//! Fields that OpenAI's chat API and Responses API share. Pure.

use crate::domain::agent::params::Params;
use crate::domain::service::Service;
use crate::providers::Delta;
use crate::providers::token_counts::Lenient;

/// OpenAI's name of the requested service tier; `None` leaves the choice to the service.
pub fn service_tier(params: &Params) -> Option<&'static str> {
    match params.service? {
        Service::Default | Service::Batch => None,
        Service::Flex => Some("flex"),
    }
}

/// The service tier that a reply reports; `None` if it reports none.
pub fn service_tier_delta(tier: Lenient<String>) -> Option<Delta<'static>> {
    let service = match tier.0?.as_str() {
        "flex" => Service::Flex,
        _ => Service::Default,
    };
    Some(Delta::ServiceTier(service))
}
