//! The requests of OpenAI's chat API. Pure.

use std::borrow::Cow;

use serde::Serialize;
use serde_json::value::RawValue;

use crate::domain::agent::client_additions::ToolChoice;
use crate::domain::agent::params::Effort;
use crate::domain::agent::response_format::ResponseFormat;
use crate::domain::content::Content as MessageContent;
use crate::domain::message::{AssistantMessage, Message, ToolCall, ToolSpec};
use crate::providers::cache_control::{CacheControl, mark_request_ends};
use crate::providers::content_parts::{self, ContentPart, DataUrl};
use crate::providers::echo::ReplyOrigin;
use crate::providers::json_prompt::{with_json_prompt, with_schema_prompt};
use crate::providers::openai_chat::echo_payload::{EchoPayload, Reasoning};
use crate::providers::openai_fields::{
    CacheBreakpoint, CacheOptions, prompt_cache_key, service_tier,
};
use crate::providers::openai_service::OpenAiService;
use crate::providers::{ChatRequest, response_schema, tool_call_codec};

/// How the requests to one service differ from those to another.
#[derive(Clone, Copy)]
pub struct Dialect {
    pub service: OpenAiService,
    pub max_tokens_field: MaxTokensField,
    /// Whether the models are OpenAI's: of a service with its rules, or of a provider with its name at another address.
    pub serves_openai: bool,
}

impl Dialect {
    /// Whether the service refuses the format `json_object`, or answers it with blanks, unless the prompt mentions JSON.
    pub fn needs_json_prompt(self) -> bool {
        self.serves_openai || self.service.needs_json_prompt()
    }

    /// Mistral has rules for the order of messages and for ids, and takes no options of a stream.
    fn has_mistral_rules(self) -> bool {
        self.service == OpenAiService::Mistral
    }

    /// How the final text's format is requested.
    fn output_format<'a>(self, request: &ChatRequest<'a>) -> OutputFormat<'a> {
        // Groq refuses a format together with tools, and a schema together with a stream.
        let is_groq = self.service == OpenAiService::Groq;
        let allows_format = !is_groq || request.tools.is_empty();
        let object = match allows_format {
            true => OutputFormat::Object,
            false => OutputFormat::Prompt,
        };
        match &request.params.response_format {
            ResponseFormat::Text => OutputFormat::Text,
            ResponseFormat::JsonObject => object,
            ResponseFormat::JsonSchema(schema) if self.takes_schema(request) && allows_format => {
                OutputFormat::Schema(schema)
            }
            ResponseFormat::JsonSchema(schema) if response_schema::is_of_object(schema) => object,
            ResponseFormat::JsonSchema(_) => OutputFormat::Prompt,
        }
    }

    fn takes_schema(self, request: &ChatRequest<'_>) -> bool {
        let is_known = request.facts.and_then(|facts| facts.structured_output);
        is_known.unwrap_or_else(|| match self.service {
            OpenAiService::DeepSeek => false,
            OpenAiService::Groq => request.model.contains("gpt-oss") && !request.stream,
            _ => true,
        })
    }

    /// The mark for the parts of the prompt to cache; `None` if the service caches on its own.
    fn cache_control(self, request: &ChatRequest<'_>) -> Option<CacheControl> {
        let is_claude =
            self.service == OpenAiService::OpenRouter && request.model.contains("claude");
        CacheControl::for_request(request).filter(|_| is_claude)
    }

    fn call_id(self, id: &str) -> Cow<'_, str> {
        if self.has_mistral_rules() {
            tool_call_codec::mistral_id(id)
        } else {
            Cow::Borrowed(id)
        }
    }
}

/// Google documents this for calls that have no signature of the model's own.
const NO_SIGNATURE: &str = r#"{"google":{"thought_signature":"skip_thought_signature_validator"}}"#;

/// The field for the maximum length of a reply. OpenAI deprecated `max_tokens`; other servers know only that.
#[derive(Clone, Copy)]
pub enum MaxTokensField {
    MaxTokens,
    MaxCompletionTokens,
}

