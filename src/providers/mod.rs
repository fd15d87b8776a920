//! The provider contract: one request to a model, one reply. Does not know wire formats, runs or retries.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::HeaderMap;
use secrecy::{ExposeSecret, SecretString};
use serde_json::value::RawValue;

use crate::config::models::ModelFacts;
use crate::domain::agent::client_additions::ToolChoice;
use crate::domain::agent::params::Params;
use crate::domain::attachment::Blobs;
use crate::domain::message::{AssistantMessage, Message, ToolSpec};
use crate::domain::redaction::Redactor;
use crate::domain::request_head::RequestHead;
use crate::domain::service::ReportedBilling;
use crate::domain::trace::TraceContext;
use crate::domain::usage::{Cost, TokenUsage};

pub mod anthropic;
pub mod batches;
pub mod cache_control;
pub mod call_pieces;
pub mod content_parts;
pub mod echo;
pub mod endpoint;
pub mod error_mapping;
pub mod http_client;
pub mod json_prompt;
pub mod lenient_json;
pub mod model_params;
pub mod ollama;
pub mod openai_chat;
pub mod openai_fields;
pub mod openai_models;
pub mod openai_responses;
pub mod openai_service;
pub mod rate_limits;
pub mod reasoning;
pub mod registry;
pub mod reply_builder;
pub mod request_body;
pub mod response_schema;
pub mod retry;
pub mod scripted;
pub mod setup_error;
pub mod stop_reason;
pub mod stream_decoder;
pub mod strict_limits;
pub mod surrogates;
pub mod token_counts;
pub mod tool_call_codec;
pub mod wire_json;

/// A service that runs models.
pub trait Provider: Send + Sync + 'static {
    /// Sends one request and returns the whole reply. `deltas` receives the request before it is sent, the token usage as
    /// soon as the service reports it and, if `request.stream` is set, the text as it arrives. Dropping the future closes the connection.
    fn complete<'a>(
        &'a self,
        request: ChatRequest<'a>,
        deltas: &'a mut (dyn FnMut(Delta<'_>) + Send),
    ) -> BoxFuture<'a, Result<Reply, ProviderError>>;

    /// The only models that it has, sorted; `None` if they are not known.
    fn model_names(&self) -> Option<Vec<String>> {
        None
    }

    /// `None` if the service has no batch API.
    fn batch_provider(&self) -> Option<&dyn BatchProvider> {
        None
    }

    /// Whether its requests can say which tool the reply has to call.
    fn takes_tool_choice(&self) -> bool {
        false
    }

    /// Whether it charges less for a prompt that begins like an earlier one.
    fn caches_prompts(&self) -> bool {
        false
    }

    /// The warning for the user of a run if a request to this model leaves some of these parameters out.
    fn dropped_params_warning(
        &self,
        _model: &str,
        _params: &Params,
        _facts: Option<&ModelFacts>,
    ) -> Option<String> {
        None
    }

    /// The warning for the user of a run if the reply shows that the service has read only a part of the prompt.
    fn cut_prompt_warning(&self, _request: &ChatRequest<'_>, _reply: &Reply) -> Option<String> {
        None
    }
}

/// A provider that also answers requests in batches.
pub trait BatchProvider: Send + Sync {
    fn batch_client(&self) -> &dyn BatchClient;

    /// Converts the request to the form that a batch takes.
    ///
    /// # Errors
    /// The request cannot be written as JSON.
    fn batch_item(&self, request: &ChatRequest<'_>) -> Result<BatchItem, ProviderError>;

    /// Parses a batch's response to the request.
    fn read_batch_reply<'a>(
        &'a self,
        request: ChatRequest<'a>,
        status: u16,
        body: Bytes,
        deltas: &'a mut (dyn FnMut(Delta<'_>) + Send),
    ) -> BoxFuture<'a, Result<Reply, ProviderError>>;
}

/// The batch API of a service. Each batch has one request.
pub trait BatchClient: Send + Sync {
    /// The longest wait between two polls of a batch.
    fn max_poll_interval(&self) -> Duration;

    /// Submits a request and returns the id of its batch. `name` identifies the request within the batch.
    fn create<'a>(
        &'a self,
        name: &'a str,
        item: &'a BatchItem,
        key: Option<&'a SecretString>,
    ) -> BoxFuture<'a, Result<String, ProviderError>>;

    /// Returns the id of the batch that was submitted with this name; `None` if there is none, or if the service cannot
    /// search by name.
    fn find<'a>(
        &'a self,
        name: &'a str,
        key: Option<&'a SecretString>,
    ) -> BoxFuture<'a, Result<Option<String>, ProviderError>>;

    /// Checks a batch, and fetches the result of the request if the batch is done.
    ///
    /// # Errors
    /// The check failed; the batch itself may be fine.
    fn poll<'a>(
        &'a self,
        batch: &'a str,
        name: &'a str,
        key: Option<&'a SecretString>,
    ) -> BoxFuture<'a, Result<BatchStatus, ProviderError>>;

    /// Cancels a batch. The service may still charge for what it has already processed.
    fn cancel<'a>(
        &'a self,
        batch: &'a str,
        key: Option<&'a SecretString>,
    ) -> BoxFuture<'a, Result<(), ProviderError>>;
}

