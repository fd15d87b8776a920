//! The requests of OpenAI's Responses API. Pure.

use std::borrow::Cow;

use serde::Serialize;
use serde_json::value::RawValue;

use crate::domain::agent::client_additions::ToolChoice;
use crate::domain::agent::params::{Effort, ReasoningSummary};
use crate::domain::agent::response_format::ResponseFormat;
use crate::domain::content::Content as MessageContent;
use crate::domain::message::{AssistantMessage, Message, ToolCall, ToolSpec};
use crate::providers::content_parts::{self, ContentPart, DataUrl};
use crate::providers::echo::ReplyOrigin;
use crate::providers::json_prompt::JSON_PROMPT;
use crate::providers::openai_chat::request::Dialect;
use crate::providers::openai_fields::{
    CacheBreakpoint, CacheOptions, prompt_cache_key, service_tier,
};
use crate::providers::openai_models::may_reason;
use crate::providers::openai_responses::reply::echo_items;
use crate::providers::openai_service::OpenAiService;
use crate::providers::{ChatRequest, response_schema, tool_call_codec};

/// The least `max_output_tokens` that the API accepts.
const MIN_OUTPUT_TOKENS: u32 = 16;

#[derive(Serialize)]
pub struct RequestBody<'a> {
    model: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    instructions: &'a str,
    input: Vec<InputItem<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tools: Vec<Tool<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_choice: Option<ToolChoiceOut<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    temperature: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_p: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_output_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<Reasoning>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<TextConfig<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    service_tier: Option<&'static str>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    include: &'static [&'static str],
    // Always sent: by default, the service stores replies for a month.
    store: bool,
    #[serde(skip_serializing_if = "str::is_empty")]
    prompt_cache_key: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_cache_options: Option<CacheOptions>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream: Option<bool>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum ToolChoiceOut<'a> {
    Mode(&'static str),
    Function { r#type: &'static str, name: &'a str },
}

impl<'a> From<&'a ToolChoice> for ToolChoiceOut<'a> {
    fn from(choice: &'a ToolChoice) -> Self {
        match choice {
            ToolChoice::Required => Self::Mode("required"),
            ToolChoice::Named(name) => Self::Function {
                r#type: "function",
                name,
            },
        }
    }
}

#[derive(Serialize)]
struct Reasoning {
    #[serde(skip_serializing_if = "Option::is_none")]
    effort: Option<Effort>,
    #[serde(skip_serializing_if = "Option::is_none")]
    summary: Option<ReasoningSummary>,
}

#[derive(Serialize)]
struct TextConfig<'a> {
    format: OutputFormat<'a>,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum OutputFormat<'a> {
    JsonObject,
    JsonSchema {
        name: &'static str,
        schema: &'a RawValue,
        strict: bool,
    },
}

#[derive(Serialize)]
struct Tool<'a> {
    r#type: &'static str,
    name: &'a str,
    description: &'a str,
    parameters: &'a RawValue,
    // Always sent: with the service's default (true), it rejects schemas that allow additional properties.
    strict: bool,
}

