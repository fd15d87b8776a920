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
use crate::domain::agent::{Cache, Effort, Params, ResponseFormat};
use crate::domain::content::Content as MessageContent;
use crate::domain::message::{AssistantMessage, Echo, Message, ToolCall, ToolResult};
use crate::domain::usage::TokenUsage;
use crate::providers::batches::{BatchItem, Batches, Form};
use crate::providers::counts::{self, Count, Lenient};
use crate::providers::echo::Origin;
use crate::providers::endpoint::Endpoint;
use crate::providers::lines::Format;
use crate::providers::parts::{self, Base64, Data, Piece};
use crate::providers::reply_builder::ReplyBuilder;
use crate::providers::wire::{Base, KeyHeader, Part, Wire};
use crate::providers::{
    Batched, Category, ChatRequest, Delta, End, Provider, ProviderError, Reply, calls, refusal,
    request_body, wire,
};

const BASE: &str = "https://api.anthropic.com";
const VERSION: &str = "2023-06-01";
/// The API wants a bound on every reply. Where the agent sets none it is the model's longest reply, at most this: thinking
/// counts too.
const MAX_TOKENS: u32 = 32_000;
/// The bound for a model whose longest reply is not known.
const UNKNOWN_MAX_TOKENS: u32 = 8192;

/// A client of one service that speaks Anthropic's Messages API.
pub struct Anthropic {
    endpoint: Endpoint<Heard>,
    batches: Batches,
}

impl Anthropic {
    /// A client of the configured service. The error says what is wrong with the configuration.
    pub fn new(mark: String, config: &config::Provider) -> Result<Self, String> {
        let base = Base::parse(config.base_url.as_deref().unwrap_or(BASE))?;
        let wire = Wire::new(config, &base, "/v1/messages", KeyHeader::ApiKey)?;
        let version = config.version.as_deref().unwrap_or(VERSION);
        let wire = wire.with_header("anthropic-version", version)?;
        let batches = Batches::new(&wire, &base, Form::Anthropic, config.batch_poll);
        Ok(Self {
            endpoint: Endpoint::new(wire, mark),
            batches,
        })
    }

    /// What it sends to and reads from.
    pub fn endpoint(&self) -> &Endpoint<Heard> {
        &self.endpoint
    }
}

impl Provider for Anthropic {
    fn batched(&self) -> Option<&dyn Batched> {
        Some(self)
    }

    fn complete<'a>(
        &'a self,
        request: ChatRequest<'a>,
        deltas: &'a mut (dyn FnMut(Delta<'_>) + Send),
    ) -> BoxFuture<'a, Result<Reply, ProviderError>> {
        let body = Body::of(&request, self.endpoint.origin(request.model));
        self.endpoint.complete(&body, &request, deltas)
    }
}

impl Batched for Anthropic {
    fn batches(&self) -> &Batches {
        &self.batches
    }

    fn item(&self, request: &ChatRequest<'_>) -> Result<BatchItem, ProviderError> {
        let body = Body::of(request, self.endpoint.origin(request.model));
        let body = request_body::write(&body, request)?;
        let path = "/v1/messages";
        Ok(BatchItem { path, body })
    }

    fn hear_item<'a>(
        &'a self,
        request: ChatRequest<'a>,
        status: u16,
        body: Bytes,
        deltas: &'a mut (dyn FnMut(Delta<'_>) + Send),
    ) -> BoxFuture<'a, Result<Reply, ProviderError>> {
        (self.endpoint).read_item(request.model, status, body, deltas)
    }
}

#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    max_tokens: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    system: Option<System<'a>>,
    messages: Vec<Turn<'a>>,
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
    fn of(request: &ChatRequest<'_>) -> Option<Self> {
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
struct Turn<'a> {
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

impl<'a> From<Data<'a>> for Source<'a> {
    fn from(data: Data<'a>) -> Self {
        Self {
            r#type: "base64",
            media_type: data.media_type.as_str(),
            data: data.base64(),
        }
    }
}

