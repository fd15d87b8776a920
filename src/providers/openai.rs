//! OpenAI's chat API (`POST /chat/completions`, <https://platform.openai.com/docs/api-reference/chat>), as OpenAI and the
//! many servers that speak it understand it: its request, its reply and its event stream. Knows no HTTP and no run.

use std::borrow::Cow;
use std::fmt;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use serde::de::{Deserializer, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};

use crate::config::{self, OpenAiApi};
use crate::domain::agent::{Effort, Params, ResponseFormat};
use crate::domain::content::Content as MessageContent;
use crate::domain::message::{AssistantMessage, Echo, Message, ToolCall, ToolSpec};
use crate::domain::service::Service;
use crate::domain::usage::TokenUsage;
use crate::providers::batches::{BatchItem, Batches, Form};
use crate::providers::counts::{self, Count, Counts, Details, Lenient};
use crate::providers::echo::Origin;
use crate::providers::endpoint::Endpoint;
use crate::providers::lines::Format;
use crate::providers::parts::{self, DataUrl, Piece};
use crate::providers::reply_builder::ReplyBuilder;
use crate::providers::wire::{Base, KeyHeader, Part, Wire};
use crate::providers::{
    Batched, Category, ChatRequest, Delta, End, Provider, ProviderError, Reply, calls, refusal,
    request_body, wire,
};

const BASE: &str = "https://api.openai.com/v1";
/// What the marks of this wire's echoes begin with.
const MARK: &str = "openai";
const HOST: &str = "api.openai.com";
/// Thinking that is not there. Empty text DeepSeek refuses.
const NO_REASONING: &str = "\" \"";

/// A client of one service that speaks OpenAI's chat API.
pub struct OpenAi {
    endpoint: Endpoint<Heard>,
    max_tokens: MaxTokens,
    wants_reasoning: bool,
    batches: Batches,
}

/// The field that bounds a reply. OpenAI deprecated the one and others never learned the other.
#[derive(Clone, Copy)]
enum MaxTokens {
    Old,
    New,
}

/// Where the configured service is, and on which of its wires it is spoken to. The error says what is wrong with the
/// configuration.
pub fn address(config: &config::Provider) -> Result<(Base, OpenAiApi), String> {
    let mut base = Base::parse(config.base_url.as_deref().unwrap_or(BASE))?;
    if !base.has_path() {
        base = base.join("/v1");
    }
    let usual = match base.host() == HOST {
        true => OpenAiApi::Responses,
        false => OpenAiApi::Chat,
    };
    let api = config.api.unwrap_or(usual);
    Ok((base, api))
}

impl OpenAi {
    /// A client of the configured service. The error says what is wrong with the configuration.
    pub fn new(mark: String, config: &config::Provider) -> Result<Self, String> {
        let (base, _) = address(config)?;
        let max_tokens = match config.max_tokens_field.as_deref() {
            Some("max_tokens") => MaxTokens::Old,
            Some("max_completion_tokens") => MaxTokens::New,
            Some(_) => {
                return Err(
                    "max_tokens_field must be max_tokens or max_completion_tokens".to_owned(),
                );
            }
            None if base.host() == HOST => MaxTokens::New,
            None => MaxTokens::Old,
        };
        // With every reply, also with those of a model that it stands in for.
        let wants_reasoning = base.host() == "api.deepseek.com" || mark == "openai/deepseek";
        let wire = Wire::new(config, &base, "/chat/completions", KeyHeader::Bearer)?;
        let batches = Batches::new(&wire, &base, Form::Openai, config.batch_poll);
        Ok(Self {
            endpoint: Endpoint::new(wire, mark),
            max_tokens,
            wants_reasoning,
            batches,
        })
    }

    /// What it sends to and reads from.
    pub fn endpoint(&self) -> &Endpoint<Heard> {
        &self.endpoint
    }
}

