//! Anthropic's Messages API (`POST /v1/messages`, <https://docs.claude.com/en/api/messages>): its request, its reply and
//! its event stream. Knows no HTTP and no run.

use std::borrow::Cow;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use indexmap::IndexMap;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};

use crate::config;
use crate::domain::agent::params::{Cache, Effort, Params};
use crate::domain::agent::response_format::ResponseFormat;
use crate::domain::content::Content as MessageContent;
use crate::domain::message::{AssistantMessage, Echo, Message, ToolCall, ToolResult};
use crate::domain::usage::TokenUsage;
use crate::providers::batches::{BatchApi, BatchClient, BatchItem};
use crate::providers::content_parts::{self, Base64, ContentPart, MediaData};
use crate::providers::echo::ReplyOrigin;
use crate::providers::endpoint::Endpoint;
use crate::providers::http_client::{BaseUrl, BodyPart, HttpClient, KeyHeader};
use crate::providers::reply_builder::ReplyBuilder;
use crate::providers::stream_decoder::StreamFormat;
use crate::providers::token_counts::{self, Lenient, TokenCount};
use crate::providers::{
    BatchProvider, ChatRequest, Delta, ErrorCategory, Provider, ProviderError, Reply, ReplyOutcome,
    error_mapping, http_client, request_body, tool_call_codec,
};

const DEFAULT_BASE_URL: &str = "https://api.anthropic.com";
const DEFAULT_API_VERSION: &str = "2023-06-01";
/// The API wants a bound on every reply. Where the agent sets none it is the model's longest reply, at most this: thinking
/// counts too.
const MAX_DEFAULT_TOKENS: u32 = 32_000;
/// The bound for a model whose longest reply is not known.
const FALLBACK_MAX_TOKENS: u32 = 8192;

/// A client of one service that speaks Anthropic's Messages API.
pub struct Anthropic {
    endpoint: Endpoint<AnthropicReplyBuilder>,
    batch_client: BatchClient,
}

impl Anthropic {
    /// A client of the configured service. The error says what is wrong with the configuration.
    pub fn new(service_id: String, config: &config::Provider) -> Result<Self, String> {
        let base = BaseUrl::parse(config.base_url.as_deref().unwrap_or(DEFAULT_BASE_URL))?;
        let client = HttpClient::new(config, &base, "/v1/messages", KeyHeader::ApiKey)?;
        let version = config.version.as_deref().unwrap_or(DEFAULT_API_VERSION);
        let client = client.with_header("anthropic-version", version)?;
        let batch_client = BatchClient::new(&client, &base, BatchApi::Anthropic, config.batch_poll);
        Ok(Self {
            endpoint: Endpoint::new(client, service_id),
            batch_client,
        })
    }

    /// What it sends to and reads from.
    pub fn endpoint(&self) -> &Endpoint<AnthropicReplyBuilder> {
        &self.endpoint
    }
}

impl Provider for Anthropic {
    fn batch_provider(&self) -> Option<&dyn BatchProvider> {
        Some(self)
    }

    fn complete<'a>(
        &'a self,
        request: ChatRequest<'a>,
        deltas: &'a mut (dyn FnMut(Delta<'_>) + Send),
    ) -> BoxFuture<'a, Result<Reply, ProviderError>> {
        let body = RequestBody::new(&request, self.endpoint.origin(request.model));
        self.endpoint.complete(&body, &request, deltas)
    }
}

impl BatchProvider for Anthropic {
    fn batch_client(&self) -> &BatchClient {
        &self.batch_client
    }

    fn batch_item(&self, request: &ChatRequest<'_>) -> Result<BatchItem, ProviderError> {
        let body = RequestBody::new(request, self.endpoint.origin(request.model));
        let body = request_body::serialize_with_extra(&body, request)?;
        let path = "/v1/messages";
        Ok(BatchItem { path, body })
    }