#[derive(Serialize)]
pub struct RequestBody<'a> {
    model: &'a str,
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
    stop: &'a [String],
    #[serde(skip_serializing_if = "Option::is_none")]
    max_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_completion_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_effort: Option<Effort>,
    #[serde(skip_serializing_if = "Option::is_none")]
    response_format: Option<FormatOut<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    service_tier: Option<&'static str>,
    #[serde(skip_serializing_if = "str::is_empty")]
    prompt_cache_key: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_cache_options: Option<CacheOptions>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream_options: Option<StreamOptions>,
}

#[derive(Serialize)]
struct StreamOptions {
    include_usage: bool,
}

/// The format of the final text.
#[derive(Clone, Copy)]
enum OutputFormat<'a> {
    Text,
    /// A JSON object; the prompt says which.
    Object,
    Schema(&'a RawValue),
    /// The prompt alone requests it.
    Prompt,
}

impl<'a> OutputFormat<'a> {
    fn parameter(self) -> Option<FormatOut<'a>> {
        match self {
            Self::Text | Self::Prompt => None,
            Self::Object => Some(FormatOut::JsonObject),
            Self::Schema(schema) => Some(FormatOut::JsonSchema {
                json_schema: Schema {
                    name: "reply",
                    schema,
                    strict: response_schema::is_strict(schema),
                },
            }),
        }
    }
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum FormatOut<'a> {
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
        content: Content<'a>,
    },
    User {
        content: Content<'a>,
    },
    Assistant {
        content: AssistantContent<'a>,
        #[serde(flatten)]
        reasoning: Reasoning<'a>,
        #[serde(skip_serializing_if = "Vec::is_empty")]
        tool_calls: Vec<CallOut<'a>>,
    },
    Tool {
        tool_call_id: Cow<'a, str>,
        content: Content<'a>,
    },
}

#[derive(Serialize)]
#[serde(untagged)]
enum AssistantContent<'a> {
    Text(Option<&'a str>),
    /// The chunks that Mistral sent, with its thinking.
    Chunks(&'a RawValue),
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

    /// Appends another content.
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
            Self::Text(text) => vec![PartOut::text(text)],
            Self::Parts(parts) => parts,
        }
    }

    fn make_parts(&mut self) {
        let content = std::mem::replace(self, Self::Parts(Vec::new()));
        *self = Self::Parts(content.parts());
    }

    /// The last text, as a part.
    fn last_text(&mut self) -> Option<&mut TextPart<'a>> {
        self.make_parts();
        let Self::Parts(parts) = self else {
            return None;
        };
        let mut texts = parts.iter_mut().rev().filter_map(|part| match part {
            PartOut::Text(text) if !text.text.is_empty() => Some(text),
            _ => None,
        });
        texts.next()
    }
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum PartOut<'a> {
    Text(TextPart<'a>),
    ImageUrl { image_url: ImageUrl<'a> },
    File { file: FileOut<'a> },
}

#[derive(Serialize)]
struct TextPart<'a> {
    text: Cow<'a, str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cache_control: Option<CacheControl>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_cache_breakpoint: Option<CacheBreakpoint>,
}

impl<'a> PartOut<'a> {
    fn text(text: Cow<'a, str>) -> Self {
        Self::Text(TextPart {
            text,
            cache_control: None,
            prompt_cache_breakpoint: None,
        })
    }
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
            ContentPart::Text(text) => Self::text(text),
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
    id: Cow<'a, str>,
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
#[serde(untagged)]
enum ToolChoiceOut<'a> {
    Mode(&'static str),
    Function {
        r#type: &'static str,
        function: FunctionName<'a>,
    },
}

#[derive(Serialize)]
struct FunctionName<'a> {
    name: &'a str,
}

impl<'a> From<&'a ToolChoice> for ToolChoiceOut<'a> {
    fn from(choice: &'a ToolChoice) -> Self {
        match choice {
            ToolChoice::Required => Self::Mode("required"),
            ToolChoice::Named(name) => Self::Function {
                r#type: "function",
                function: FunctionName { name },
            },
        }
    }
}

