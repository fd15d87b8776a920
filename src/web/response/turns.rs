//! The turns of a run: what was sent, how often, and what came back.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::value::RawValue;

use crate::domain::agent::params::Effort;
use crate::domain::message::AssistantMessage;
use crate::domain::redaction::Redactor;
use crate::domain::usage::TokenUsage;
use crate::providers::reasoning;
use crate::store::turn_record::{TurnAttempt, TurnRecord, TurnStatus};
use crate::store::turns::{RecordedTurn, TurnRequest};

/// The turns of a run.
#[derive(Serialize, JsonSchema)]
pub struct TurnList {
    /// The turns, in order.
    pub data: Vec<TurnView>,
}

/// A turn: one request to a model, with its retries and fallbacks, and its reply.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Turn")]
pub struct TurnView {
    /// The number of the turn, from 1.
    pub turn: u32,
    /// The provider of the last attempt.
    pub provider: String,
    /// The model that the last attempt requested, without its provider.
    pub model: String,
    /// The reasoning effort that was requested; null means the provider's default.
    pub effort: Option<Effort>,
    /// The turn's status.
    pub status: TurnStatus,
    /// Whether the turn was taken over from the run that this run was forked from.
    pub copied: bool,
    /// Whether a pattern of the server's configuration has removed something from the recorded request.
    pub redacted: bool,
    /// The length of the body as it was sent; null if the server does not record requests.
    pub request_bytes: Option<u64>,
    /// From the start of the last attempt to the first text of a streamed reply, else to the beginning of the response, in
    /// milliseconds.
    pub first_token_ms: Option<u64>,
    /// From the start of the first attempt to the end of the last, in milliseconds.
    pub duration_ms: u64,
    /// The requests of the turn: the first one, its retries, and those to fallbacks.
    pub attempts: Vec<TurnAttempt>,
    /// The tokens of all attempts; null if no provider reported them.
    pub usage: Option<TurnUsage>,
    /// What all attempts cost, in USD; null without a price.
    pub cost_usd: Option<f64>,
    /// Why the reply ended, in the provider's own word.
    pub stop_reason: Option<String>,
    /// The number of tool calls in the reply.
    pub tool_calls: u32,
}

/// The tokens of a turn.
#[derive(Serialize, JsonSchema)]
pub struct TurnUsage {
    /// Input tokens, cached ones included.
    pub input_tokens: u64,
    /// Output tokens.
    pub output_tokens: u64,
    /// The input tokens that were read from the provider's cache.
    pub cache_read_tokens: u64,
    /// The input tokens that were written to the provider's cache.
    pub cache_write_tokens: u64,
    /// The output tokens that are reasoning, as far as the provider reports them.
    pub reasoning_tokens: u64,
}

/// A turn with its request and its reply.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "TurnDetail")]
pub struct TurnDetailView {
    #[serde(flatten)]
    pub turn: TurnView,
    /// The request that was answered, else the last one; null if the server does not record requests.
    pub request: Option<RequestView>,
    /// The reply; null if there is none.
    pub reply: Option<ReplyView>,
}

/// A request as it was sent to a provider, without secrets.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "TurnRequest")]
pub struct RequestView {
    /// The HTTP method; null if the provider is not reached over HTTP.
    pub method: Option<String>,
    /// The URL; null if the provider is not reached over HTTP.
    pub url: Option<String>,
    /// The headers. `[redacted]` replaces keys and the values of configured headers.
    pub headers: BTreeMap<String, String>,
    /// The environment variable that the server reads the provider's key from; null if the provider is not reached over
    /// HTTP.
    pub key_variable: Option<String>,
    /// The body, byte for byte as it was sent unless the turn is redacted.
    #[schemars(with = "serde_json::Map<String, serde_json::Value>")]
    pub body: Box<RawValue>,
}

/// A reply as it came.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "TurnReply")]
pub struct ReplyView {
    /// The text; may be empty if there are tool calls.
    pub content: String,
    /// The text of the model's reasoning, or of a summary of it; null if the provider sent none that has to be sent back.
    pub reasoning: Option<String>,
    /// The tool calls that the reply requests.
    pub tool_calls: Vec<ReplyCall>,
    /// The provider's own form of the reply, if it has more than text and calls; else null.
    #[schemars(with = "serde_json::Value")]
    pub raw: Option<Box<RawValue>>,
}

/// A tool call of a reply.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "TurnToolCall")]
pub struct ReplyCall {
    /// The call's id, unique within the run.
    pub id: String,
    /// The name of the tool.
    pub name: String,
    /// The arguments: an object, or the text that the model sent instead of one.
    #[schemars(with = "serde_json::Value")]
    pub arguments: Box<RawValue>,
}

impl TurnView {
    pub fn new(record: TurnRecord) -> Self {
        Self {
            duration_ms: record.duration_ms(),
            turn: record.turn,
            provider: record.provider,
            model: record.model,
            effort: record.effort,
            status: record.status,
            copied: record.is_copied,
            redacted: record.is_redacted,
            request_bytes: record.request_bytes,
            first_token_ms: record.first_token_ms,
            attempts: record.attempts,
            usage: record.usage.map(TurnUsage::new),
            cost_usd: record.cost.map(|cost| cost.to_usd()),
            stop_reason: record.stop_reason,
            tool_calls: record.tool_calls,
        }
    }
}

impl TurnUsage {
    fn new(tokens: TokenUsage) -> Self {
        Self {
            input_tokens: tokens.input,
            output_tokens: tokens.output,
            cache_read_tokens: tokens.cache_read,
            cache_write_tokens: tokens.cache_write,
            reasoning_tokens: tokens.reasoning,
        }
    }
}

impl TurnDetailView {
    /// The reply is read from the conversation, which is not redacted: `redactor` does it here.
    pub fn new(recorded: RecordedTurn, redactor: &Redactor) -> Self {
        let mut turn = TurnView::new(recorded.record);
        let reply = recorded.reply.map(|message| {
            let (reply, is_redacted) = ReplyView::new(&message, redactor);
            turn.redacted |= is_redacted;
            reply
        });
        Self {
            turn,
            request: recorded.request.map(RequestView::new),
            reply,
        }
    }
}

impl RequestView {
    fn new(request: TurnRequest) -> Self {
        let text = String::from_utf8_lossy(&request.body).into_owned();
        Self {
            method: request.head.method.clone(),
            url: request.head.url.clone(),
            headers: request.head.headers.iter().cloned().collect(),
            key_variable: request.head.key_variable.clone(),
            body: RawValue::from_string(text).unwrap_or_default(),
        }
    }
}

impl ReplyView {
    fn new(message: &AssistantMessage, redactor: &Redactor) -> (Self, bool) {
        let mut is_redacted = false;
        let mut json = |json: &RawValue| {
            let redacted = redactor.redact_json(json.get());
            is_redacted |= redacted.is_some();
            let redacted = redacted.and_then(|json| RawValue::from_string(json).ok());
            redacted.unwrap_or_else(|| json.to_owned())
        };
        let raw = message.echo.as_ref().map(|echo| json(&echo.body));
        let tool_calls = message.tool_calls.iter().map(|call| ReplyCall {
            id: call.id.clone(),
            name: call.name.clone(),
            arguments: json(&call.arguments_json()),
        });
        let tool_calls = tool_calls.collect();
        let content = redactor.redact(&message.content).into_owned();
        is_redacted |= content != message.content;
        let reply = Self {
            content,
            reasoning: raw.as_deref().and_then(reasoning::reasoning_text),
            tool_calls,
            raw,
        };
        (reply, is_redacted)
    }
}