    fn read_batch_reply<'a>(
        &'a self,
        request: ChatRequest<'a>,
        status: u16,
        body: Bytes,
        deltas: &'a mut (dyn FnMut(Delta<'_>) + Send),
    ) -> BoxFuture<'a, Result<Reply, ProviderError>> {
        (self.endpoint).read_batch_reply(request.model, status, body, deltas)
    }
}

#[derive(Serialize)]
struct RequestBody<'a> {
    model: &'a str,
    max_tokens: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    system: Option<System<'a>>,
    messages: Vec<MessageOut<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tools: Vec<Tool<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    temperature: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_p: Option<f64>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    stop_sequences: &'a [String],
    #[serde(skip_serializing_if = "Option::is_none")]
    thinking: Option<Thinking>,
    #[serde(skip_serializing_if = "Option::is_none")]
    output_config: Option<OutputConfig<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream: Option<bool>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum System<'a> {
    Text(&'a str),
    Cached([SystemBlock<'a>; 1]),
}

#[derive(Serialize)]
struct SystemBlock<'a> {
    r#type: &'static str,
    text: &'a str,
    cache_control: CacheControl,
}

/// Asks the service to keep the prompt up to here for the run's next turns.
#[derive(Clone, Copy, Serialize)]
struct CacheControl {
    r#type: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    ttl: Option<&'static str>,
}

impl CacheControl {
    /// `None` if the run has one turn only, or its agent wants no caching.
    fn for_request(request: &ChatRequest<'_>) -> Option<Self> {
        let ttl = match request.params.cache {
            Cache::FiveMinutes => None,
            Cache::OneHour => Some("1h"),
            Cache::Off => return None,
        };
        request.multi_turn.then_some(Self {
            r#type: "ephemeral",
            ttl,
        })
    }
}

#[derive(Serialize)]
struct Tool<'a> {
    name: &'a str,
    description: &'a str,
    input_schema: &'a RawValue,
    #[serde(skip_serializing_if = "Option::is_none")]
    cache_control: Option<CacheControl>,
}

#[derive(Serialize)]
struct OutputConfig<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    effort: Option<Effort>,
    #[serde(skip_serializing_if = "Option::is_none")]
    format: Option<OutputFormat<'a>>,
}

/// Whether the model thinks: as much as it finds right, or not at all.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum Thinking {
    Adaptive {
        /// Without it current models give their thinking as a signature alone.
        #[serde(skip_serializing_if = "Option::is_none")]
        display: Option<&'static str>,
    },
    Disabled,
}

#[derive(Serialize)]
struct OutputFormat<'a> {
    r#type: &'static str,
    schema: &'a RawValue,
}

#[derive(Serialize)]
struct MessageOut<'a> {
    role: &'static str,
    content: Content<'a>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Content<'a> {
    Blocks(Vec<BlockOut<'a>>),
    Echo(Cow<'a, RawValue>),
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum BlockOut<'a> {
    Text {
        text: Cow<'a, str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        cache_control: Option<CacheControl>,
    },
    ToolUse {
        id: Cow<'a, str>,
        name: Cow<'a, str>,
        input: &'a RawValue,
    },
    ToolResult {
        tool_use_id: Cow<'a, str>,
        content: ResultContent<'a>,
        is_error: bool,
        #[serde(skip_serializing_if = "Option::is_none")]
        cache_control: Option<CacheControl>,
    },
    Image {
        source: Source<'a>,
        #[serde(skip_serializing_if = "Option::is_none")]
        cache_control: Option<CacheControl>,
    },
    Document {
        source: Source<'a>,
        title: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        cache_control: Option<CacheControl>,
    },
}

/// A text where that is all.
#[derive(Serialize)]
#[serde(untagged)]
enum ResultContent<'a> {
    Text(&'a str),
    Blocks(Vec<BlockOut<'a>>),
}

#[derive(Serialize)]
struct Source<'a> {
    r#type: &'static str,
    media_type: &'static str,
    data: Base64<'a>,
}

impl<'a> From<MediaData<'a>> for Source<'a> {
    fn from(data: MediaData<'a>) -> Self {
        Self {
            r#type: "base64",
            media_type: data.media_type.as_str(),
            data: data.base64(),
        }
    }
}

impl<'a> From<ContentPart<'a>> for BlockOut<'a> {
    fn from(part: ContentPart<'a>) -> Self {
        match part {
            ContentPart::Text(text) => Self::text(text),
            ContentPart::Image(data) => Self::Image {
                source: data.into(),
                cache_control: None,
            },
            ContentPart::File { name, data } => Self::Document {
                source: data.into(),
                title: name,
                cache_control: None,
            },
        }
    }
}

