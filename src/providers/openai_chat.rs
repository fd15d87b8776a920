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
use crate::domain::agent::params::{Effort, Params};
use crate::domain::agent::response_format::ResponseFormat;
use crate::domain::content::Content as MessageContent;
use crate::domain::message::{AssistantMessage, Echo, Message, ToolCall, ToolSpec};
use crate::domain::service::Service;
use crate::domain::usage::TokenUsage;
use crate::providers::batches::{BatchApi, BatchClient, BatchItem};
use crate::providers::content_parts::{self, ContentPart, DataUrl};
use crate::providers::echo::ReplyOrigin;
use crate::providers::endpoint::Endpoint;
use crate::providers::http_client::{BaseUrl, BodyPart, HttpClient, KeyHeader};
use crate::providers::reply_builder::ReplyBuilder;
use crate::providers::stream_decoder::StreamFormat;
use crate::providers::token_counts::{self, Lenient, TokenCount, TokenCounts, TokenDetails};
use crate::providers::{
    BatchProvider, ChatRequest, Delta, ErrorCategory, Provider, ProviderError, Reply, ReplyOutcome,
    error_mapping, http_client, request_body, tool_call_codec,
};

const DEFAULT_BASE_URL: &str = "https://api.openai.com/v1";
/// What the marks of this wire's echoes begin with.
const ECHO_PREFIX: &str = "openai";
const OPENAI_HOST: &str = "api.openai.com";
/// Thinking that is not there. Empty text DeepSeek refuses.
const NO_REASONING: &str = "\" \"";

/// A client of one service that speaks OpenAI's chat API.
pub struct OpenAiChat {
    endpoint: Endpoint<ChatReplyBuilder>,
    max_tokens_field: MaxTokensField,
    wants_reasoning: bool,
    batch_client: BatchClient,
}

/// The field that bounds a reply. OpenAI deprecated the one and others never learned the other.
#[derive(Clone, Copy)]
enum MaxTokensField {
    MaxTokens,
    MaxCompletionTokens,
}

/// Where the configured service is, and on which of its wires it is spoken to. The error says what is wrong with the
/// configuration.
pub fn base_url_and_api(config: &config::Provider) -> Result<(BaseUrl, OpenAiApi), String> {
    let mut base = BaseUrl::parse(config.base_url.as_deref().unwrap_or(DEFAULT_BASE_URL))?;
    if !base.has_path() {
        base = base.join("/v1");
    }
    let default_api = match base.host() == OPENAI_HOST {
        true => OpenAiApi::Responses,
        false => OpenAiApi::Chat,
    };
    let api = config.api.unwrap_or(default_api);
    Ok((base, api))
}

impl OpenAiChat {
    /// A client of the configured service. The error says what is wrong with the configuration.
    pub fn new(service_id: String, config: &config::Provider) -> Result<Self, String> {
        let (base, _) = base_url_and_api(config)?;
        let max_tokens_field = match config.max_tokens_field.as_deref() {
            Some("max_tokens") => MaxTokensField::MaxTokens,
            Some("max_completion_tokens") => MaxTokensField::MaxCompletionTokens,
            Some(_) => {
                return Err(
                    "max_tokens_field must be max_tokens or max_completion_tokens".to_owned(),
                );
            }
            None if base.host() == OPENAI_HOST => MaxTokensField::MaxCompletionTokens,
            None => MaxTokensField::MaxTokens,
        };
        // With every reply, also with those of a model that it stands in for.
        let wants_reasoning = base.host() == "api.deepseek.com" || service_id == "openai/deepseek";
        let client = HttpClient::new(config, &base, "/chat/completions", KeyHeader::Bearer)?;
        let batch_client = BatchClient::new(&client, &base, BatchApi::Openai, config.batch_poll);
        Ok(Self {
            endpoint: Endpoint::new(client, service_id),
            max_tokens_field,
            wants_reasoning,
            batch_client,
        })
    }

    /// What it sends to and reads from.
    pub fn endpoint(&self) -> &Endpoint<ChatReplyBuilder> {
        &self.endpoint
    }
}

