//! The provider contract: one question to a model, one reply. Knows no wire, no run and no retry policy.

use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use secrecy::{ExposeSecret, SecretString};
use serde_json::value::RawValue;

use crate::config::models::ModelFacts;
use crate::domain::agent::params::Params;
use crate::domain::attachment::Blobs;
use crate::domain::message::{AssistantMessage, Message, ToolSpec};
use crate::domain::service::Service;
use crate::domain::trace::TraceContext;
use crate::domain::usage::TokenUsage;

pub mod anthropic;
pub mod batches;
pub mod content_parts;
pub mod echo;
pub mod endpoint;
pub mod error_mapping;
pub mod http_client;
pub mod model_params;
pub mod ollama;
pub mod openai_chat;
pub mod openai_fields;
pub mod openai_responses;
pub mod reasoning;
pub mod registry;
pub mod reply_builder;
pub mod request_body;
pub mod retry;
pub mod scripted;
pub mod stream_decoder;
pub mod token_counts;
pub mod tool_call_codec;
pub mod wire_json;

/// A service that answers turns.
pub trait Provider: Send + Sync + 'static {
    /// Sends one request. `deltas` gets the tokens as soon as the service reports them and, with `request.stream`, the text
    /// as it comes; the return value is the whole reply either way. Dropping the future closes the connection.
    fn complete<'a>(
        &'a self,
        request: ChatRequest<'a>,
        deltas: &'a mut (dyn FnMut(Delta<'_>) + Send),
    ) -> BoxFuture<'a, Result<Reply, ProviderError>>;

    /// Its batches; `None` if it speaks no wire that has them.
    fn batch_provider(&self) -> Option<&dyn BatchProvider> {
        None
    }

    /// What a request to this model leaves out of these parameters and why, in words for the run's reader.
    fn dropped_params_warning(
        &self,
        _model: &str,
        _params: &Params,
        _facts: Option<&ModelFacts>,
    ) -> Option<String> {
        None
    }
}

/// A provider that sells batches.
pub trait BatchProvider: Send + Sync {
    /// Where they are made and looked at.
    fn batch_client(&self) -> &dyn BatchClient;

    /// The request as a batch takes it.
    ///
    /// # Errors
    /// It cannot be written as JSON.
    fn batch_item(&self, request: &ChatRequest<'_>) -> Result<BatchItem, ProviderError>;

    /// The reply in the answer that a batch has for the request.
    fn read_batch_reply<'a>(
        &'a self,
        request: ChatRequest<'a>,
        status: u16,
        body: Bytes,
        deltas: &'a mut (dyn FnMut(Delta<'_>) + Send),
    ) -> BoxFuture<'a, Result<Reply, ProviderError>>;
}

/// The batches of a service.
pub trait BatchClient: Send + Sync {
    /// The longest pause between two looks at a batch.
    fn max_poll_interval(&self) -> Duration;

    /// Hands a request over; the id of its batch. `name` is what the request is known by there.
    fn create<'a>(
        &'a self,
        name: &'a str,
        item: &'a BatchItem,
        key: Option<&'a SecretString>,
    ) -> BoxFuture<'a, Result<String, ProviderError>>;

    /// The id of the batch of a request that was handed over; `None` if there is none, or if the service cannot find it.
    fn find<'a>(
        &'a self,
        name: &'a str,
        key: Option<&'a SecretString>,
    ) -> BoxFuture<'a, Result<Option<String>, ProviderError>>;

    /// Looks at a batch, and fetches what it has for the request once it is done.
    ///
    /// # Errors
    /// The look failed, which says nothing of the batch.
    fn poll<'a>(
        &'a self,
        batch: &'a str,
        name: &'a str,
        key: Option<&'a SecretString>,
    ) -> BoxFuture<'a, Result<BatchStatus, ProviderError>>;

    /// Asks the service not to begin with a batch.
    fn cancel<'a>(
        &'a self,
        batch: &'a str,
        key: Option<&'a SecretString>,
    ) -> BoxFuture<'a, Result<(), ProviderError>>;
}

/// The request of a batch.
pub struct BatchItem {
    /// OpenAI: the endpoint that it is for.
    pub path: &'static str,
    /// Its body.
    pub body: Vec<u8>,
}

impl BatchItem {
    /// The body as JSON.
    ///
    /// # Errors
    /// It is none.
    pub fn json(&self) -> Result<&RawValue, ProviderError> {
        serde_json::from_slice(&self.body).map_err(|error| {
            let message = format!("the request cannot be written as JSON: {error}");
            ProviderError::new(ErrorCategory::BadRequest, message)
        })
    }
}

/// What a look at a batch found.
#[derive(Debug)]
pub enum BatchStatus {
    /// It is not done.
    InProgress,
    /// What the service answered, as it would have at once.
    Completed {
        /// HTTP's status.
        status: u16,
        /// The body.
        body: Bytes,
    },
    /// There is no answer, and why.
    Failed(ProviderError),
    /// The service had no time for it.
    Expired,
}