#[derive(Serialize)]
#[serde(untagged)]
enum InputItem<'a> {
    Echo(Cow<'a, RawValue>),
    Built(BuiltItem<'a>),
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum BuiltItem<'a> {
    Message {
        role: &'static str,
        content: Content<'a>,
    },
    FunctionCall {
        call_id: Cow<'a, str>,
        name: Cow<'a, str>,
        arguments: &'a str,
    },
    FunctionCallOutput {
        call_id: Cow<'a, str>,
        output: Content<'a>,
    },
}

#[derive(Serialize)]
#[serde(untagged)]
enum Content<'a> {
    Text(&'a str),
    Parts(Vec<InputPart<'a>>),
    /// The text of an assistant message. Some servers accept only this form.
    Output([OutputText<'a>; 1]),
}

#[derive(Serialize)]
#[serde(tag = "type")]
enum InputPart<'a> {
    #[serde(rename = "input_text")]
    Text {
        text: Cow<'a, str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        prompt_cache_breakpoint: Option<CacheBreakpoint>,
    },
    #[serde(rename = "input_image")]
    Image {
        image_url: DataUrl<'a>,
        // The types of OpenAI's SDK require it. This is the service's default.
        detail: &'static str,
    },
    #[serde(rename = "input_file")]
    File {
        filename: &'a str,
        file_data: DataUrl<'a>,
    },
}

impl<'a> From<ContentPart<'a>> for InputPart<'a> {
    fn from(part: ContentPart<'a>) -> Self {
        match part {
            ContentPart::Text(text) => Self::Text {
                text,
                prompt_cache_breakpoint: None,
            },
            ContentPart::Image(data) => Self::Image {
                image_url: data.data_url(),
                detail: "auto",
            },
            ContentPart::File { name, data } => Self::File {
                filename: name,
                file_data: data.data_url(),
            },
        }
    }
}

impl<'a> Content<'a> {
    fn parts(parts: Vec<ContentPart<'a>>) -> Self {
        Self::Parts(parts.into_iter().map(InputPart::from).collect())
    }
}

#[derive(Serialize)]
struct OutputText<'a> {
    r#type: &'static str,
    text: &'a str,
    annotations: [(); 0],
}

impl<'a> RequestBody<'a> {
    pub fn new(request: &ChatRequest<'a>, origin: ReplyOrigin<'_>, dialect: Dialect) -> Self {
        let params = request.params;
        let may_reason = may_reason(request.model, request.facts);
        let summary = params
            .reasoning_summary
            .filter(|_| may_reason && params.effort != Some(Effort::None));
        let mut input = input_items(request, origin);
        let breakpoint = CacheBreakpoint::after_system(request);
        if breakpoint.is_some() {
            // `instructions` cannot have a breakpoint.
            let text = InputPart::Text {
                text: request.system.into(),
                prompt_cache_breakpoint: breakpoint,
            };
            let message = BuiltItem::Message {
                role: "developer",
                content: Content::Parts(vec![text]),
            };
            input.insert(0, InputItem::Built(message));
        }
        if dialect.needs_json_prompt()
            && matches!(params.response_format, ResponseFormat::JsonObject)
        {
            // The service does not look for the word in `instructions`.
            let message = BuiltItem::Message {
                role: "developer",
                content: Content::Text(JSON_PROMPT),
            };
            input.insert(0, InputItem::Built(message));
        }
        Self {
            model: request.model,
            instructions: match breakpoint.is_some() {
                true => "",
                false => request.system,
            },
            input,
            tools: request.tools.iter().map(Tool::from).collect(),
            tool_choice: request.tool_choice.map(ToolChoiceOut::from),
            temperature: params.temperature,
            top_p: params.top_p,
            max_output_tokens: params
                .max_tokens
                .map(|tokens| tokens.max(MIN_OUTPUT_TOKENS)),
            reasoning: (params.effort.is_some() || summary.is_some()).then_some(Reasoning {
                effort: params.effort,
                summary,
            }),
            text: match &params.response_format {
                ResponseFormat::Text => None,
                ResponseFormat::JsonObject => Some(OutputFormat::JsonObject),
                ResponseFormat::JsonSchema(schema) => Some(OutputFormat::JsonSchema {
                    name: "reply",
                    schema,
                    strict: response_schema::is_strict(schema),
                }),
            }
            .map(|format| TextConfig { format }),
            service_tier: service_tier(params),
            include: match may_reason {
                true => &["reasoning.encrypted_content"],
                false => &[],
            },
            store: false,
            prompt_cache_key: match dialect.service {
                OpenAiService::Xai => request.conversation_id,
                _ => prompt_cache_key(request.cache_key),
            },
            prompt_cache_options: CacheOptions::for_request(request),
            stream: request.stream.then_some(true),
        }
    }
}

impl<'a> From<&'a ToolSpec> for Tool<'a> {
    fn from(tool: &'a ToolSpec) -> Self {
        Self {
            r#type: "function",
            name: &tool.name,
            description: &tool.description,
            parameters: &tool.parameters,
            strict: false,
        }
    }
}

fn input_items<'a>(request: &ChatRequest<'a>, origin: ReplyOrigin<'_>) -> Vec<InputItem<'a>> {
    let mut items = Vec::with_capacity(request.messages.len());
    let mut last_calls: &[ToolCall] = &[];
    for message in request.messages {
        match message {
            Message::User { content } => items.push(InputItem::Built(BuiltItem::Message {
                role: "user",
                content: match content {
                    MessageContent::Text(text) => Content::Text(text),
                    MessageContent::Parts(parts) => {
                        Content::parts(content_parts::user_parts(parts, request))
                    }
                },
            })),
            Message::Assistant(reply) => {
                last_calls = &reply.tool_calls;
                let echo = origin.echo_body(reply);
                match echo.and_then(|body| echo_items(body, &reply.tool_calls)) {
                    Some(echo) => items.extend(echo.into_iter().map(InputItem::Echo)),
                    None => items.extend(rebuild_items(reply).map(InputItem::Built)),
                }
            }
            Message::Tool { tool_results } => {
                items.extend(tool_results.iter().enumerate().map(|(index, result)| {
                    let call = tool_call_codec::find_call(last_calls, index, result);
                    let id = call.map_or(&result.call_id, |call| &call.id);
                    InputItem::Built(BuiltItem::FunctionCallOutput {
                        call_id: tool_call_codec::short_id(id),
                        output: match content_parts::result_parts(result, request) {
                            parts if parts.is_empty() => Content::Text(&result.content),
                            parts => Content::parts(parts),
                        },
                    })
                }));
            }
        }
    }
    items
}

/// Builds an assistant message from text and tool calls; no items if it has neither.
fn rebuild_items(reply: &AssistantMessage) -> impl Iterator<Item = BuiltItem<'_>> {
    let text = (!reply.content.is_empty()).then(|| BuiltItem::Message {
        role: "assistant",
        content: Content::Output([OutputText {
            r#type: "output_text",
            text: &reply.content,
            annotations: [],
        }]),
    });
    let calls = reply.tool_calls.iter().map(|call| BuiltItem::FunctionCall {
        call_id: tool_call_codec::short_id(&call.id),
        name: tool_call_codec::sanitize_name(&call.name),
        arguments: call.arguments.get(),
    });
    text.into_iter().chain(calls)
}