impl Provider for OpenAiChat {
    fn batch_provider(&self) -> Option<&dyn BatchProvider> {
        Some(self)
    }

    fn complete<'a>(
        &'a self,
        request: ChatRequest<'a>,
        deltas: &'a mut (dyn FnMut(Delta<'_>) + Send),
    ) -> BoxFuture<'a, Result<Reply, ProviderError>> {
        let body = RequestBody::new(&request, self);
        self.endpoint.complete(&body, &request, deltas)
    }
}

impl BatchProvider for OpenAiChat {
    fn batch_client(&self) -> &BatchClient {
        &self.batch_client
    }

    fn batch_item(&self, request: &ChatRequest<'_>) -> Result<BatchItem, ProviderError> {
        let body = request_body::serialize_with_extra(&RequestBody::new(request, self), request)?;
        let path = "/v1/chat/completions";
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
    messages: Vec<MessageOut<'a>>,
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
    response_format: Option<OutputFormat<'a>>,
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
enum OutputFormat<'a> {
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
enum MessageOut<'a> {
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
    fn of(parts: Vec<ContentPart<'a>>) -> Self {
        Self::Parts(parts.into_iter().map(PartOut::from).collect())
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

impl<'a> From<ContentPart<'a>> for PartOut<'a> {
    fn from(part: ContentPart<'a>) -> Self {
        match part {
            ContentPart::Text(text) => Self::Text { text },
            ContentPart::Image(data) => Self::ImageUrl {
                image_url: ImageUrl {
                    url: data.data_url(),
                },
            },
            ContentPart::File { name, data } => Self::File {
                file: FileOut {
                    filename: name,
                    file_data: data.data_url(),
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
struct EchoPayload<'a> {
    #[serde(borrow, default)]
    reasoning: Reasoning<'a>,
    /// Gemini's signatures, one for each call.
    #[serde(borrow, default, skip_serializing_if = "Vec::is_empty")]
    extra_content: Vec<Option<&'a RawValue>>,
}

impl Reasoning<'_> {
    /// What stands for it where it may not go back: DeepSeek refuses tool calls that came with thinking and lack the field.
    fn placeholder(&self, has_calls: bool) -> Self {
        Self {
            reasoning_content: self
                .reasoning_content
                .filter(|_| has_calls)
                .and_then(|_| serde_json::from_str(NO_REASONING).ok()),
            ..Self::default()
        }
    }
}

impl<'a> EchoPayload<'a> {
    fn parse(body: &'a RawValue) -> Self {
        serde_json::from_str(body.get()).unwrap_or_default()
    }
}

/// A reply's echo without its reasoning; `None` if nothing else is in it. Gemini refuses calls without their signatures,
/// and does not mind what stands before them.
pub fn without_reasoning(echo: Echo, has_calls: bool) -> Option<Echo> {
    if !echo.wire.starts_with(ECHO_PREFIX) {
        return None;
    }
    let mut payload = EchoPayload::parse(&echo.body);
    payload.reasoning = payload.reasoning.placeholder(has_calls);
    if payload.reasoning.reasoning_content.is_none() && payload.extra_content.is_empty() {
        return None;
    }
    let body = to_raw_value(&payload).ok()?.into();
    Some(Echo { body, ..echo })
}

impl<'a> RequestBody<'a> {
    fn new(request: &ChatRequest<'a>, service: &OpenAiChat) -> Self {
        let params = request.params;
        let (max_tokens, max_completion_tokens) = match service.max_tokens_field {
            MaxTokensField::MaxTokens => (params.max_tokens, None),
            MaxTokensField::MaxCompletionTokens => (None, params.max_tokens),
        };
        let mut messages = build_messages(request, service.endpoint.origin(request.model));
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
                ResponseFormat::JsonObject => Some(OutputFormat::JsonObject),
                ResponseFormat::JsonSchema(schema) => Some(OutputFormat::JsonSchema {
                    json_schema: Schema {
                        name: "reply",
                        schema,
                        strict: is_strict_schema(schema),
                    },
                }),
            },
            service_tier: service_tier(params),
            stream: request.stream.then_some(true),
            stream_options: request.stream.then_some(StreamOptions {
                include_usage: true,
            }),
        }
    }
}

/// OpenAI's word for the tier that is asked for; `None` leaves it to the service.
pub fn service_tier(params: &Params) -> Option<&'static str> {
    match params.service? {
        Service::Default | Service::Batch => None,
        Service::Flex => Some("flex"),
    }
}

/// The tier that a reply says it was answered on; `None` if it says nothing that is known.
pub fn service_tier_delta(tier: Lenient<String>) -> Option<Delta<'static>> {
    let service = match tier.0?.as_str() {
        "flex" => Service::Flex,
        _ => Service::Default,
    };
    Some(Delta::ServiceTier(service))
}

/// Whether a schema is written for OpenAI's strict mode, which refuses any object that is open.
pub fn is_strict_schema(schema: &RawValue) -> bool {
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

fn build_messages<'a>(request: &ChatRequest<'a>, origin: ReplyOrigin<'_>) -> Vec<MessageOut<'a>> {
    let mut turns = Vec::with_capacity(request.messages.len() + 1);
    if !request.system.is_empty() {
        turns.push(MessageOut::System {
            content: request.system,
        });
    }
    let mut last_calls: &[ToolCall] = &[];
    for message in request.messages {
        match message {
            Message::User { content } => {
                let content = match content {
                    MessageContent::Text(text) => Content::Text(text.into()),
                    MessageContent::Parts(parts) => {
                        Content::of(content_parts::user_parts(parts, request))
                    }
                };
                push_user(&mut turns, content);
            }
            Message::Assistant(reply) => {
                last_calls = &reply.tool_calls;
                turns.push(assistant_message(reply, origin));
            }
            Message::Tool { tool_results } => {
                for (index, result) in tool_results.iter().enumerate() {
                    let call = tool_call_codec::find_call(last_calls, index, result);
                    turns.push(MessageOut::Tool {
                        tool_call_id: call.map_or(&result.call_id, |call| &call.id),
                        content: &result.content,
                    });
                }
                // A message of the role `tool` takes only text.
                let attachments = content_parts::result_attachment_parts(tool_results, request);
                if !attachments.is_empty() {
                    push_user(&mut turns, Content::of(attachments));
                }
            }
        }
    }
    turns
}

/// Adds what a user said. A summary may stand behind the task: the templates of some models (Mistral, Gemma) refuse two
/// messages of a user in a row.
fn push_user<'a>(turns: &mut Vec<MessageOut<'a>>, content: Content<'a>) {
    let content = match turns.pop() {
        Some(MessageOut::User { content: before }) => before.and(content),
        foreign => {
            turns.extend(foreign);
            content
        }
    };
    turns.push(MessageOut::User { content });
}

/// Gives replies that came without thinking, such as other models', the field for it.
fn fill_reasoning(turns: &mut [MessageOut<'_>]) {
    for turn in turns {
        if let MessageOut::Assistant { reasoning, .. } = turn
            && reasoning.reasoning_content.is_none()
        {
            reasoning.reasoning_content = serde_json::from_str(NO_REASONING).ok();
        }
    }
}

fn assistant_message<'a>(said: &'a AssistantMessage, origin: ReplyOrigin<'_>) -> MessageOut<'a> {
    let mut payload = origin
        .echo_body(said)
        .map(EchoPayload::parse)
        .unwrap_or_default();
    if let Some(other) = origin.foreign_echo_body(said) {
        payload.reasoning = EchoPayload::parse(other)
            .reasoning
            .placeholder(!said.tool_calls.is_empty());
    }
    let tool_calls = said
        .tool_calls
        .iter()
        .enumerate()
        .map(|(place, call)| CallOut {
            id: &call.id,
            r#type: "function",
            function: FunctionOut {
                name: tool_call_codec::sanitize_name(&call.name),
                arguments: call.arguments.get(),
            },
            extra_content: payload.extra_content.get(place).copied().flatten(),
        });
    MessageOut::Assistant {
        content: match said.content.as_str() {
            "" if !said.tool_calls.is_empty() => None,
            text => Some(text),
        },
        tool_calls: tool_calls.collect(),
        reasoning: payload.reasoning,
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
    delta: Option<MessageIn<'a>>,
    #[serde(borrow)]
    message: Option<MessageIn<'a>>,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct MessageIn<'a> {
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
    prompt_tokens: TokenCount,
    #[serde(default)]
    completion_tokens: TokenCount,
    #[serde(default)]
    prompt_tokens_details: Lenient<TokenDetails>,
    #[serde(default)]
    completion_tokens_details: Lenient<TokenDetails>,
}

impl UsageIn {
    fn into_usage(self) -> Option<TokenUsage> {
        let counts = TokenCounts {
            input: self.prompt_tokens,
            output: self.completion_tokens,
            input_details: self.prompt_tokens_details,
            output_details: self.completion_tokens_details,
        };
        counts.into_usage()
    }
}

/// A message's text: a string, null, or (Mistral) a list of parts.
#[derive(Default)]
struct Text(String);

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextVisitor;
        impl<'de> Visitor<'de> for TextVisitor {
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
                    http_client::append(&mut text, part.text.unwrap_or_default());
                }
                Ok(Text(text))
            }
        }
        deserializer.deserialize_any(TextVisitor)
    }
}