pub struct BatchItem {
    /// The path of the endpoint that the request is for; only OpenAI needs it.
    pub path: &'static str,
    /// The request as it would be sent without a batch.
    pub request: SentRequest,
}

impl BatchItem {
    /// # Errors
    /// The body is not JSON.
    pub fn json(&self) -> Result<&RawValue, ProviderError> {
        serde_json::from_slice(&self.request.body).map_err(|error| {
            let message = format!("the request cannot be written as JSON: {error}");
            ProviderError::new(ErrorCategory::BadRequest, message)
        })
    }
}

#[derive(Debug)]
pub enum BatchStatus {
    InProgress,
    /// The HTTP response that the service would have sent to the same request without a batch.
    Completed {
        status: u16,
        body: Bytes,
    },
    /// The batch has no response to the request, or one that cannot be downloaded.
    Failed(ProviderError),
    /// The batch is done, but its results could not be read, or do not name the request. The next poll may find them whole.
    Unreadable(ProviderError),
    /// The service did not process the request in time.
    Expired,
}

/// A part of a reply that arrives before the reply is complete.
#[derive(Clone, Copy, Debug)]
pub enum Delta<'a> {
    /// The request is sent next.
    Sending(&'a SentRequest),
    /// A batch with the request is made next, or exists.
    Submitting,
    /// The record has the batch: a process that resumes the run reads it again.
    BatchRecorded,
    /// The response has begun.
    ResponseStarted {
        status: u16,
        headers: &'a HeaderMap,
    },
    Text(&'a str),
    /// How the service says that it bills the request. It replaces what earlier ones said.
    Billing(ReportedBilling),
    /// The model began to reason. The service may send no text of its reasoning.
    ReasoningStarted,
    /// Text of the reasoning, or of a summary of it.
    Reasoning(&'a str),
    /// The total usage so far. It replaces earlier values, and is all that is known if the reply breaks off.
    Usage(TokenUsage),
    /// What the request costs, as the service reports it.
    Cost(Cost),
}

impl Delta<'_> {
    /// Whether the model has read the prompt.
    pub fn begins_reply(&self) -> bool {
        matches!(
            self,
            Self::Text(_) | Self::ReasoningStarted | Self::Reasoning(_) | Self::Usage(_)
        )
    }
}

/// A request in the form in which it is sent.
#[derive(Clone, Debug)]
pub struct SentRequest {
    pub head: Arc<RequestHead>,
    pub body: Bytes,
}

/// One request to a model, borrowed from the conversation.
#[derive(Clone, Copy, Debug)]
pub struct ChatRequest<'a> {
    /// The provider's own name of the model, without prefix.
    pub model: &'a str,
    /// Empty means no system prompt.
    pub system: &'a str,
    /// Oldest first.
    pub messages: &'a [Message],
    /// The bytes of the conversation's attachments; `None` if it has none.
    pub blobs: Option<&'a Blobs>,
    /// Empty means that the request has no `tools` key.
    pub tools: &'a [ToolSpec],
    /// What the reply has to call; `None` if the model decides.
    pub tool_choice: Option<&'a ToolChoice>,
    pub params: &'a Params,
    /// `None` if the model is unknown.
    pub facts: Option<&'a ModelFacts>,
    /// Whether to request a stream, and so deltas.
    pub stream: bool,
    /// Whether a later request is likely to begin with this prompt, which makes it worth caching.
    pub is_prompt_reused: bool,
    /// Identifies the beginning of the prompt, for services that cache prompts by a key; empty means none.
    pub cache_key: &'a str,
    /// Stays the same in all requests of a conversation, and is of no other; empty means none.
    pub conversation_id: &'a str,
    /// The trace context to send to the service; `None` if tracing is off.
    pub trace: Option<&'a TraceContext>,
    /// The client's own provider key, sent instead of the configured one.
    pub api_key: Option<&'a SecretString>,
}