impl<'a> BlockOut<'a> {
    fn text(text: impl Into<Cow<'a, str>>) -> Self {
        Self::Text {
            text: text.into(),
            cache_control: None,
        }
    }
}

impl<'a> RequestBody<'a> {
    fn new(request: &ChatRequest<'a>, origin: ReplyOrigin<'_>) -> Self {
        let params = request.params;
        let cache = CacheControl::for_request(request);
        let system = match (request.system, cache) {
            ("", _) => None,
            (text, Some(cache_control)) => Some(System::Cached([SystemBlock {
                r#type: "text",
                text,
                cache_control,
            }])),
            (text, None) => Some(System::Text(text)),
        };
        let mut tools: Vec<_> = request
            .tools
            .iter()
            .map(|tool| Tool {
                name: &tool.name,
                description: &tool.description,
                input_schema: &tool.parameters,
                cache_control: None,
            })
            .collect();
        if let Some(last) = tools.last_mut() {
            last.cache_control = cache;
        }
        let mut messages = build_messages(request, origin);
        if let Some(cache) = cache {
            set_cache_breakpoints(&mut messages, cache);
        }
        Self {
            model: request.model,
            max_tokens: params
                .max_tokens
                .unwrap_or_else(|| default_max_tokens(request)),
            system,
            messages,
            tools,
            temperature: params.temperature,
            top_p: params.top_p,
            stop_sequences: &params.stop,
            thinking: thinking_config(request),
            output_config: output_config(params),
            stream: request.stream.then_some(true),
        }
    }
}

/// Marks where this request and the one before it end: this one is read up to the first mark that the service has kept, and
/// kept up to the last.
fn set_cache_breakpoints(messages: &mut [MessageOut<'_>], cache: CacheControl) {
    let is_user = |message: &&mut MessageOut<'_>| message.role == "user";
    let mut breakpoints = 0;
    let mut after_assistant = true;
    for message in messages.iter_mut().rev() {
        if breakpoints == 2 {
            break;
        }
        if !is_user(&message) {
            after_assistant = true;
            continue;
        }
        if !std::mem::take(&mut after_assistant) {
            continue;
        }
        breakpoints += 1;
        if let Content::Blocks(blocks) = &mut message.content
            && let Some(
                BlockOut::Text { cache_control, .. }
                | BlockOut::ToolResult { cache_control, .. }
                | BlockOut::Image { cache_control, .. }
                | BlockOut::Document { cache_control, .. },
            ) = blocks.last_mut()
        {
            *cache_control = Some(cache);
        }
    }
}

fn default_max_tokens(request: &ChatRequest<'_>) -> u32 {
    let max_output = request.facts.and_then(|facts| facts.max_output);
    max_output.map_or(FALLBACK_MAX_TOKENS, |longest| {
        longest.min(MAX_DEFAULT_TOKENS)
    })
}

/// What effort and the wish for a summary make of thinking; `None` if the agent sets neither.
fn thinking_config(request: &ChatRequest<'_>) -> Option<Thinking> {
    let is_adaptive = request.facts.and_then(|facts| facts.adaptive_thinking);
    let display = request.params.reasoning_summary.map(|_| "summarized");
    match request.params.effort {
        Some(Effort::None) => Some(Thinking::Disabled),
        None if display.is_none() => None,
        _ => (is_adaptive != Some(false)).then_some(Thinking::Adaptive { display }),
    }
}

fn output_config(params: &Params) -> Option<OutputConfig<'_>> {
    let effort = params.effort.filter(|effort| *effort != Effort::None);
    let format = match &params.response_format {
        ResponseFormat::JsonSchema(schema) => Some(OutputFormat {
            r#type: "json_schema",
            schema,
        }),
        // The API has no word for any JSON object: the prompt must ask for it.
        ResponseFormat::JsonObject | ResponseFormat::Text => None,
    };
    (effort.is_some() || format.is_some()).then_some(OutputConfig { effort, format })
}