#[derive(Serialize)]
struct FunctionSpec<'a> {
    name: &'a str,
    description: &'a str,
    parameters: &'a RawValue,
}

impl<'a> RequestBody<'a> {
    pub fn new(request: &ChatRequest<'a>, origin: ReplyOrigin<'_>, dialect: Dialect) -> Self {
        let params = request.params;
        let (max_tokens, max_completion_tokens) = match dialect.max_tokens_field {
            MaxTokensField::MaxTokens => (params.max_tokens, None),
            MaxTokensField::MaxCompletionTokens => (None, params.max_tokens),
        };
        let format = dialect.output_format(request);
        let mut messages = build_messages(request, origin, dialect, format);
        fill_required_fields(&mut messages, dialect);
        if let Some(cache) = dialect.cache_control(request) {
            mark_cached_parts(&mut messages, cache);
        }
        Self {
            model: request.model,
            messages,
            tools: request.tools.iter().map(Tool::from).collect(),
            tool_choice: request.tool_choice.map(ToolChoiceOut::from),
            temperature: params.temperature,
            top_p: params.top_p,
            stop: &params.stop,
            max_tokens,
            max_completion_tokens,
            reasoning_effort: params.effort,
            response_format: format.parameter(),
            service_tier: service_tier(params),
            prompt_cache_key: match dialect.service.takes_cache_key() {
                true => prompt_cache_key(request.cache_key),
                false => "",
            },
            prompt_cache_options: match dialect.serves_openai {
                true => CacheOptions::for_request(request),
                false => None,
            },
            stream: request.stream.then_some(true),
            // Mistral rejects the options, and sends the usage without them.
            stream_options: (request.stream && !dialect.has_mistral_rules()).then_some(
                StreamOptions {
                    include_usage: true,
                },
            ),
        }
    }
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

fn build_messages<'a>(
    request: &ChatRequest<'a>,
    origin: ReplyOrigin<'_>,
    dialect: Dialect,
    format: OutputFormat<'_>,
) -> Vec<MessageOut<'a>> {
    let mut messages = Vec::with_capacity(request.messages.len() + 1);
    let system = system_text(request, dialect, format);
    if !system.is_empty() {
        let mut content = Content::Text(system);
        let breakpoint = CacheBreakpoint::after_system(request);
        if let Some(breakpoint) = breakpoint.filter(|_| dialect.serves_openai)
            && let Some(text) = content.last_text()
        {
            text.prompt_cache_breakpoint = Some(breakpoint);
        }
        messages.push(MessageOut::System { content });
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
                push_user(&mut messages, content, dialect);
            }
            Message::Assistant(reply) => {
                last_calls = &reply.tool_calls;
                // Mistral and others reject a message without content, and an empty message carries nothing.
                if !reply.content.is_empty() || !reply.tool_calls.is_empty() {
                    messages.push(assistant_message(reply, origin, dialect));
                }
            }
            Message::Tool { tool_results } => {
                for (index, result) in tool_results.iter().enumerate() {
                    let call = tool_call_codec::find_call(last_calls, index, result);
                    let id = call.map_or(&result.call_id, |call| &call.id);
                    messages.push(MessageOut::Tool {
                        tool_call_id: dialect.call_id(id),
                        content: Content::Text((&result.content).into()),
                    });
                }
                // A message with the role `tool` takes only text.
                let attachments = content_parts::result_attachment_parts(tool_results, request);
                if !attachments.is_empty() {
                    push_user(&mut messages, Content::of(attachments), dialect);
                }
            }
        }
    }
    messages
}

/// The system prompt, with the format of the reply as far as no parameter has it.
fn system_text<'a>(
    request: &ChatRequest<'a>,
    dialect: Dialect,
    format: OutputFormat<'_>,
) -> Cow<'a, str> {
    match (&request.params.response_format, format) {
        (ResponseFormat::JsonSchema(schema), OutputFormat::Object | OutputFormat::Prompt) => {
            with_schema_prompt(request.system, schema).into()
        }
        (_, OutputFormat::Object) if dialect.needs_json_prompt() => {
            with_json_prompt(request.system)
        }
        (_, OutputFormat::Prompt) => with_json_prompt(request.system),
        _ => Cow::Borrowed(request.system),
    }
}

