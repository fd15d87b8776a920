//! The requests of OpenAI's chat API. Pure.

use std::borrow::Cow;

use serde::Serialize;
use serde_json::value::RawValue;

use crate::domain::agent::client_additions::ToolChoice;
use crate::domain::agent::params::Effort;
use crate::domain::agent::response_format::ResponseFormat;
use crate::domain::content::Content as MessageContent;
use crate::domain::message::{AssistantMessage, Message, ToolCall, ToolSpec};
use crate::providers::content_parts::{self, ContentPart, DataUrl};
use crate::providers::echo::ReplyOrigin;
use crate::providers::json_prompt::with_json_prompt;
use crate::providers::openai_chat::echo_payload::{EchoPayload, Reasoning};
use crate::providers::openai_fields::service_tier;
use crate::providers::{ChatRequest, response_schema, tool_call_codec};

/// How the requests to one service differ from those to another.
#[derive(Clone, Copy)]
pub struct Dialect {
    pub max_tokens_field: MaxTokensField,
    /// Whether every assistant message needs a reasoning field, even if it has no reasoning.
    pub wants_reasoning: bool,
    /// Whether the first tool call of every assistant message needs a signature, even if another model made it.
    pub wants_signatures: bool,
    /// Whether the service has Mistral's rules: for the order of messages, for ids, and no options of a stream.
    pub has_mistral_rules: bool,
    /// Whether the service refuses the format `json_object` unless the prompt mentions JSON.
    pub needs_json_prompt: bool,
}

impl Dialect {
    fn call_id(self, id: &str) -> Cow<'_, str> {
        if self.has_mistral_rules {
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
        content: Cow<'a, str>,
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
        tool_call_id: Cow<'a, str>,
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
        let mut messages = build_messages(request, origin, dialect);
        fill_required_fields(&mut messages, dialect);
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
            response_format: match &params.response_format {
                ResponseFormat::Text => None,
                ResponseFormat::JsonObject => Some(OutputFormat::JsonObject),
                ResponseFormat::JsonSchema(schema) => Some(OutputFormat::JsonSchema {
                    json_schema: Schema {
                        name: "reply",
                        schema,
                        strict: response_schema::is_strict(schema),
                    },
                }),
            },
            service_tier: service_tier(params),
            stream: request.stream.then_some(true),
            // Mistral rejects the options, and sends the usage without them.
            stream_options: (request.stream && !dialect.has_mistral_rules).then_some(
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
) -> Vec<MessageOut<'a>> {
    let mut messages = Vec::with_capacity(request.messages.len() + 1);
    let system = system_text(request, dialect);
    if !system.is_empty() {
        messages.push(MessageOut::System { content: system });
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
                        content: &result.content,
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

fn system_text<'a>(request: &ChatRequest<'a>, dialect: Dialect) -> Cow<'a, str> {
    let is_object = matches!(request.params.response_format, ResponseFormat::JsonObject);
    match is_object && dialect.needs_json_prompt {
        true => with_json_prompt(request.system),
        false => Cow::Borrowed(request.system),
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
    if dialect.has_mistral_rules && matches!(messages.last(), Some(MessageOut::Tool { .. })) {
        messages.push(MessageOut::Assistant {
            content: Some("OK."),
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
        if dialect.wants_reasoning {
            reasoning.fill_missing();
        }
        // Gemini itself signs only the first of parallel calls.
        if dialect.wants_signatures
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
        content: match reply.content.as_str() {
            "" if !reply.tool_calls.is_empty() => None,
            text => Some(text),
        },
        tool_calls: tool_calls.collect(),
        reasoning: payload.reasoning,
    }
}