fn build_messages<'a>(request: &ChatRequest<'a>, origin: ReplyOrigin<'_>) -> Vec<MessageOut<'a>> {
    let (messages, has_tools) = (request.messages, !request.tools.is_empty());
    let mut wire_messages = Vec::with_capacity(messages.len());
    let mut last_calls: &[ToolCall] = &[];
    let mut is_echoed = false;
    for message in messages {
        let (role, content) = match message {
            // Blocks also where a text would do: a mark must not change the bytes around it.
            Message::User { content } => ("user", Content::Blocks(user_blocks(content, request))),
            Message::Assistant(reply) => {
                last_calls = &reply.tool_calls;
                let can_send_calls = has_tools || reply.tool_calls.is_empty();
                let echo = origin.echo_body(reply).filter(|_| can_send_calls);
                is_echoed = echo.is_some();
                let content = match echo {
                    Some(body) => Content::Echo(with_unique_ids(body, &reply.tool_calls)),
                    None if can_send_calls => Content::Blocks(rebuild_blocks(reply)),
                    None => Content::Blocks(calls_as_text(reply)),
                };
                // The API refuses a message without content, and one that says nothing is not missed.
                if matches!(&content, Content::Blocks(blocks) if blocks.is_empty()) {
                    continue;
                }
                ("assistant", content)
            }
            Message::Tool { tool_results } if !has_tools => {
                let results = tool_results.iter().flat_map(|result| {
                    let text = BlockOut::text(format!("[Result]\n{}", result.content));
                    let attachments = content_parts::result_attachment_parts(
                        std::slice::from_ref(result),
                        request,
                    );
                    std::iter::once(text).chain(attachments.into_iter().map(BlockOut::from))
                });
                ("user", Content::Blocks(results.collect()))
            }
            Message::Tool { tool_results } => {
                let results = tool_results.iter().enumerate().map(|(index, result)| {
                    let call = tool_call_codec::find_call(last_calls, index, result);
                    let id = call.map_or(&result.call_id, |call| &call.id);
                    BlockOut::ToolResult {
                        // An echo holds the id in the letters that the service gave.
                        tool_use_id: match is_echoed {
                            true => Cow::Borrowed(id),
                            false => tool_call_codec::sanitize_id(id),
                        },
                        content: result_content(result, request),
                        is_error: result.is_error,
                        cache_control: None,
                    }
                });
                ("user", Content::Blocks(results.collect()))
            }
        };
        wire_messages.push(MessageOut { role, content });
    }
    wire_messages
}

fn user_blocks<'a>(content: &'a MessageContent, request: &ChatRequest<'a>) -> Vec<BlockOut<'a>> {
    match content {
        MessageContent::Text(text) => vec![BlockOut::text(text.as_str())],
        MessageContent::Parts(parts) => {
            let parts = content_parts::user_parts(parts, request);
            parts.into_iter().map(BlockOut::from).collect()
        }
    }
}

fn result_content<'a>(result: &'a ToolResult, request: &ChatRequest<'a>) -> ResultContent<'a> {
    let parts = content_parts::result_parts(result, request);
    match parts.is_empty() {
        true => ResultContent::Text(&result.content),
        false => ResultContent::Blocks(parts.into_iter().map(BlockOut::from).collect()),
    }
}