impl Provider for OpenAi {
    fn batched(&self) -> Option<&dyn Batched> {
        Some(self)
    }

    fn complete<'a>(
        &'a self,
        request: ChatRequest<'a>,
        deltas: &'a mut (dyn FnMut(Delta<'_>) + Send),
    ) -> BoxFuture<'a, Result<Reply, ProviderError>> {
        let body = Body::of(&request, self);
        self.endpoint.complete(&body, &request, deltas)
    }
}

impl Batched for OpenAi {
    fn batches(&self) -> &Batches {
        &self.batches
    }

    fn item(&self, request: &ChatRequest<'_>) -> Result<BatchItem, ProviderError> {
        let body = request_body::write(&Body::of(request, self), request)?;
        let path = "/v1/chat/completions";
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
    messages: Vec<Turn<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tools: Vec<Tool<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    temperature: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_p: Option<f64>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    stop: &'a [String],
    #[serde(skip_serializing_if = "Option::is_none")]
    max_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_completion_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_effort: Option<Effort>,
    #[serde(skip_serializing_if = "Option::is_none")]
    response_format: Option<Shape<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    service_tier: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream_options: Option<StreamOptions>,
}

#[derive(Serialize)]
struct StreamOptions {
    include_usage: bool,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Shape<'a> {
    JsonObject,
    JsonSchema { json_schema: Schema<'a> },
}

#[derive(Serialize)]
struct Schema<'a> {
    name: &'static str,
    schema: &'a RawValue,
    strict: bool,
}

#[derive(Serialize)]
#[serde(tag = "role", rename_all = "lowercase")]
enum Turn<'a> {
    System {
        content: &'a str,
    },
    User {
        content: Content<'a>,
    },
    Assistant {
        content: Option<&'a str>,
        #[serde(flatten)]
        reasoning: Reasoning<'a>,
        #[serde(skip_serializing_if = "Vec::is_empty")]
        tool_calls: Vec<CallOut<'a>>,
    },
    Tool {
        tool_call_id: &'a str,
        content: &'a str,
    },
}

#[derive(Serialize)]
#[serde(untagged)]
enum Content<'a> {
    Text(Cow<'a, str>),
    Parts(Vec<PartOut<'a>>),
}

impl<'a> Content<'a> {
    fn of(pieces: Vec<Piece<'a>>) -> Self {
        Self::Parts(pieces.into_iter().map(PartOut::from).collect())
    }

    /// This with another behind it.
    fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Text(first), Self::Text(second)) => {
                Self::Text(format!("{first}\n\n{second}").into())
            }
            (first, second) => {
                let mut parts = first.parts();
                parts.extend(second.parts());
                Self::Parts(parts)
            }
        }
    }

    fn parts(self) -> Vec<PartOut<'a>> {
        match self {
            Self::Text(text) => vec![PartOut::Text { text }],
            Self::Parts(parts) => parts,
        }
    }
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum PartOut<'a> {
    Text { text: Cow<'a, str> },
    ImageUrl { image_url: ImageUrl<'a> },
    File { file: FileOut<'a> },
}

#[derive(Serialize)]
struct ImageUrl<'a> {
    url: DataUrl<'a>,
}

#[derive(Serialize)]
struct FileOut<'a> {
    filename: &'a str,
    file_data: DataUrl<'a>,
}

impl<'a> From<Piece<'a>> for PartOut<'a> {
    fn from(piece: Piece<'a>) -> Self {
        match piece {
            Piece::Text(text) => Self::Text { text },
            Piece::Image(data) => Self::ImageUrl {
                image_url: ImageUrl { url: data.url() },
            },
            Piece::File { name, data } => Self::File {
                file: FileOut {
                    filename: name,
                    file_data: data.url(),
                },
            },
        }
    }
}

#[derive(Serialize)]
struct CallOut<'a> {
    id: &'a str,
    r#type: &'static str,
    function: FunctionOut<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    extra_content: Option<&'a RawValue>,
}