#[derive(Clone, Debug, Default)]
pub struct Reply {
    /// Text, tool calls and echo. Call ids are the provider's; the conversation makes them unique.
    pub message: AssistantMessage,
    /// `None` if the provider reported no usage.
    pub usage: Option<TokenUsage>,
    /// Why the reply ended, in the provider's own term.
    pub stop_reason: Option<String>,
    /// The model that the provider reports, without prefix.
    pub model: Option<String>,
    pub outcome: ReplyOutcome,
    /// Why the service refused, if it says so beside the text.
    pub refusal: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReplyOutcome {
    /// The reply has text or tool calls, or ended normally without either.
    #[default]
    Complete,
    /// The reply reached the token limit before any text or tool call.
    Truncated,
    /// The model or a filter of its service refused. The text, if any, gives the reason.
    Refused,
}

/// Longer messages of a service are truncated.
pub const MAX_MESSAGE_CHARS: usize = 1000;
/// Stands for a secret.
const REDACTED: &str = "[redacted]";

/// Why a request has no reply. Displays as `<category>: <message>`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {message}", category.as_str())]
pub struct ProviderError {
    pub category: ErrorCategory,
    /// The service's own message if it sent one. Never holds a secret.
    pub message: String,
    /// How long the service wants the client to wait before the next request.
    pub retry_after: Option<Duration>,
    /// Whether the service may charge for the request: it broke off after the request was sent, without an error of the
    /// service.
    pub may_be_billed: bool,
    /// Whether the usage that was reported through deltas is final: the reply was complete, and then rejected.
    pub has_final_usage: bool,
    /// Whether the request is longer than the model's context, so that a shorter one may succeed.
    pub is_too_long: bool,
    /// Whether a quota is spent, so that no wait helps.
    pub is_quota_spent: bool,
}

impl ProviderError {
    /// An error without `retry_after`, from a request that was not sent or that the service rejected.
    pub fn new(category: ErrorCategory, message: impl Into<String>) -> Self {
        Self {
            category,
            message: message.into(),
            retry_after: None,
            may_be_billed: false,
            has_final_usage: false,
            is_too_long: false,
            is_quota_spent: false,
        }
    }

    /// Appends advice to the message, in parentheses.
    pub fn with(mut self, advice: &str) -> Self {
        self.message = format!("{} ({advice})", self.message);
        self
    }

    /// Removes this secret from the message: some services repeat it.
    pub fn redact(mut self, secret: &SecretString) -> Self {
        let secret = secret.expose_secret().trim();
        if secret.is_empty() {
            return self;
        }
        // Perhaps within the secret.
        let is_truncated = self.message.chars().count() >= MAX_MESSAGE_CHARS;
        if self.message.contains(secret) {
            self.message = self.message.replace(secret, REDACTED);
        }
        let mut ends = secret.char_indices().map(|(end, _)| end).rev();
        let beginning = ends.find(|end| *end > 0 && self.message.ends_with(&secret[..*end]));
        if let Some(bytes) = beginning.filter(|_| is_truncated) {
            self.message.truncate(self.message.len() - bytes);
            self.message.push_str(REDACTED);
        }
        self
    }

    /// Removes what these patterns match from the message: some services repeat parts of the request.
    pub fn redact_matches(mut self, redactor: &Redactor) -> Self {
        if let Cow::Owned(redacted) = redactor.redact(&self.message) {
            self.message = redacted;
        }
        self
    }

    pub fn with_final_usage(mut self, has_final_usage: bool) -> Self {
        self.has_final_usage = has_final_usage;
        self
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorCategory {
    /// 401, 403, or no API key.
    Auth,
    /// 400, 404, 405, 413, 415, 422.
    BadRequest,
    /// 429.
    RateLimit,
    /// 529, or 503 with a body that mentions overload.
    Overloaded,
    /// 409, 425, other 5xx, 3xx, a broken connection, an unreadable body.
    Server,
    /// 408, or the deadline.
    Timeout,
}

impl ErrorCategory {
    /// The name in messages, errors and configuration.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Auth => "auth",
            Self::BadRequest => "bad_request",
            Self::RateLimit => "rate_limit",
            Self::Overloaded => "overloaded",
            Self::Server => "server",
            Self::Timeout => "timeout",
        }
    }

    /// Reverses [`ErrorCategory::as_str`].
    pub fn parse(name: &str) -> Option<Self> {
        let all = [
            Self::Auth,
            Self::BadRequest,
            Self::RateLimit,
            Self::Overloaded,
            Self::Server,
            Self::Timeout,
        ];
        all.into_iter().find(|category| category.as_str() == name)
    }

    /// Whether the same request may succeed if it is sent again.
    pub fn is_retryable(self) -> bool {
        matches!(
            self,
            Self::RateLimit | Self::Overloaded | Self::Server | Self::Timeout
        )
    }
}