/// The blocks as the service sent them, but with the calls' own ids where it gave several calls the same: it takes back
/// only different ones.
fn with_unique_ids<'a>(blocks: &'a RawValue, calls: &[ToolCall]) -> Cow<'a, RawValue> {
    if calls.iter().all(|call| call.provider_id.is_empty()) {
        return Cow::Borrowed(blocks);
    }
    let renamed = || {
        let mut calls = calls.iter();
        let mut all: Vec<Cow<'_, RawValue>> = Vec::new();
        for block in serde_json::from_str::<Vec<&RawValue>>(blocks.get()).ok()? {
            let parsed: BlockIn<'_> = serde_json::from_str(block.get()).ok()?;
            let call = match parsed.kind.as_str() {
                "tool_use" => calls.next().filter(|call| !call.provider_id.is_empty()),
                _ => None,
            };
            all.push(match call {
                None => Cow::Borrowed(block),
                Some(call) => {
                    let mut fields: IndexMap<Cow<'_, str>, Box<RawValue>> =
                        serde_json::from_str(block.get()).ok()?;
                    fields.insert(Cow::Borrowed("id"), to_raw_value(&call.id).ok()?);
                    Cow::Owned(to_raw_value(&fields).ok()?)
                }
            });
        }
        to_raw_value(&all).ok()
    };
    renamed().map_or(Cow::Borrowed(blocks), Cow::Owned)
}

/// An assistant message from its text and calls.
fn rebuild_blocks(reply: &AssistantMessage) -> Vec<BlockOut<'_>> {
    let mut blocks = Vec::with_capacity(reply.tool_calls.len() + 1);
    if !reply.content.trim().is_empty() {
        blocks.push(BlockOut::text(reply.content.as_str()));
    }
    blocks.extend(reply.tool_calls.iter().map(|call| BlockOut::ToolUse {
        id: tool_call_codec::sanitize_id(&call.id),
        name: tool_call_codec::sanitize_name(&call.name),
        input: &call.arguments,
    }));
    blocks
}

/// An assistant message with its calls as text: the API takes no blocks of tools in a request that offers none.
fn calls_as_text(reply: &AssistantMessage) -> Vec<BlockOut<'_>> {
    let mut text = reply.content.clone();
    for call in &reply.tool_calls {
        let separator = if text.is_empty() { "" } else { "\n" };
        text.push_str(&format!(
            "{separator}[Calls {} with {}]",
            call.name,
            call.arguments.get()
        ));
    }
    vec![BlockOut::text(text)]
}

/// A whole reply, and the beginning of one in `message_start`.
#[derive(Deserialize)]
struct MessageIn<'a> {
    #[serde(borrow)]
    content: Option<Vec<&'a RawValue>>,
    model: Option<String>,
    stop_reason: Option<String>,
    #[serde(default)]
    usage: Lenient<UsageIn>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Event<'a> {
    #[serde(rename = "type", default)]
    kind: String,
    index: Option<u64>,
    #[serde(borrow)]
    message: Option<MessageIn<'a>>,
    #[serde(borrow)]
    content_block: Option<&'a RawValue>,
    delta: Option<BlockDelta>,
    #[serde(default)]
    usage: Lenient<UsageIn>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
}

/// What `content_block_delta` and `message_delta` add.
#[derive(Deserialize)]
struct BlockDelta {
    text: Option<String>,
    partial_json: Option<String>,
    thinking: Option<String>,
    signature: Option<String>,
    stop_reason: Option<String>,
}

#[derive(Deserialize)]
struct UsageIn {
    #[serde(default)]
    input_tokens: TokenCount,
    #[serde(default)]
    output_tokens: TokenCount,
    #[serde(default)]
    cache_read_input_tokens: TokenCount,
    #[serde(default)]
    cache_creation_input_tokens: TokenCount,
    #[serde(default)]
    output_tokens_details: Lenient<OutputDetails>,
}

#[derive(Deserialize)]
struct OutputDetails {
    #[serde(default)]
    thinking_tokens: TokenCount,
}

#[derive(Deserialize)]
struct BlockIn<'a> {
    #[serde(rename = "type", default)]
    kind: String,
    text: Option<String>,
    thinking: Option<String>,
    id: Option<String>,
    name: Option<String>,
    #[serde(borrow)]
    input: Option<&'a RawValue>,
    caller: Option<IgnoredAny>,
    toolset_name: Option<IgnoredAny>,
    citations: Option<IgnoredAny>,
}

