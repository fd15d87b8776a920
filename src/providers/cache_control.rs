//! The marks by which Anthropic's models learn which part of a prompt to cache, on its own API and on OpenRouter's. Pure.

use serde::Serialize;

use crate::domain::agent::params::Cache;
use crate::providers::ChatRequest;

/// A cache breakpoint: the service caches the prompt up to here for later requests.
#[derive(Clone, Copy, Serialize)]
pub struct CacheControl {
    r#type: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    ttl: Option<&'static str>,
}

impl CacheControl {
    /// `None` if nothing reads the cache, or if the agent turns caching off.
    pub fn for_request(request: &ChatRequest<'_>) -> Option<Self> {
        let ttl = match request.params.cache {
            Cache::FiveMinutes => None,
            Cache::OneHour => Some("1h"),
            Cache::Off => return None,
        };
        request.is_prompt_reused.then_some(Self {
            r#type: "ephemeral",
            ttl,
        })
    }
}

/// Calls `mark` with the last message of this request and with that of the previous one. The service reads its cache up to the
/// previous breakpoint, and writes it up to the last.
pub fn mark_request_ends<'m, M>(
    messages: &'m mut [M],
    is_assistant: impl Fn(&M) -> bool,
    mut mark: impl FnMut(&'m mut M),
) {
    let mut marks = 0;
    let mut after_assistant = true;
    for message in messages.iter_mut().rev() {
        if is_assistant(message) {
            after_assistant = true;
        } else if std::mem::take(&mut after_assistant) && marks < 2 {
            marks += 1;
            mark(message);
        }
    }
}
