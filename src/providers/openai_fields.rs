//! Fields that OpenAI's chat API and Responses API share. Pure.

use serde::Serialize;

use crate::domain::agent::params::{Cache, Params};
use crate::domain::message::truncate_to_bytes;
use crate::domain::service::{ReportedBilling, Service, Tier};
use crate::providers::openai_models::takes_cache_breakpoints;
use crate::providers::token_counts::Lenient;
use crate::providers::{ChatRequest, Delta};

/// Maximum length of a `prompt_cache_key`.
const MAX_CACHE_KEY: usize = 64;
/// The mode of breakpoints that the client sets.
const EXPLICIT: &str = "explicit";

/// The `prompt_cache_key` of a request with this [`ChatRequest::cache_key`].
pub fn prompt_cache_key(cache_key: &str) -> &str {
    let digest = cache_key.rsplit_once(':');
    truncate_to_bytes(
        digest.map_or(cache_key, |(_, digest)| digest),
        MAX_CACHE_KEY,
    )
}

/// The end of a part of the prompt that later requests find in the service's cache.
#[derive(Clone, Copy, Serialize)]
pub struct CacheBreakpoint {
    mode: &'static str,
}

impl CacheBreakpoint {
    /// The breakpoint after the system prompt, and so after the tools, which come first: a new run of the agent begins with both.
    /// `None` if the model takes none, or if the agent turns caching off.
    pub fn after_system(request: &ChatRequest<'_>) -> Option<Self> {
        let is_cached = takes_cache_breakpoints(request.model)
            && request.params.cache != Cache::Off
            && !request.system.is_empty();
        is_cached.then_some(Self { mode: EXPLICIT })
    }
}

/// Whether the service sets a breakpoint of its own, at the last message.
#[derive(Clone, Copy, Serialize)]
pub struct CacheOptions {
    mode: &'static str,
}

impl CacheOptions {
    /// `None` leaves it to the service; an agent that turns caching off pays for no writes.
    pub fn for_request(request: &ChatRequest<'_>) -> Option<Self> {
        let is_off = takes_cache_breakpoints(request.model) && request.params.cache == Cache::Off;
        is_off.then_some(Self { mode: EXPLICIT })
    }
}

/// OpenAI's name of the requested service tier; `None` leaves the choice to the service.
pub fn service_tier(params: &Params) -> Option<&'static str> {
    match params.service? {
        Service::Default | Service::Batch => None,
        Service::Flex => Some("flex"),
    }
}

/// The service tier that a reply reports; `None` if it reports none.
pub fn service_tier_delta(tier: Lenient<String>) -> Option<Delta<'static>> {
    let tier = Tier::named(&tier.0?)?;
    Some(Delta::Billing(ReportedBilling {
        tier: Some(tier),
        is_regional: None,
    }))
}