#[derive(Serialize)]
struct FunctionOut<'a> {
    name: Cow<'a, str>,
    arguments: &'a str,
}

#[derive(Serialize)]
struct Tool<'a> {
    r#type: &'static str,
    function: FunctionSpec<'a>,
}

#[derive(Serialize)]
struct FunctionSpec<'a> {
    name: &'a str,
    description: &'a str,
    parameters: &'a RawValue,
}

/// What an assistant message had besides text and calls, in the fields of the servers that have such a thing. They want
/// it back beside the calls that it led to.
#[derive(Default, Serialize, Deserialize)]
struct Reasoning<'a> {
    /// DeepSeek, llama.cpp, vLLM.
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a RawValue>,
    /// OpenRouter, newer vLLM.
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    reasoning: Option<&'a RawValue>,
    /// OpenRouter.
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    reasoning_details: Option<&'a RawValue>,
}

/// The body of an [`Echo`].
#[derive(Default, Serialize, Deserialize)]
struct Kept<'a> {
    #[serde(borrow, default)]
    reasoning: Reasoning<'a>,
    /// Gemini's signatures, one for each call.
    #[serde(borrow, default, skip_serializing_if = "Vec::is_empty")]
    extra_content: Vec<Option<&'a RawValue>>,
}

impl Reasoning<'_> {
    /// What stands for it where it may not go back: DeepSeek refuses tool calls that came with thinking and lack the field.
    fn left_out(&self, has_calls: bool) -> Self {
        Self {
            reasoning_content: self
                .reasoning_content
                .filter(|_| has_calls)
                .and_then(|_| serde_json::from_str(NO_REASONING).ok()),
            ..Self::default()
        }
    }
}

impl<'a> Kept<'a> {
    fn read(body: &'a RawValue) -> Self {
        serde_json::from_str(body.get()).unwrap_or_default()
    }
}

/// A reply's echo without its reasoning; `None` if nothing else is in it. Gemini refuses calls without their signatures,
/// and does not mind what stands before them.
pub fn without_reasoning(echo: Echo, has_calls: bool) -> Option<Echo> {
    if !echo.wire.starts_with(MARK) {
        return None;
    }
    let mut kept = Kept::read(&echo.body);
    kept.reasoning = kept.reasoning.left_out(has_calls);
    if kept.reasoning.reasoning_content.is_none() && kept.extra_content.is_empty() {
        return None;
    }
    let body = to_raw_value(&kept).ok()?.into();
    Some(Echo { body, ..echo })
}

impl<'a> Body<'a> {
    fn of(request: &ChatRequest<'a>, service: &OpenAi) -> Self {
        let params = request.params;
        let (max_tokens, max_completion_tokens) = match service.max_tokens {
            MaxTokens::Old => (params.max_tokens, None),
            MaxTokens::New => (None, params.max_tokens),
        };
        let mut messages = turns(request, service.endpoint.origin(request.model));
        if service.wants_reasoning {
            fill_reasoning(&mut messages);
        }
        Self {
            model: request.model,
            messages,
            tools: request.tools.iter().map(Tool::from).collect(),
            temperature: params.temperature,
            top_p: params.top_p,
            stop: &params.stop,
            max_tokens,
            max_completion_tokens,
            reasoning_effort: params.effort,
            response_format: match &params.response_format {
                ResponseFormat::Text => None,
                ResponseFormat::JsonObject => Some(Shape::JsonObject),
                ResponseFormat::JsonSchema(schema) => Some(Shape::JsonSchema {
                    json_schema: Schema {
                        name: "reply",
                        schema,
                        strict: is_closed(schema),
                    },
                }),
            },
            service_tier: tier(params),
            stream: request.stream.then_some(true),
            stream_options: request.stream.then_some(StreamOptions {
                include_usage: true,
            }),
        }
    }
}