/// Marks the system prompt, and with it the tools, which come first, and the ends of this and of the previous request. Every
/// message is written in parts, marked or not, so that it is the same in all requests.
fn mark_cached_parts(messages: &mut [MessageOut<'_>], cache: CacheControl) {
    for message in messages.iter_mut() {
        match message {
            MessageOut::System { content } => mark(content, cache),
            MessageOut::User { content } | MessageOut::Tool { content, .. } => content.make_parts(),
            MessageOut::Assistant { .. } => {}
        }
    }
    let is_assistant = |message: &MessageOut<'_>| matches!(message, MessageOut::Assistant { .. });
    mark_request_ends(messages, is_assistant, |message| match message {
        MessageOut::User { content } | MessageOut::Tool { content, .. } => mark(content, cache),
        MessageOut::System { .. } | MessageOut::Assistant { .. } => {}
    });
}

fn mark(content: &mut Content<'_>, cache: CacheControl) {
    if let Some(text) = content.last_text() {
        text.cache_control = Some(cache);
    }
}

/// Adds a user message, merged into a preceding one: a summary may follow the task, and the templates of some models
/// (Mistral, Gemma) reject two user messages in a row.
fn push_user<'a>(messages: &mut Vec<MessageOut<'a>>, content: Content<'a>, dialect: Dialect) {
    let content = match messages.pop() {
        Some(MessageOut::User { content: before }) => before.and(content),
        other => {
            messages.extend(other);
            content
        }
    };
    // Mistral rejects a user message after a tool result.
    if dialect.has_mistral_rules() && matches!(messages.last(), Some(MessageOut::Tool { .. })) {
        messages.push(MessageOut::Assistant {
            content: AssistantContent::Text(Some("OK.")),
            reasoning: Reasoning::default(),
            tool_calls: Vec::new(),
        });
    }
    messages.push(MessageOut::User { content });
}

/// Adds the fields that the service requires in every reply.
fn fill_required_fields(messages: &mut [MessageOut<'_>], dialect: Dialect) {
    for message in messages {
        let MessageOut::Assistant {
            reasoning,
            tool_calls,
            ..
        } = message
        else {
            continue;
        };
        // In a reply that another model wrote before a fallback, too.
        if dialect.service == OpenAiService::DeepSeek {
            reasoning.fill_missing();
        }
        // Gemini itself signs only the first of parallel calls.
        if dialect.service == OpenAiService::Gemini
            && let Some(call) = tool_calls.first_mut()
            && call.extra_content.is_none()
        {
            call.extra_content = serde_json::from_str(NO_SIGNATURE).ok();
        }
    }
}

fn assistant_message<'a>(
    reply: &'a AssistantMessage,
    origin: ReplyOrigin<'_>,
    dialect: Dialect,
) -> MessageOut<'a> {
    let mut payload = origin
        .echo_body(reply)
        .map(EchoPayload::parse)
        .unwrap_or_default();
    if let Some(other) = origin.foreign_echo_body(reply) {
        payload.reasoning = EchoPayload::parse(other)
            .reasoning
            .placeholder(!reply.tool_calls.is_empty());
    }
    let tool_calls = reply
        .tool_calls
        .iter()
        .enumerate()
        .map(|(index, call)| CallOut {
            id: dialect.call_id(&call.id),
            r#type: "function",
            function: FunctionOut {
                name: tool_call_codec::sanitize_name(&call.name),
                arguments: call.arguments.get(),
            },
            extra_content: payload.extra_content.get(index).copied().flatten(),
        });
    MessageOut::Assistant {
        content: match (payload.content, reply.content.as_str()) {
            (Some(chunks), _) => AssistantContent::Chunks(chunks),
            (None, "") if !reply.tool_calls.is_empty() => AssistantContent::Text(None),
            (None, text) => AssistantContent::Text(Some(text)),
        },
        tool_calls: tool_calls.collect(),
        reasoning: payload.reasoning,
    }
}