/// What comes before a reply is whole.
#[derive(Clone, Copy, Debug)]
pub enum Delta<'a> {
    /// More of the text.
    Text(&'a str),
    /// The tier that the service says it answered on.
    ServiceTier(Service),
    /// The model began to think, and the service may give no text of it.
    ReasoningStarted,
    /// More of its thinking, or of a summary.
    Reasoning(&'a str),
    /// The tokens reported so far, which later ones replace: what is known if the rest of the reply never comes.
    Usage(TokenUsage),
}

/// One question to a model, borrowed from the conversation.
#[derive(Clone, Copy, Debug)]
pub struct ChatRequest<'a> {
    /// The model's name as the provider knows it.
    pub model: &'a str,
    /// The system prompt; empty means none.
    pub system: &'a str,
    /// The conversation, oldest first.
    pub messages: &'a [Message],
    /// The bytes of the conversation's pictures and files; `None` if it has none.
    pub blobs: Option<&'a Blobs>,
    /// The tools on offer; empty means the request has no `tools` key.
    pub tools: &'a [ToolSpec],
    /// Sampling parameters.
    pub params: &'a Params,
    /// What is known of the model; `None` if nothing is.
    pub facts: Option<&'a ModelFacts>,
    /// Whether to ask for deltas.
    pub stream: bool,
    /// Whether the run can have more than one turn, so that the prompt is worth caching.
    pub multi_turn: bool,
    /// The version of what the prompt begins with, for services that keep prompts by a key; empty means none.
    pub cache_key: &'a str,
    /// Where it stands in a trace, told to the service; none where nobody traces.
    pub trace: Option<&'a TraceContext>,
    /// A person's own key, sent in place of the configured one.
    pub api_key: Option<&'a SecretString>,
}

/// What the model answered.
#[derive(Clone, Debug, Default)]
pub struct Reply {
    /// Text, tool calls and what to echo. Call ids are the provider's; the conversation makes them unique.
    pub message: AssistantMessage,
    /// Tokens; none where the provider reported none.
    pub usage: Option<TokenUsage>,
    /// The provider's own word for why the reply ended.
    pub stop_reason: Option<String>,
    /// The model that the provider says answered, without prefix.
    pub model: Option<String>,
    /// Whether it is an answer at all.
    pub outcome: ReplyOutcome,
}

/// What a reply came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReplyOutcome {
    /// An answer: text, calls, or after a normal end nothing.
    #[default]
    Complete,
    /// The limit of tokens came before any text or call.
    Truncated,
    /// The model, or a filter of its service, refused; the text says why, if there is any.
    Refused,
}

/// A request that got no reply. Displays as `<category>: <message>`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {message}", category.as_str())]
pub struct ProviderError {
    /// What kind of failure.
    pub category: ErrorCategory,
    /// The service's own words where it had any. Never holds a secret.
    pub message: String,
    /// How long the service asks us to wait.
    pub retry_after: Option<Duration>,
    /// Whether the request may have been paid for (it reached the service and broke off after an answer began).
    pub may_be_billed: bool,
    /// Whether the tokens that were reported on the way are all that it used: the reply was whole, and then rejected.
    pub has_final_usage: bool,
}

impl ProviderError {
    /// An error without a wish to wait, from a request that was not answered.
    pub fn new(category: ErrorCategory, message: impl Into<String>) -> Self {
        Self {
            category,
            message: message.into(),
            retry_after: None,
            may_be_billed: false,
            has_final_usage: false,
        }
    }

    /// The error with advice behind it.
    pub fn with(mut self, advice: &str) -> Self {
        self.message = format!("{} ({advice})", self.message);
        self
    }

    /// The error without this secret, which some services repeat.
    pub fn redact(mut self, secret: &SecretString) -> Self {
        let secret = secret.expose_secret().trim();
        if !secret.is_empty() && self.message.contains(secret) {
            self.message = self.message.replace(secret, "[redacted]");
        }
        self
    }

    /// The error of a reply that had reported all its tokens, or had not.
    pub fn with_final_usage(mut self, has_final_usage: bool) -> Self {
        self.has_final_usage = has_final_usage;
        self
    }
}

/// The kinds of provider failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorCategory {
    /// 401, 403, or no key.
    Auth,
    /// 400, 404, 405, 413, 415, 422.
    BadRequest,
    /// 429.
    RateLimit,
    /// 529, or 503 that says overloaded.
    Overloaded,
    /// 409, 425, other 5xx, 3xx, a broken connection, an unreadable body.
    Server,
    /// 408, or the deadline.
    Timeout,
}

impl ErrorCategory {
    /// The word in messages, errors and the contract's table.
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

    /// Whether the same request may succeed when it is sent again.
    pub fn is_retryable(self) -> bool {
        matches!(
            self,
            Self::RateLimit | Self::Overloaded | Self::Server | Self::Timeout
        )
    }
}