/// OpenAI's word for the tier that is asked for; `None` leaves it to the service.
pub fn tier(params: &Params) -> Option<&'static str> {
    match params.service? {
        Service::Default | Service::Batch => None,
        Service::Flex => Some("flex"),
    }
}

/// The tier that a reply says it was answered on; `None` if it says nothing that is known.
pub fn billed(tier: Lenient<String>) -> Option<Delta<'static>> {
    let service = match tier.0?.as_str() {
        "flex" => Service::Flex,
        _ => Service::Default,
    };
    Some(Delta::Billed(service))
}

/// Whether a schema is written for OpenAI's strict mode, which refuses any object that is open.
pub fn is_closed(schema: &RawValue) -> bool {
    #[derive(Deserialize)]
    struct Top<'a> {
        #[serde(borrow, rename = "additionalProperties")]
        additional_properties: Option<&'a RawValue>,
    }
    serde_json::from_str::<Top<'_>>(schema.get())
        .is_ok_and(|top| top.additional_properties.map(RawValue::get) == Some("false"))
}

impl<'a> From<&'a ToolSpec> for Tool<'a> {
    fn from(tool: &'a ToolSpec) -> Self {
        Self {
            r#type: "function",
            function: FunctionSpec {
                name: &tool.name,
                description: &tool.description,
                parameters: &tool.parameters,
            },
        }
    }
}

fn turns<'a>(request: &ChatRequest<'a>, origin: Origin<'_>) -> Vec<Turn<'a>> {
    let mut turns = Vec::with_capacity(request.messages.len() + 1);
    if !request.system.is_empty() {
        turns.push(Turn::System {
            content: request.system,
        });
    }
    let mut called: &[ToolCall] = &[];
    for message in request.messages {
        match message {
            Message::User { content } => {
                let content = match content {
                    MessageContent::Text(text) => Content::Text(text.into()),
                    MessageContent::Parts(parts) => Content::of(parts::pieces(parts, request)),
                };
                push_user(&mut turns, content);
            }
            Message::Assistant(said) => {
                called = &said.tool_calls;
                turns.push(assistant(said, origin));
            }
            Message::Tool { tool_results } => {
                for (place, result) in tool_results.iter().enumerate() {
                    let call = calls::answered(called, place, result);
                    turns.push(Turn::Tool {
                        tool_call_id: call.map_or(&result.call_id, |call| &call.id),
                        content: &result.content,
                    });
                }
                // A message of the role `tool` takes only text.
                let shown = parts::shown_after(tool_results, request);
                if !shown.is_empty() {
                    push_user(&mut turns, Content::of(shown));
                }
            }
        }
    }
    turns
}

/// Adds what a user said. A summary may stand behind the task: the templates of some models (Mistral, Gemma) refuse two
/// messages of a user in a row.
fn push_user<'a>(turns: &mut Vec<Turn<'a>>, content: Content<'a>) {
    let content = match turns.pop() {
        Some(Turn::User { content: before }) => before.and(content),
        other => {
            turns.extend(other);
            content
        }
    };
    turns.push(Turn::User { content });
}