/// A reply as far as it has come.
#[derive(Default)]
pub struct ChatReplyBuilder {
    text: String,
    reasoning_content: String,
    reasoning: String,
    reasoning_details: Vec<Box<RawValue>>,
    calls: Vec<PartialCall>,
    usage: Option<TokenUsage>,
    has_choices: bool,
    is_refused: bool,
    /// Whether nothing more comes.
    is_finished: bool,
    stop_reason: Option<String>,
    model: Option<String>,
}

/// A tool call as far as it has come.
#[derive(Default)]
struct PartialCall {
    index: Option<u64>,
    id: String,
    name: String,
    arguments: String,
    extra_content: Option<Box<RawValue>>,
}

impl ReplyBuilder for ChatReplyBuilder {
    const FORMAT: StreamFormat = StreamFormat::Sse;

    fn has_final_usage(&self) -> bool {
        self.is_finished && self.usage.is_some()
    }

    fn push_part(
        &mut self,
        part: BodyPart<'_>,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<bool, ProviderError> {
        match part {
            BodyPart::Message(data) if data.trim() == "[DONE]" => {
                self.is_finished = true;
                Ok(true)
            }
            BodyPart::Message(text) | BodyPart::Document(text) => {
                self.is_finished |= matches!(part, BodyPart::Document(_));
                let chunk: Chunk<'_> = http_client::parse_json(text).inspect_err(|_| {
                    let usage = token_counts::parse_usage_only(text).and_then(UsageIn::into_usage);
                    self.set_usage(usage.or(self.usage), deltas);
                })?;
                if chunk.error.is_some() {
                    return Err(error_mapping::from_error_body(text));
                }
                self.push_chunk(chunk, matches!(part, BodyPart::Document(_)), deltas)?;
                Ok(false)
            }
        }
    }

    fn finish(self, origin: ReplyOrigin<'_>) -> Result<Reply, ProviderError> {
        let error = |message: &str| Err(ProviderError::new(ErrorCategory::Server, message));
        if !self.has_choices {
            return error("response contains no choices");
        }
        let end = match self.stop_reason.as_deref() {
            _ if !self.calls.is_empty() => ReplyOutcome::Complete,
            _ if self.is_refused => ReplyOutcome::Refused,
            _ if !self.text.is_empty() => ReplyOutcome::Complete,
            Some("stop") => ReplyOutcome::Complete,
            Some("length") => ReplyOutcome::Truncated,
            Some("content_filter") => ReplyOutcome::Refused,
            _ => return error("response contains no content"),
        };
        let echo = self.build_echo(origin);
        let mut tool_calls: Vec<_> = self
            .calls
            .into_iter()
            .map(|call| ToolCall {
                id: call.id,
                provider_id: String::new(),
                name: call.name,
                arguments: tool_call_codec::arguments_from_text(&call.arguments),
            })
            .collect();
        tool_call_codec::fill_missing_ids(&mut tool_calls);
        Ok(Reply {
            message: AssistantMessage {
                content: self.text,
                tool_calls,
                echo,
            },
            usage: self.usage,
            stop_reason: self.stop_reason,
            model: self.model,
            outcome: end,
        })
    }
}

