//! What is recorded of a turn: what was sent, when and how often, and what it used. Only data.

use std::sync::Arc;

use jiff::Timestamp;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::domain::agent::params::Effort;
use crate::domain::attachment::Digest;
use crate::domain::request_head::RequestHead;
use crate::domain::timestamp_text;
use crate::domain::usage::{Cost, TokenUsage};

/// What is recorded of a turn besides its request and its reply.
#[derive(Clone, Debug, PartialEq)]
pub struct TurnRecord {
    /// Counts from 1.
    pub turn: u32,
    /// The provider of the last attempt.
    pub provider: String,
    /// The model that the last attempt requested, without its provider.
    pub model: String,
    pub effort: Option<Effort>,
    pub status: TurnStatus,
    /// Whether the turn was taken over from another run.
    pub is_copied: bool,
    /// Whether a pattern of `[data] redact` has removed something from the request.
    pub is_redacted: bool,
    /// The length of the body as it was sent; `None` if requests are not recorded.
    pub request_bytes: Option<u64>,
    /// From the start of the last attempt.
    pub first_token_ms: Option<u64>,
    /// In order; at least one.
    pub attempts: Vec<TurnAttempt>,
    /// Of all attempts; `None` if the provider reported none.
    pub usage: Option<TokenUsage>,
    pub cost: Option<Cost>,
    pub stop_reason: Option<String>,
    /// The number of calls in the reply.
    pub tool_calls: u32,
}

impl TurnRecord {
    /// From the start of the first attempt to the end of the last.
    pub fn duration_ms(&self) -> u64 {
        let Some((first, last)) = self.attempts.first().zip(self.attempts.last()) else {
            return 0;
        };
        let before = last.started_at.as_millisecond() - first.started_at.as_millisecond();
        u64::try_from(before)
            .unwrap_or(0)
            .saturating_add(last.duration_ms)
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum TurnStatus {
    /// The model replied.
    #[default]
    Completed,
    /// No attempt got a reply.
    Failed,
    /// The run was cancelled while the turn waited for its reply.
    Cancelled,
}

/// One request of a turn: the first one, a retry, or the request to a fallback.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct TurnAttempt {
    /// The provider.
    pub provider: String,
    /// The requested model, without its provider.
    pub model: String,
    /// The HTTP status of the response; null if there was none.
    pub status: Option<u16>,
    /// Why the attempt failed; null if it succeeded.
    pub error: Option<String>,
    /// When the attempt began.
    #[serde(serialize_with = "timestamp_text::serialize")]
    #[schemars(with = "Timestamp")]
    pub started_at: Timestamp,
    /// How long it took, in milliseconds.
    pub duration_ms: u64,
}

/// A turn to be stored with a write.
#[derive(Clone, Debug, PartialEq)]
pub struct TurnEntry {
    pub record: TurnRecord,
    /// `None` if requests are not recorded, or if the turn sent none.
    pub request: Option<StoredRequest>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct StoredRequest {
    /// `None` if it equals that of the run's previous request.
    pub head: Option<Arc<RequestHead>>,
    pub body: BodyDelta,
    /// The text to store for [`crate::store::body_pieces::TextKey::Shared`], unless the body does not refer to one.
    /// `None` if the request was read.
    pub shared_text: Option<Arc<SharedText>>,
}

/// A text that the requests of several runs contain: it is stored once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedText {
    pub digest: Digest,
    pub text: Arc<str>,
}

impl SharedText {
    pub fn new(text: &str) -> Self {
        Self {
            digest: Digest::compute(text.as_bytes()),
            text: text.into(),
        }
    }
}

/// The body of a request as it is stored: see [`crate::store::request_delta`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BodyDelta {
    /// How many bytes are those of the previous body, at the beginning and at the end; `None` if the body is stored whole.
    pub common: Option<(u64, u64)>,
    /// The bytes between: literal ones, and references to texts.
    pub pieces: Vec<u8>,
}