/// Gives replies that came without thinking, such as other models', the field for it.
fn fill_reasoning(turns: &mut [Turn<'_>]) {
    for turn in turns {
        if let Turn::Assistant { reasoning, .. } = turn
            && reasoning.reasoning_content.is_none()
        {
            reasoning.reasoning_content = serde_json::from_str(NO_REASONING).ok();
        }
    }
}

fn assistant<'a>(said: &'a AssistantMessage, origin: Origin<'_>) -> Turn<'a> {
    let mut kept = origin.body(said).map(Kept::read).unwrap_or_default();
    if let Some(other) = origin.body_of_other_model(said) {
        kept.reasoning = Kept::read(other)
            .reasoning
            .left_out(!said.tool_calls.is_empty());
    }
    let tool_calls = said
        .tool_calls
        .iter()
        .enumerate()
        .map(|(place, call)| CallOut {
            id: &call.id,
            r#type: "function",
            function: FunctionOut {
                name: calls::plain_name(&call.name),
                arguments: call.arguments.get(),
            },
            extra_content: kept.extra_content.get(place).copied().flatten(),
        });
    Turn::Assistant {
        content: match said.content.as_str() {
            "" if !said.tool_calls.is_empty() => None,
            text => Some(text),
        },
        tool_calls: tool_calls.collect(),
        reasoning: kept.reasoning,
    }
}

/// One event of a stream, or the whole reply: they differ only in `delta` and `message`.
#[derive(Deserialize)]
struct Chunk<'a> {
    #[serde(borrow)]
    choices: Option<Vec<Choice<'a>>>,
    model: Option<String>,
    #[serde(default)]
    usage: Lenient<UsageIn>,
    #[serde(default)]
    service_tier: Lenient<String>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(borrow)]
    delta: Option<Said<'a>>,
    #[serde(borrow)]
    message: Option<Said<'a>>,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct Said<'a> {
    #[serde(default)]
    content: Text,
    refusal: Option<String>,
    reasoning_content: Option<String>,
    reasoning: Option<String>,
    #[serde(borrow)]
    reasoning_details: Option<Vec<&'a RawValue>>,
    #[serde(borrow)]
    tool_calls: Option<Vec<CallIn<'a>>>,
}

#[derive(Deserialize)]
struct CallIn<'a> {
    index: Option<u64>,
    id: Option<String>,
    #[serde(borrow)]
    function: Option<FunctionIn<'a>>,
    #[serde(borrow)]
    extra_content: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct FunctionIn<'a> {
    name: Option<String>,
    #[serde(borrow)]
    arguments: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct UsageIn {
    #[serde(default)]
    prompt_tokens: Count,
    #[serde(default)]
    completion_tokens: Count,
    #[serde(default)]
    prompt_tokens_details: Lenient<Details>,
    #[serde(default)]
    completion_tokens_details: Lenient<Details>,
}

impl UsageIn {
    fn usage(self) -> Option<TokenUsage> {
        let counts = Counts {
            input: self.prompt_tokens,
            output: self.completion_tokens,
            input_details: self.prompt_tokens_details,
            output_details: self.completion_tokens_details,
        };
        counts.usage()
    }
}

/// A message's text: a string, null, or (Mistral) a list of parts.
#[derive(Default)]
struct Text(String);

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reads;
        impl<'de> Visitor<'de> for Reads {
            type Value = Text;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text, null or a list of parts")
            }

            fn visit_str<E>(self, text: &str) -> Result<Text, E> {
                Ok(Text(text.to_owned()))
            }

            fn visit_string<E>(self, text: String) -> Result<Text, E> {
                Ok(Text(text))
            }

            fn visit_unit<E>(self) -> Result<Text, E> {
                Ok(Text::default())
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut parts: A) -> Result<Text, A::Error> {
                #[derive(Deserialize)]
                struct TextPart {
                    text: Option<String>,
                }
                let mut text = String::new();
                while let Some(part) = parts.next_element::<TextPart>()? {
                    wire::append(&mut text, part.text.unwrap_or_default());
                }
                Ok(Text(text))
            }
        }
        deserializer.deserialize_any(Reads)
    }
}

/// A reply as far as it has come.
#[derive(Default)]
pub struct Heard {
    text: String,
    reasoning_content: String,
    reasoning: String,
    reasoning_details: Vec<Box<RawValue>>,
    calls: Vec<HeardCall>,
    usage: Option<TokenUsage>,
    has_choices: bool,
    has_refused: bool,
    /// Whether nothing more comes.
    is_over: bool,
    stop_reason: Option<String>,
    model: Option<String>,
}