impl ChatReplyBuilder {
    fn push_chunk(
        &mut self,
        chunk: Chunk<'_>,
        is_whole: bool,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<(), ProviderError> {
        self.model = chunk.model.or(self.model.take());
        if let Some(delta) = service_tier_delta(chunk.service_tier) {
            deltas(delta);
        }
        if let Some(usage) = chunk.usage.0 {
            self.set_usage(usage.into_usage(), deltas);
        }
        let Some(choice) = chunk.choices.and_then(|choices| choices.into_iter().next()) else {
            return Ok(());
        };
        self.has_choices = true;
        self.stop_reason = choice.finish_reason.or(self.stop_reason.take());
        let Some(mut message) = choice.message.or(choice.delta) else {
            return Ok(());
        };
        // A refusal has a field of its own.
        let refusal = message.refusal.take().unwrap_or_default();
        self.is_refused |= !refusal.is_empty();
        for text in [std::mem::take(&mut message.content.0), refusal] {
            if !text.is_empty() {
                deltas(Delta::Text(&text));
                http_client::append(&mut self.text, text);
            }
        }
        self.emit_reasoning(&message, deltas);
        http_client::append(
            &mut self.reasoning_content,
            message.reasoning_content.unwrap_or_default(),
        );
        http_client::append(&mut self.reasoning, message.reasoning.unwrap_or_default());
        let details = message.reasoning_details.into_iter().flatten();
        self.reasoning_details
            .extend(details.map(|detail| detail.to_owned()));
        for call in message.tool_calls.into_iter().flatten() {
            self.push_call(call, is_whole)?;
        }
        Ok(())
    }

    /// Passes thinking on. Some servers send one text in two fields.
    fn emit_reasoning(&mut self, said: &MessageIn<'_>, deltas: &mut dyn FnMut(Delta<'_>)) {
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
    fn set_usage(&mut self, usage: Option<TokenUsage>, deltas: &mut dyn FnMut(Delta<'_>)) {
        if let Some(usage) = usage {
            deltas(Delta::Usage(usage));
        }
        self.usage = usage;
    }

    /// Takes a call or a piece of one.
    fn push_call(&mut self, piece: CallIn<'_>, is_whole: bool) -> Result<(), ProviderError> {
        let (name, arguments) = match piece.function {
            Some(function) => (function.name.unwrap_or_default(), function.arguments),
            None => (String::new(), None),
        };
        let id = piece.id.unwrap_or_default();
        let position = match piece.index {
            _ if is_whole => None,
            Some(_) => self.calls.iter().rposition(|c| c.index == piece.index),
            None => self.calls.len().checked_sub(1),
        };
        // Gemini numbers all calls of a reply alike, and some servers number none.
        let found = position.filter(|index| {
            let call = &self.calls[*index];
            // One that has arguments only is still to be named.
            let is_named = !call.id.is_empty() || !call.name.is_empty();
            let is_other = is_named && !id.is_empty() && !name.is_empty() && call.id != id;
            !is_other
        });
        let at = match found {
            Some(at) => at,
            None => {
                tool_call_codec::check_call_count(self.calls.len() + 1)?;
                self.calls.push(PartialCall {
                    index: piece.index,
                    ..PartialCall::default()
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
            http_client::append(&mut call.name, name);
        }
        if let Some(arguments) = arguments {
            match serde_json::from_str::<String>(arguments.get()) {
                Ok(text) => http_client::append(&mut call.arguments, text),
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
    fn build_echo(&self, origin: ReplyOrigin<'_>) -> Option<Echo> {
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
        let payload = EchoPayload {
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
        origin.echo(&payload)
    }
}