impl<'a> From<Piece<'a>> for BlockOut<'a> {
    fn from(piece: Piece<'a>) -> Self {
        match piece {
            Piece::Text(text) => Self::text(text),
            Piece::Image(data) => Self::Image {
                source: data.into(),
                cache_control: None,
            },
            Piece::File { name, data } => Self::Document {
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

impl<'a> Body<'a> {
    fn of(request: &ChatRequest<'a>, origin: Origin<'_>) -> Self {
        let params = request.params;
        let cache = CacheControl::of(request);
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
        let mut messages = turns(request, origin);
        if let Some(cache) = cache {
            mark_ends(&mut messages, cache);
        }
        Self {
            model: request.model,
            max_tokens: params.max_tokens.unwrap_or_else(|| max_tokens(request)),
            system,
            messages,
            tools,
            temperature: params.temperature,
            top_p: params.top_p,
            stop_sequences: &params.stop,
            thinking: thinking(request),
            output_config: output_config(params),
            stream: request.stream.then_some(true),
        }
    }
}

/// Marks where this request and the one before it end: this one is read up to the first mark that the service has kept, and
/// kept up to the last.
fn mark_ends(turns: &mut [Turn<'_>], cache: CacheControl) {
    let is_user = |turn: &&mut Turn<'_>| turn.role == "user";
    let mut ends = 0;
    let mut after_assistant = true;
    for turn in turns.iter_mut().rev() {
        if ends == 2 {
            break;
        }
        if !is_user(&turn) {
            after_assistant = true;
            continue;
        }
        if !std::mem::take(&mut after_assistant) {
            continue;
        }
        ends += 1;
        if let Content::Blocks(blocks) = &mut turn.content
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

fn max_tokens(request: &ChatRequest<'_>) -> u32 {
    let longest = request.facts.and_then(|facts| facts.max_output);
    longest.map_or(UNKNOWN_MAX_TOKENS, |longest| longest.min(MAX_TOKENS))
}

/// What effort and the wish for a summary make of thinking; `None` if the agent sets neither.
fn thinking(request: &ChatRequest<'_>) -> Option<Thinking> {
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

fn turns<'a>(request: &ChatRequest<'a>, origin: Origin<'_>) -> Vec<Turn<'a>> {
    let (messages, has_tools) = (request.messages, !request.tools.is_empty());
    let mut turns = Vec::with_capacity(messages.len());
    let mut called: &[ToolCall] = &[];
    let mut echoed = false;
    for message in messages {
        let (role, content) = match message {
            // Blocks also where a text would do: a mark must not change the bytes around it.
            Message::User { content } => ("user", Content::Blocks(user(content, request))),
            Message::Assistant(said) => {
                called = &said.tool_calls;
                let is_whole = has_tools || said.tool_calls.is_empty();
                let echo = origin.body(said).filter(|_| is_whole);
                echoed = echo.is_some();
                let content = match echo {
                    Some(body) => Content::Echo(with_unique_ids(body, &said.tool_calls)),
                    None if is_whole => Content::Blocks(rebuilt(said)),
                    None => Content::Blocks(told(said)),
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
                    let shown = parts::shown_after(std::slice::from_ref(result), request);
                    std::iter::once(text).chain(shown.into_iter().map(BlockOut::from))
                });
                ("user", Content::Blocks(results.collect()))
            }
            Message::Tool { tool_results } => {
                let results = tool_results.iter().enumerate().map(|(place, result)| {
                    let call = calls::answered(called, place, result);
                    let id = call.map_or(&result.call_id, |call| &call.id);
                    BlockOut::ToolResult {
                        // An echo holds the id in the letters that the service gave.
                        tool_use_id: match echoed {
                            true => Cow::Borrowed(id),
                            false => calls::plain_id(id),
                        },
                        content: result_content(result, request),
                        is_error: result.is_error,
                        cache_control: None,
                    }
                });
                ("user", Content::Blocks(results.collect()))
            }
        };
        turns.push(Turn { role, content });
    }
    turns
}

fn user<'a>(content: &'a MessageContent, request: &ChatRequest<'a>) -> Vec<BlockOut<'a>> {
    match content {
        MessageContent::Text(text) => vec![BlockOut::text(text.as_str())],
        MessageContent::Parts(parts) => {
            let pieces = parts::pieces(parts, request);
            pieces.into_iter().map(BlockOut::from).collect()
        }
    }
}

fn result_content<'a>(result: &'a ToolResult, request: &ChatRequest<'a>) -> ResultContent<'a> {
    let pieces = parts::result_pieces(result, request);
    match pieces.is_empty() {
        true => ResultContent::Text(&result.content),
        false => ResultContent::Blocks(pieces.into_iter().map(BlockOut::from).collect()),
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
            let read: BlockIn<'_> = serde_json::from_str(block.get()).ok()?;
            let call = match read.kind.as_str() {
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
fn rebuilt(said: &AssistantMessage) -> Vec<BlockOut<'_>> {
    let mut blocks = Vec::with_capacity(said.tool_calls.len() + 1);
    if !said.content.trim().is_empty() {
        blocks.push(BlockOut::text(said.content.as_str()));
    }
    blocks.extend(said.tool_calls.iter().map(|call| BlockOut::ToolUse {
        id: calls::plain_id(&call.id),
        name: calls::plain_name(&call.name),
        input: &call.arguments,
    }));
    blocks
}

/// An assistant message with its calls as text: the API takes no blocks of tools in a request that offers none.
fn told(said: &AssistantMessage) -> Vec<BlockOut<'_>> {
    let mut text = said.content.clone();
    for call in &said.tool_calls {
        let parted = if text.is_empty() { "" } else { "\n" };
        text.push_str(&format!(
            "{parted}[Calls {} with {}]",
            call.name,
            call.arguments.get()
        ));
    }
    vec![BlockOut::text(text)]
}

/// A whole reply, and the beginning of one in `message_start`.
#[derive(Deserialize)]
struct Whole<'a> {
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
    message: Option<Whole<'a>>,
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
    input_tokens: Count,
    #[serde(default)]
    output_tokens: Count,
    #[serde(default)]
    cache_read_input_tokens: Count,
    #[serde(default)]
    cache_creation_input_tokens: Count,
    #[serde(default)]
    output_tokens_details: Lenient<OutputDetails>,
}

#[derive(Deserialize)]
struct OutputDetails {
    #[serde(default)]
    thinking_tokens: Count,
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
struct Block {
    index: Option<u64>,
    kind: Kind,
    /// The block as it began.
    start: Box<RawValue>,
    /// Whether it has fields that text and calls do not keep.
    is_rich: bool,
    /// What deltas added.
    added: Added,
}

enum Kind {
    Text(String),
    ToolUse(ToolCall),
    Other,
}

#[derive(Default)]
struct Added {
    text: String,
    json: String,
    thinking: String,
    signature: String,
}

/// A reply as far as it has come.
#[derive(Default)]
pub struct Heard {
    blocks: Vec<Block>,
    /// The counts as reported, without the sum that ours is.
    usage: Option<TokenUsage>,
    /// Whether one of them made no sense.
    is_senseless: bool,
    /// Whether the last of them have come.
    is_over: bool,
    stop_reason: Option<String>,
    model: Option<String>,
}

impl ReplyBuilder for Heard {
    const FORMAT: Format = Format::Sse;

    fn part(
        &mut self,
        part: Part<'_>,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<bool, ProviderError> {
        match part {
            Part::Whole(text) => self.whole(text, deltas),
            Part::Message(text) => self.event(text, deltas),
        }
    }

    fn is_counted(&self) -> bool {
        self.is_over && self.usage().is_some()
    }

    fn reply(mut self, origin: Origin<'_>) -> Result<Reply, ProviderError> {
        for block in &mut self.blocks {
            block.finish();
        }
        let mut text = String::new();
        let mut tool_calls = Vec::new();
        // In the order in which a message is rebuilt: one text, then calls.
        let mut is_plain = true;
        for block in &self.blocks {
            match &block.kind {
                Kind::Text(piece) if piece.is_empty() => {}
                Kind::Text(piece) => {
                    is_plain &= text.is_empty() && tool_calls.is_empty() && !block.is_rich;
                    wire::append(&mut text, piece.clone());
                }
                Kind::ToolUse(call) => {
                    is_plain &= !block.is_rich;
                    tool_calls.push(call.clone());
                }
                Kind::Other => is_plain = false,
            }
        }
        let end = match self.stop_reason.as_deref() {
            _ if !tool_calls.is_empty() => End::Answer,
            Some("refusal") => End::Refused,
            _ if !text.is_empty() => End::Answer,
            Some("end_turn" | "stop_sequence") => End::Answer,
            Some("max_tokens" | "model_context_window_exceeded") => End::Truncated,
            _ => {
                let why = "response contains no content";
                return Err(ProviderError::new(Category::Server, why));
            }
        };
        let filled = calls::fill_ids(&mut tool_calls);
        let echo = match is_plain || filled {
            true => None,
            false => self.echo(origin),
        };
        Ok(Reply {
            message: AssistantMessage {
                content: text,
                tool_calls,
                echo,
            },
            usage: self.usage(),
            stop_reason: self.stop_reason,
            model: self.model,
            end,
        })
    }
}

impl Heard {
    /// Takes a whole reply.
    fn whole(
        &mut self,
        text: &str,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<bool, ProviderError> {
        self.is_over = true;
        let whole: Whole<'_> = wire::read(text).inspect_err(|_| {
            if let Some(unread) = counts::of_unread(text) {
                self.count(&unread, deltas);
            }
        })?;
        if whole.error.is_some() {
            return Err(refusal::in_reply(text));
        }
        self.begin(whole, deltas)?;
        Ok(true)
    }

    /// Takes one event; says whether it was the last.
    fn event(
        &mut self,
        text: &str,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<bool, ProviderError> {
        let event: Event<'_> = wire::read(text)?;
        // Servers that speak OpenAI's language too send its errors here, without a type.
        if event.error.is_some() || event.kind == "error" {
            return Err(refusal::in_reply(text));
        }
        if let Some(usage) = event.usage.0 {
            self.count(&usage, deltas);
        }
        match event.kind.as_str() {
            "message_start" => {
                if let Some(message) = event.message {
                    self.begin(message, deltas)?;
                }
            }
            "content_block_start" => {
                if let Some(block) = event.content_block {
                    self.block(event.index, block, deltas)?;
                }
            }
            "content_block_delta" => {
                if let Some(delta) = event.delta {
                    self.add(event.index, delta, deltas);
                }
            }
            "message_delta" => {
                let stop_reason = event.delta.and_then(|delta| delta.stop_reason);
                self.is_over |= stop_reason.is_some();
                self.stop_reason = stop_reason.or(self.stop_reason.take());
            }
            "message_stop" => return Ok(true),
            // `ping`, `content_block_stop`, and what may come.
            _ => {}
        }
        Ok(false)
    }

    fn begin(
        &mut self,
        message: Whole<'_>,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<(), ProviderError> {
        if let Some(usage) = message.usage.0 {
            self.count(&usage, deltas);
        }
        self.model = message.model;
        self.stop_reason = message.stop_reason;
        for block in message.content.into_iter().flatten() {
            self.block(None, block, deltas)?;
        }
        Ok(())
    }

    /// Takes a block, or the beginning of one.
    fn block(
        &mut self,
        index: Option<u64>,
        start: &RawValue,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<(), ProviderError> {
        calls::check_count(self.blocks.len() + 1)?;
        let block: BlockIn<'_> = wire::read(start.get())?;
        let kind = match block.kind.as_str() {
            "text" => {
                let text = block.text.unwrap_or_default();
                if !text.is_empty() {
                    deltas(Delta::Text(&text));
                }
                Kind::Text(text)
            }
            "tool_use" => Kind::ToolUse(ToolCall {
                id: block.id.unwrap_or_default(),
                provider_id: String::new(),
                name: block.name.unwrap_or_default(),
                arguments: calls::arguments_from_json(block.input),
            }),
            kind => {
                match block.thinking.filter(|text| !text.is_empty()) {
                    Some(text) => deltas(Delta::Reasoning(&text)),
                    None if matches!(kind, "thinking" | "redacted_thinking") => {
                        deltas(Delta::ReasoningStarted);
                    }
                    None => {}
                }
                Kind::Other
            }
        };
        self.blocks.push(Block {
            index,
            is_rich: matches!(kind, Kind::Other)
                || block.caller.is_some()
                || block.toolset_name.is_some()
                || block.citations.is_some(),
            kind,
            start: start.to_owned(),
            added: Added::default(),
        });
        Ok(())
    }

    /// Adds to the block that a delta names. A delta of a block that never began is dropped, as the API's own SDKs do.
    fn add(&mut self, index: Option<u64>, delta: BlockDelta, deltas: &mut dyn FnMut(Delta<'_>)) {
        let Some(block) = self.blocks.iter_mut().rfind(|b| b.index == index) else {
            return;
        };
        if let Some(text) = delta.text.filter(|text| !text.is_empty()) {
            if matches!(block.kind, Kind::Text(_)) {
                deltas(Delta::Text(&text));
            }
            wire::append(&mut block.added.text, text);
        }
        wire::append(
            &mut block.added.json,
            delta.partial_json.unwrap_or_default(),
        );
        if let Some(thinking) = delta.thinking.filter(|text| !text.is_empty()) {
            deltas(Delta::Reasoning(&thinking));
            wire::append(&mut block.added.thinking, thinking);
        }
        wire::append(
            &mut block.added.signature,
            delta.signature.unwrap_or_default(),
        );
    }

    /// Takes counts; those of a stream are totals so far, in one event or another.
    fn count(&mut self, reported: &UsageIn, deltas: &mut dyn FnMut(Delta<'_>)) {
        let counts = [
            reported.input_tokens,
            reported.output_tokens,
            reported.cache_read_input_tokens,
            reported.cache_creation_input_tokens,
        ];
        if counts == [Count::Absent; 4] {
            return;
        }
        self.is_senseless |= counts.contains(&Count::Senseless);
        let usage = self.usage.get_or_insert_default();
        let [input, output, cache_read, cache_write] = counts.map(Count::known);
        usage.input = usage.input.max(input);
        usage.output = usage.output.max(output);
        usage.cache_read = usage.cache_read.max(cache_read);
        usage.cache_write = usage.cache_write.max(cache_write);
        if let Some(details) = &reported.output_tokens_details.0 {
            usage.reasoning = usage.reasoning.max(details.thinking_tokens.known());
        }
        if let Some(usage) = self.usage() {
            deltas(Delta::Usage(usage));
        }
    }

    /// What it has reported, if all of it makes sense.
    fn usage(&self) -> Option<TokenUsage> {
        self.usage.filter(|_| !self.is_senseless).map(counted)
    }

    /// All blocks as the service sent them, but for what it would not take back.
    fn echo(&self, origin: Origin<'_>) -> Option<Echo> {
        let blocks: Vec<_> = self.blocks.iter().filter_map(Block::whole).collect();
        origin.echo(&blocks)
    }
}

/// The counts as ours: the API leaves cached tokens out of `input_tokens`.
fn counted(usage: TokenUsage) -> TokenUsage {
    TokenUsage {
        input: usage.input + usage.cache_read + usage.cache_write,
        ..usage
    }
}

impl Block {
    /// Puts what deltas added into text and arguments.
    fn finish(&mut self) {
        match &mut self.kind {
            Kind::Text(text) => text.push_str(&self.added.text),
            Kind::ToolUse(call) if !self.added.json.is_empty() => {
                call.arguments = calls::arguments_from_text(&self.added.json);
            }
            Kind::ToolUse(_) | Kind::Other => {}
        }
    }

    /// The block as one document; none if the API would refuse it for being empty.
    fn whole(&self) -> Option<Cow<'_, RawValue>> {
        let mut fields: Vec<(&str, Box<RawValue>)> = Vec::new();
        let mut add = |field, text: &String| {
            if !text.is_empty() {
                fields.extend(to_raw_value(text).map(|text| (field, text)));
            }
        };
        add("thinking", &self.added.thinking);
        add("signature", &self.added.signature);
        match &self.kind {
            Kind::Text(text) if text.trim().is_empty() => return None,
            Kind::Text(text) if !self.added.text.is_empty() => add("text", text),
            // A streamed block may begin without `input`, and a cut one ends with half of it.
            Kind::ToolUse(call) => fields.push(("input", RawValue::to_owned(&call.arguments))),
            Kind::Other if !self.added.json.is_empty() => {
                let input = calls::arguments_from_text(&self.added.json);
                fields.push(("input", RawValue::to_owned(&input)));
            }
            Kind::Text(_) | Kind::Other => {}
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