/// A tool call as far as it has come.
#[derive(Default)]
struct HeardCall {
    index: Option<u64>,
    id: String,
    name: String,
    arguments: String,
    extra_content: Option<Box<RawValue>>,
}

impl ReplyBuilder for Heard {
    const FORMAT: Format = Format::Sse;

    fn is_counted(&self) -> bool {
        self.is_over && self.usage.is_some()
    }

    fn part(
        &mut self,
        part: Part<'_>,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<bool, ProviderError> {
        match part {
            Part::Message(data) if data.trim() == "[DONE]" => {
                self.is_over = true;
                Ok(true)
            }
            Part::Message(text) | Part::Whole(text) => {
                self.is_over |= matches!(part, Part::Whole(_));
                let chunk: Chunk<'_> = wire::read(text).inspect_err(|_| {
                    let usage = counts::of_unread(text).and_then(UsageIn::usage);
                    self.report(usage.or(self.usage), deltas);
                })?;
                if chunk.error.is_some() {
                    return Err(refusal::in_reply(text));
                }
                self.chunk(chunk, matches!(part, Part::Whole(_)), deltas)?;
                Ok(false)
            }
        }
    }

    fn reply(self, origin: Origin<'_>) -> Result<Reply, ProviderError> {
        let error = |message: &str| Err(ProviderError::new(Category::Server, message));
        if !self.has_choices {
            return error("response contains no choices");
        }
        let end = match self.stop_reason.as_deref() {
            _ if !self.calls.is_empty() => End::Answer,
            _ if self.has_refused => End::Refused,
            _ if !self.text.is_empty() => End::Answer,
            Some("stop") => End::Answer,
            Some("length") => End::Truncated,
            Some("content_filter") => End::Refused,
            _ => return error("response contains no content"),
        };
        let echo = self.echo(origin);
        let mut tool_calls: Vec<_> = self
            .calls
            .into_iter()
            .map(|call| ToolCall {
                id: call.id,
                provider_id: String::new(),
                name: call.name,
                arguments: calls::arguments_from_text(&call.arguments),
            })
            .collect();
        calls::fill_ids(&mut tool_calls);
        Ok(Reply {
            message: AssistantMessage {
                content: self.text,
                tool_calls,
                echo,
            },
            usage: self.usage,
            stop_reason: self.stop_reason,
            model: self.model,
            end,
        })
    }
}

impl Heard {
    fn chunk(
        &mut self,
        chunk: Chunk<'_>,
        is_whole: bool,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<(), ProviderError> {
        self.model = chunk.model.or(self.model.take());
        if let Some(billed) = billed(chunk.service_tier) {
            deltas(billed);
        }
        if let Some(usage) = chunk.usage.0 {
            self.report(usage.usage(), deltas);
        }
        let Some(choice) = chunk.choices.and_then(|choices| choices.into_iter().next()) else {
            return Ok(());
        };
        self.has_choices = true;
        self.stop_reason = choice.finish_reason.or(self.stop_reason.take());
        let Some(mut said) = choice.message.or(choice.delta) else {
            return Ok(());
        };
        // A refusal has a field of its own.
        let refusal = said.refusal.take().unwrap_or_default();
        self.has_refused |= !refusal.is_empty();
        for text in [std::mem::take(&mut said.content.0), refusal] {
            if !text.is_empty() {
                deltas(Delta::Text(&text));
                wire::append(&mut self.text, text);
            }
        }
        self.reasoning(&said, deltas);
        wire::append(
            &mut self.reasoning_content,
            said.reasoning_content.unwrap_or_default(),
        );
        wire::append(&mut self.reasoning, said.reasoning.unwrap_or_default());
        let details = said.reasoning_details.into_iter().flatten();
        self.reasoning_details
            .extend(details.map(|detail| detail.to_owned()));
        for call in said.tool_calls.into_iter().flatten() {
            self.call(call, is_whole)?;
        }
        Ok(())
    }

    /// Passes thinking on. Some servers send one text in two fields.
    fn reasoning(&mut self, said: &Said<'_>, deltas: &mut dyn FnMut(Delta<'_>)) {
        let fields = [&said.reasoning_content, &said.reasoning];
        let mut texts = fields.into_iter().flatten();
        if let Some(text) = texts.find(|text| !text.is_empty()) {
            deltas(Delta::Reasoning(text));
        } else if self.reasoning_details.is_empty()
            && said
                .reasoning_details
                .as_ref()
                .is_some_and(|all| !all.is_empty())
        {
            // Encrypted: of readable ones the text has come already.
            deltas(Delta::ReasoningStarted);
        }
    }

