//! The requests of Anthropic's Messages API. Pure.

use std::borrow::Cow;

use serde::Serialize;
use serde_json::value::RawValue;

use crate::domain::agent::client_additions::ToolChoice;
use crate::domain::agent::params::{Effort, Params};
use crate::domain::agent::response_format::ResponseFormat;
use crate::domain::content::Content as MessageContent;
use crate::domain::message::{AssistantMessage, Message, ToolCall, ToolResult};
use crate::providers::anthropic::reply::with_unique_ids;
use crate::providers::cache_control::{CacheControl, mark_request_ends};
use crate::providers::content_parts::{self, Base64, ContentPart, MediaData};
use crate::providers::echo::ReplyOrigin;
use crate::providers::json_prompt::{with_json_prompt, with_schema_prompt};
use crate::providers::{ChatRequest, response_schema, tool_call_codec};

/// The API requires `max_tokens`. If the agent sets none, it is the model's maximum, but at most this. Reasoning counts too.
const MAX_DEFAULT_TOKENS: u32 = 32_000;
/// The default `max_tokens` of a model whose maximum is unknown.
const FALLBACK_MAX_TOKENS: u32 = 8192;

#[derive(Serialize)]
pub struct RequestBody<'a> {
    model: &'a str,
    max_tokens: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    system: Option<System<'a>>,
    messages: Vec<MessageOut<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tools: Vec<Tool<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_choice: Option<ToolChoiceOut<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    temperature: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_p: Option<f64>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    stop_sequences: &'a [String],
    #[serde(skip_serializing_if = "Option::is_none")]
    thinking: Option<Thinking>,
    #[serde(skip_serializing_if = "Option::is_none")]
    output_config: Option<OutputConfig>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream: Option<bool>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum System<'a> {
    Text(Cow<'a, str>),
    Cached([SystemBlock<'a>; 1]),
}

#[derive(Serialize)]
struct SystemBlock<'a> {
    r#type: &'static str,
    text: Cow<'a, str>,
    cache_control: CacheControl,
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
#[serde(tag = "type", rename_all = "lowercase")]
enum ToolChoiceOut<'a> {
    Any,
    Tool { name: &'a str },
}

impl<'a> From<&'a ToolChoice> for ToolChoiceOut<'a> {
    fn from(choice: &'a ToolChoice) -> Self {
        match choice {
            ToolChoice::Required => Self::Any,
            ToolChoice::Named(name) => Self::Tool { name },
        }
    }
}

#[derive(Serialize)]
struct OutputConfig {
    #[serde(skip_serializing_if = "Option::is_none")]
    effort: Option<Effort>,
    #[serde(skip_serializing_if = "Option::is_none")]
    format: Option<OutputFormat>,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum Thinking {
    Adaptive {
        /// Without it, current models send only the signature of their reasoning.
        #[serde(skip_serializing_if = "Option::is_none")]
        display: Option<&'static str>,
    },
    Disabled,
}

#[derive(Serialize)]
struct OutputFormat {
    r#type: &'static str,
    schema: Box<RawValue>,
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

/// A plain string unless the result has attachments.
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
    pub fn new(request: &ChatRequest<'a>, origin: ReplyOrigin<'_>) -> Self {
        let params = request.params;
        let cache = CacheControl::for_request(request);
        let format = output_format(request);
        let text = system_text(request, format.is_some());
        let system = match cache {
            _ if text.is_empty() => None,
            Some(cache_control) => Some(System::Cached([SystemBlock {
                r#type: "text",
                text,
                cache_control,
            }])),
            None => Some(System::Text(text)),
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
            let is_assistant = |message: &MessageOut<'_>| message.role == "assistant";
            let mark = |message: &mut MessageOut<'_>| set_cache_breakpoint(message, cache);
            mark_request_ends(&mut messages, is_assistant, mark);
        }
        Self {
            model: request.model,
            max_tokens: params
                .max_tokens
                .unwrap_or_else(|| default_max_tokens(request)),
            system,
            messages,
            tools,
            tool_choice: request.tool_choice.map(ToolChoiceOut::from),
            temperature: params.temperature,
            top_p: params.top_p,
            stop_sequences: &params.stop,
            thinking: thinking_config(request),
            output_config: output_config(params, format),
            stream: request.stream.then_some(true),
        }
    }
}

fn set_cache_breakpoint(message: &mut MessageOut<'_>, cache: CacheControl) {
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

fn default_max_tokens(request: &ChatRequest<'_>) -> u32 {
    let max_output = request.facts.and_then(|facts| facts.max_output);
    max_output.map_or(FALLBACK_MAX_TOKENS, |max_output| {
        max_output.min(MAX_DEFAULT_TOKENS)
    })
}

/// `None` if the agent sets neither an effort nor a reasoning summary, if the model has no adaptive thinking, or if it has to
/// call a tool: the API rejects both together.
fn thinking_config(request: &ChatRequest<'_>) -> Option<Thinking> {
    let is_adaptive = match request.tool_choice {
        Some(_) => Some(false),
        None => request.facts.and_then(|facts| facts.adaptive_thinking),
    };
    let display = request.params.reasoning_summary.map(|_| "summarized");
    match request.params.effort {
        Some(Effort::None) => Some(Thinking::Disabled),
        None if display.is_none() => None,
        _ => (is_adaptive != Some(false)).then_some(Thinking::Adaptive { display }),
    }
}

/// The format of the reply; `None` for any text, for a schema that the API cannot express, or for a model without schemas.
fn output_format(request: &ChatRequest<'_>) -> Option<OutputFormat> {
    match &request.params.response_format {
        ResponseFormat::JsonSchema(schema) if takes_schema(request) => Some(OutputFormat {
            r#type: "json_schema",
            schema: response_schema::for_anthropic(schema)?,
        }),
        // The API has no mode for arbitrary JSON objects: the prompt requests one.
        _ => None,
    }
}

fn takes_schema(request: &ChatRequest<'_>) -> bool {
    let takes_schema = request.facts.and_then(|facts| facts.structured_output);
    takes_schema != Some(false)
}

/// The system prompt, with the format of the reply if that is sent nowhere else.
fn system_text<'a>(request: &ChatRequest<'a>, has_format: bool) -> Cow<'a, str> {
    match &request.params.response_format {
        ResponseFormat::JsonSchema(schema) if !has_format => {
            Cow::Owned(with_schema_prompt(request.system, schema))
        }
        ResponseFormat::JsonObject => with_json_prompt(request.system),
        ResponseFormat::JsonSchema(_) | ResponseFormat::Text => Cow::Borrowed(request.system),
    }
}

fn output_config(params: &Params, format: Option<OutputFormat>) -> Option<OutputConfig> {
    let effort = params.effort.filter(|effort| *effort != Effort::None);
    (effort.is_some() || format.is_some()).then_some(OutputConfig { effort, format })
}

fn build_messages<'a>(request: &ChatRequest<'a>, origin: ReplyOrigin<'_>) -> Vec<MessageOut<'a>> {
    let (messages, has_tools) = (request.messages, !request.tools.is_empty());
    let mut wire_messages = Vec::with_capacity(messages.len());
    let mut last_calls: &[ToolCall] = &[];
    let mut is_echoed = false;
    for message in messages {
        let (role, content) = match message {
            // Always blocks, never a plain string: a cache breakpoint must not change the bytes around it.
            Message::User { content } => ("user", Content::Blocks(user_blocks(content, request))),
            Message::Assistant(reply) => {
                last_calls = &reply.tool_calls;
                let can_send_calls = has_tools || reply.tool_calls.is_empty();
                // An echo without text and calls may be of thinking alone, which the API rejects at the end.
                let has_content = !reply.tool_calls.is_empty() || !reply.content.trim().is_empty();
                let echo = origin
                    .echo_body(reply)
                    .filter(|_| can_send_calls && has_content);
                is_echoed = echo.is_some();
                let content = match echo {
                    Some(body) => Content::Echo(with_unique_ids(body, &reply.tool_calls)),
                    None if can_send_calls => Content::Blocks(rebuild_blocks(reply)),
                    None => Content::Blocks(calls_as_text(reply)),
                };
                // The API rejects a message without content, and an empty message carries nothing.
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
                        // An echo has the id exactly as the service sent it.
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

/// Writes the tool calls as text: the API rejects tool blocks in a request without tools.
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