/// A content block as far as it has come.
struct PartialBlock {
    index: Option<u64>,
    kind: BlockKind,
    /// The block as it began.
    start: Box<RawValue>,
    /// Whether it has fields that text and calls do not keep.
    has_extra_fields: bool,
    /// What deltas added.
    appended: AppendedDeltas,
}

enum BlockKind {
    Text(String),
    ToolUse(ToolCall),
    Other,
}

#[derive(Default)]
struct AppendedDeltas {
    text: String,
    json: String,
    thinking: String,
    signature: String,
}

/// A reply as far as it has come.
#[derive(Default)]
pub struct AnthropicReplyBuilder {
    blocks: Vec<PartialBlock>,
    /// The counts as reported, without the sum that ours is.
    usage: Option<TokenUsage>,
    /// Whether one of them made no sense.
    has_invalid_usage: bool,
    /// Whether the last of them have come.
    is_finished: bool,
    stop_reason: Option<String>,
    model: Option<String>,
}

impl ReplyBuilder for AnthropicReplyBuilder {
    const FORMAT: StreamFormat = StreamFormat::Sse;

    fn push_part(
        &mut self,
        part: BodyPart<'_>,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<bool, ProviderError> {
        match part {
            BodyPart::Document(text) => self.push_document(text, deltas),
            BodyPart::Message(text) => self.push_event(text, deltas),
        }
    }

    fn has_final_usage(&self) -> bool {
        self.is_finished && self.valid_usage().is_some()
    }

    fn finish(mut self, origin: ReplyOrigin<'_>) -> Result<Reply, ProviderError> {
        for block in &mut self.blocks {
            block.finish();
        }
        let mut text = String::new();
        let mut tool_calls = Vec::new();
        // In the order in which a message is rebuilt: one text, then calls.
        let mut is_plain = true;
        for block in &self.blocks {
            match &block.kind {
                BlockKind::Text(piece) if piece.is_empty() => {}
                BlockKind::Text(piece) => {
                    is_plain &= text.is_empty() && tool_calls.is_empty() && !block.has_extra_fields;
                    http_client::append(&mut text, piece.clone());
                }
                BlockKind::ToolUse(call) => {
                    is_plain &= !block.has_extra_fields;
                    tool_calls.push(call.clone());
                }
                BlockKind::Other => is_plain = false,
            }
        }
        let end = match self.stop_reason.as_deref() {
            _ if !tool_calls.is_empty() => ReplyOutcome::Complete,
            Some("refusal") => ReplyOutcome::Refused,
            _ if !text.is_empty() => ReplyOutcome::Complete,
            Some("end_turn" | "stop_sequence") => ReplyOutcome::Complete,
            Some("max_tokens" | "model_context_window_exceeded") => ReplyOutcome::Truncated,
            _ => {
                let message = "response contains no content";
                return Err(ProviderError::new(ErrorCategory::Server, message));
            }
        };
        let has_filled = tool_call_codec::fill_missing_ids(&mut tool_calls);
        let echo = match is_plain || has_filled {
            true => None,
            false => self.build_echo(origin),
        };
        Ok(Reply {
            message: AssistantMessage {
                content: text,
                tool_calls,
                echo,
            },
            usage: self.valid_usage(),
            stop_reason: self.stop_reason,
            model: self.model,
            outcome: end,
        })
    }
}