    /// Keeps what the service has reported so far.
    fn report(&mut self, usage: Option<TokenUsage>, deltas: &mut dyn FnMut(Delta<'_>)) {
        if let Some(usage) = usage {
            deltas(Delta::Usage(usage));
        }
        self.usage = usage;
    }

    /// Takes a call or a piece of one.
    fn call(&mut self, piece: CallIn<'_>, is_whole: bool) -> Result<(), ProviderError> {
        let (name, arguments) = match piece.function {
            Some(function) => (function.name.unwrap_or_default(), function.arguments),
            None => (String::new(), None),
        };
        let id = piece.id.unwrap_or_default();
        let found = match piece.index {
            _ if is_whole => None,
            Some(_) => self.calls.iter().rposition(|c| c.index == piece.index),
            None => self.calls.len().checked_sub(1),
        };
        // Gemini numbers all calls of a reply alike, and some servers number none.
        let found = found.filter(|at| {
            let call = &self.calls[*at];
            // One that has arguments only is still to be named.
            let is_named = !call.id.is_empty() || !call.name.is_empty();
            let is_other = is_named && !id.is_empty() && !name.is_empty() && call.id != id;
            !is_other
        });
        let at = match found {
            Some(at) => at,
            None => {
                calls::check_count(self.calls.len() + 1)?;
                self.calls.push(HeardCall {
                    index: piece.index,
                    ..HeardCall::default()
                });
                self.calls.len() - 1
            }
        };
        let call = &mut self.calls[at];
        if call.id.is_empty() {
            call.id = id;
        }
        // Some servers repeat the name with every piece.
        if call.name != name {
            wire::append(&mut call.name, name);
        }
        if let Some(arguments) = arguments {
            match serde_json::from_str::<String>(arguments.get()) {
                Ok(text) => wire::append(&mut call.arguments, text),
                // Not text: some servers send the object itself.
                Err(_) => call.arguments = arguments.get().to_owned(),
            }
        }
        if let Some(extra) = piece.extra_content {
            call.extra_content = Some(extra.to_owned());
        }
        Ok(())
    }

    /// What text and calls do not say, if there is anything.
    fn echo(&self, origin: Origin<'_>) -> Option<Echo> {
        let text = |text: &String| match text.is_empty() {
            true => None,
            false => to_raw_value(text).ok(),
        };
        let reasoning_content = text(&self.reasoning_content);
        let reasoning = text(&self.reasoning);
        let details = match self.reasoning_details.is_empty() {
            true => None,
            false => to_raw_value(&self.reasoning_details).ok(),
        };
        let has_extra = self.calls.iter().any(|call| call.extra_content.is_some());
        if reasoning_content.is_none() && reasoning.is_none() && details.is_none() && !has_extra {
            return None;
        }
        let extra = self.calls.iter().map(|call| call.extra_content.as_deref());
        let kept = Kept {
            reasoning: Reasoning {
                reasoning_content: reasoning_content.as_deref(),
                reasoning: reasoning.as_deref(),
                reasoning_details: details.as_deref(),
            },
            extra_content: match has_extra {
                true => extra.collect(),
                false => Vec::new(),
            },
        };
        origin.echo(&kept)
    }
}