impl AnthropicReplyBuilder {
    /// Takes a whole reply.
    fn push_document(
        &mut self,
        text: &str,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<bool, ProviderError> {
        self.is_finished = true;
        let message: MessageIn<'_> = http_client::parse_json(text).inspect_err(|_| {
            if let Some(usage) = token_counts::parse_usage_only(text) {
                self.push_usage(&usage, deltas);
            }
        })?;
        if message.error.is_some() {
            return Err(error_mapping::from_error_body(text));
        }
        self.start_message(message, deltas)?;
        Ok(true)
    }

    /// Takes one event; says whether it was the last.
    fn push_event(
        &mut self,
        text: &str,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<bool, ProviderError> {
        let event: Event<'_> = http_client::parse_json(text)?;
        // Servers that speak OpenAI's language too send its errors here, without a type.
        if event.error.is_some() || event.kind == "error" {
            return Err(error_mapping::from_error_body(text));
        }
        if let Some(usage) = event.usage.0 {
            self.push_usage(&usage, deltas);
        }
        match event.kind.as_str() {
            "message_start" => {
                if let Some(message) = event.message {
                    self.start_message(message, deltas)?;
                }
            }
            "content_block_start" => {
                if let Some(block) = event.content_block {
                    self.push_block(event.index, block, deltas)?;
                }
            }
            "content_block_delta" => {
                if let Some(delta) = event.delta {
                    self.push_delta(event.index, delta, deltas);
                }
            }
            "message_delta" => {
                let stop_reason = event.delta.and_then(|delta| delta.stop_reason);
                self.is_finished |= stop_reason.is_some();
                self.stop_reason = stop_reason.or(self.stop_reason.take());
            }
            "message_stop" => return Ok(true),
            // `ping`, `content_block_stop`, and what may come.
            _ => {}
        }
        Ok(false)
    }

    fn start_message(
        &mut self,
        message: MessageIn<'_>,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<(), ProviderError> {
        if let Some(usage) = message.usage.0 {
            self.push_usage(&usage, deltas);
        }
        self.model = message.model;
        self.stop_reason = message.stop_reason;
        for block in message.content.into_iter().flatten() {
            self.push_block(None, block, deltas)?;
        }
        Ok(())
    }

    /// Takes a block, or the beginning of one.
    fn push_block(
        &mut self,
        index: Option<u64>,
        start: &RawValue,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<(), ProviderError> {
        tool_call_codec::check_call_count(self.blocks.len() + 1)?;
        let block: BlockIn<'_> = http_client::parse_json(start.get())?;
        let kind = match block.kind.as_str() {
            "text" => {
                let text = block.text.unwrap_or_default();
                if !text.is_empty() {
                    deltas(Delta::Text(&text));
                }
                BlockKind::Text(text)
            }
            "tool_use" => BlockKind::ToolUse(ToolCall {
                id: block.id.unwrap_or_default(),
                provider_id: String::new(),
                name: block.name.unwrap_or_default(),
                arguments: tool_call_codec::arguments_from_json(block.input),
            }),
            kind => {
                match block.thinking.filter(|text| !text.is_empty()) {
                    Some(text) => deltas(Delta::Reasoning(&text)),
                    None if matches!(kind, "thinking" | "redacted_thinking") => {
                        deltas(Delta::ReasoningStarted);
                    }
                    None => {}
                }
                BlockKind::Other
            }
        };
        self.blocks.push(PartialBlock {
            index,
            has_extra_fields: matches!(kind, BlockKind::Other)
                || block.caller.is_some()
                || block.toolset_name.is_some()
                || block.citations.is_some(),
            kind,
            start: start.to_owned(),
            appended: AppendedDeltas::default(),
        });
        Ok(())
    }

    /// Adds to the block that a delta names. A delta of a block that never began is dropped, as the API's own SDKs do.
    fn push_delta(
        &mut self,
        index: Option<u64>,
        delta: BlockDelta,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) {
        let Some(block) = self.blocks.iter_mut().rfind(|b| b.index == index) else {
            return;
        };
        if let Some(text) = delta.text.filter(|text| !text.is_empty()) {
            if matches!(block.kind, BlockKind::Text(_)) {
                deltas(Delta::Text(&text));
            }
            http_client::append(&mut block.appended.text, text);
        }
        http_client::append(
            &mut block.appended.json,
            delta.partial_json.unwrap_or_default(),
        );
        if let Some(thinking) = delta.thinking.filter(|text| !text.is_empty()) {
            deltas(Delta::Reasoning(&thinking));
            http_client::append(&mut block.appended.thinking, thinking);
        }
        http_client::append(
            &mut block.appended.signature,
            delta.signature.unwrap_or_default(),
        );
    }

    /// Takes counts; those of a stream are totals so far, in one event or another.
    fn push_usage(&mut self, reported: &UsageIn, deltas: &mut dyn FnMut(Delta<'_>)) {
        let counts = [
            reported.input_tokens,
            reported.output_tokens,
            reported.cache_read_input_tokens,
            reported.cache_creation_input_tokens,
        ];
        if counts == [TokenCount::Absent; 4] {
            return;
        }
        self.has_invalid_usage |= counts.contains(&TokenCount::Invalid);
        let usage = self.usage.get_or_insert_default();
        let [input, output, cache_read, cache_write] = counts.map(TokenCount::or_zero);
        usage.input = usage.input.max(input);
        usage.output = usage.output.max(output);
        usage.cache_read = usage.cache_read.max(cache_read);
        usage.cache_write = usage.cache_write.max(cache_write);
        if let Some(details) = &reported.output_tokens_details.0 {
            usage.reasoning = usage.reasoning.max(details.thinking_tokens.or_zero());
        }
        if let Some(usage) = self.valid_usage() {
            deltas(Delta::Usage(usage));
        }
    }

    /// What it has reported, if all of it makes sense.
    fn valid_usage(&self) -> Option<TokenUsage> {
        self.usage
            .filter(|_| !self.has_invalid_usage)
            .map(with_cached_input)
    }

    /// All blocks as the service sent them, but for what it would not take back.
    fn build_echo(&self, origin: ReplyOrigin<'_>) -> Option<Echo> {
        let blocks: Vec<_> = self
            .blocks
            .iter()
            .filter_map(PartialBlock::to_raw_json)
            .collect();
        origin.echo(&blocks)
    }
}

/// The counts as ours: the API leaves cached tokens out of `input_tokens`.
fn with_cached_input(usage: TokenUsage) -> TokenUsage {
    TokenUsage {
        input: usage.input + usage.cache_read + usage.cache_write,
        ..usage
    }
}

impl PartialBlock {
    /// Puts what deltas added into text and arguments.
    fn finish(&mut self) {
        match &mut self.kind {
            BlockKind::Text(text) => text.push_str(&self.appended.text),
            BlockKind::ToolUse(call) if !self.appended.json.is_empty() => {
                call.arguments = tool_call_codec::arguments_from_text(&self.appended.json);
            }
            BlockKind::ToolUse(_) | BlockKind::Other => {}
        }
    }

    /// The block as one document; none if the API would refuse it for being empty.
    fn to_raw_json(&self) -> Option<Cow<'_, RawValue>> {
        let mut fields: Vec<(&str, Box<RawValue>)> = Vec::new();
        let mut add = |field, text: &String| {
            if !text.is_empty() {
                fields.extend(to_raw_value(text).map(|text| (field, text)));
            }
        };
        add("thinking", &self.appended.thinking);
        add("signature", &self.appended.signature);
        match &self.kind {
            BlockKind::Text(text) if text.trim().is_empty() => return None,
            BlockKind::Text(text) if !self.appended.text.is_empty() => add("text", text),
            // A streamed block may begin without `input`, and a cut one ends with half of it.
            BlockKind::ToolUse(call) => fields.push(("input", RawValue::to_owned(&call.arguments))),
            BlockKind::Other if !self.appended.json.is_empty() => {
                let input = tool_call_codec::arguments_from_text(&self.appended.json);
                fields.push(("input", RawValue::to_owned(&input)));
            }
            BlockKind::Text(_) | BlockKind::Other => {}
        }
        if fields.is_empty() {
            return Some(Cow::Borrowed(&self.start));
        }
        let mut block: IndexMap<Cow<'_, str>, Box<RawValue>> =
            serde_json::from_str(self.start.get()).ok()?;
        block.extend(
            fields
                .into_iter()
                .map(|(name, value)| (Cow::Borrowed(name), value)),
        );
        to_raw_value(&block).ok().map(Cow::Owned)
    }
}
