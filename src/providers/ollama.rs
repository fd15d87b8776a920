//! Ollama's chat API (`POST /api/chat`, <https://docs.ollama.com/api/chat>): requests, replies and the NDJSON stream.

use std::borrow::Cow;

use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};

use crate::config;
use crate::domain::agent::params::Effort;
use crate::domain::agent::response_format::ResponseFormat;
use crate::domain::content::Content;
use crate::domain::message::{AssistantMessage, Message, ToolCall, ToolSpec};
use crate::domain::usage::TokenUsage;
use crate::providers::call_pieces::{CallPiece, CallPieces};
use crate::providers::content_parts::{self, Base64, ContentPart};
use crate::providers::echo::ReplyOrigin;
use crate::providers::endpoint::Endpoint;
use crate::providers::http_client::base_url::BaseUrl;
use crate::providers::http_client::headers::KeyHeader;
use crate::providers::http_client::{BodyPart, HttpClient, PartError};
use crate::providers::reply_builder::{ReplyBuilder, append};
use crate::providers::setup_error::SetupError;
use crate::providers::stop_reason::{self, ReplyContent};
use crate::providers::stream_decoder::StreamFormat;
use crate::providers::token_counts::{self, Lenient, TokenCount, TokenCounts};
use crate::providers::{
    ChatRequest, Delta, Provider, ProviderError, Reply, tool_call_codec, wire_json,
};

const DEFAULT_BASE_URL: &str = "http://localhost:11434";

pub struct Ollama {
    endpoint: Endpoint<OllamaReplyBuilder>,
}

impl Ollama {
    pub fn new(service_id: String, config: &config::Provider) -> Result<Self, SetupError> {
        let base = BaseUrl::parse(config.base_url.as_deref().unwrap_or(DEFAULT_BASE_URL))?;
        let refused_message =
            format!("connection refused: is Ollama running? (expected at {base})");
        let client = HttpClient::new(config, &base, "/api/chat", KeyHeader::Bearer)?;
        let client = client.with_refused_message(refused_message);
        let endpoint = Endpoint::new(client, service_id);
        Ok(Self { endpoint })
    }

    pub fn endpoint(&self) -> &Endpoint<OllamaReplyBuilder> {
        &self.endpoint
    }
}

impl Provider for Ollama {
    fn complete<'a>(
        &'a self,
        request: ChatRequest<'a>,
        deltas: &'a mut (dyn FnMut(Delta<'_>) + Send),
    ) -> BoxFuture<'a, Result<Reply, ProviderError>> {
        let body = RequestBody::new(&request, self.endpoint.origin(request.model));
        self.endpoint.complete(&body, &request, deltas)
    }

    fn cut_prompt_warning(&self, request: &ChatRequest<'_>, reply: &Reply) -> Option<String> {
        let read = reply.usage?.input;
        let (limit, is_cut) = match num_ctx(request) {
            Some(limit) => (limit, read >= limit),
            None => (read, DEFAULT_CONTEXTS.contains(&read)),
        };
        is_cut.then(|| {
            let model = request.model;
            format!(
                "Ollama has read only {read} tokens of the prompt, as many as the context of {model} holds: its beginning \
                 may be cut off; raise num_ctx (now {limit}) in [params.extra] options of the agent, or \
                 OLLAMA_CONTEXT_LENGTH of the server"
            )
        })
    }
}

/// The context of a model if nothing sets it: of older servers, and of servers with little, more and much memory.
const DEFAULT_CONTEXTS: [u64; 4] = [2048, 4096, 32_768, 262_144];

/// The length of the context that the request sets, in tokens.
fn num_ctx(request: &ChatRequest<'_>) -> Option<u64> {
    let model_extra = request.facts.map(|facts| &facts.extra);
    let extras = [Some(&request.params.extra), model_extra];
    let mut extras = extras.into_iter().flatten();
    extras.find_map(|extra| extra.get("options")?.get("num_ctx")?.as_u64())
}

#[derive(Serialize)]
struct RequestBody<'a> {
    model: &'a str,
    messages: Vec<MessageOut<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tools: Vec<Tool<'a>>,
    // Always sent: Ollama streams by default.
    stream: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    format: Option<OutputFormat<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    think: Option<Think>,
    #[serde(skip_serializing_if = "Options::is_empty")]
    options: Options<'a>,
}

/// Whether the model reasons, or at which level.
#[derive(Serialize)]
#[serde(untagged)]
enum Think {
    Flag(bool),
    Level(&'static str),
}

impl Think {
    /// Ollama has three levels, and rejects them for models that have none.
    fn new(effort: Effort, request: &ChatRequest<'_>) -> Self {
        let levels = request.facts.and_then(|facts| facts.effort.as_ref());
        let has_levels = levels.map_or(request.model.contains("gpt-oss"), |it| !it.is_empty());
        match effort {
            Effort::None => Self::Flag(false),
            _ if !has_levels => Self::Flag(true),
            Effort::Minimal | Effort::Low => Self::Level("low"),
            Effort::Medium => Self::Level("medium"),
            Effort::High | Effort::Xhigh | Effort::Max => Self::Level("high"),
        }
    }
}

#[derive(Serialize)]
struct Options<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    temperature: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    num_predict: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_p: Option<f64>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    stop: &'a [String],
}

impl Options<'_> {
    fn is_empty(&self) -> bool {
        self.temperature.is_none()
            && self.num_predict.is_none()
            && self.top_p.is_none()
            && self.stop.is_empty()
    }
}

#[derive(Serialize)]
#[serde(untagged)]
enum OutputFormat<'a> {
    Name(&'static str),
    Schema(&'a RawValue),
}

#[derive(Serialize)]
#[serde(tag = "role", rename_all = "lowercase")]
enum MessageOut<'a> {
    System {
        content: &'a str,
    },
    User {
        content: Cow<'a, str>,
        #[serde(skip_serializing_if = "Vec::is_empty")]
        images: Vec<Base64<'a>>,
    },
    Assistant {
        content: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        thinking: Option<&'a RawValue>,
        #[serde(skip_serializing_if = "Vec::is_empty")]
        tool_calls: Vec<CallOut<'a>>,
    },
    Tool {
        content: &'a str,
        tool_name: &'a str,
    },
}

#[derive(Serialize)]
struct CallOut<'a> {
    function: FunctionOut<'a>,
}

#[derive(Serialize)]
struct FunctionOut<'a> {
    name: &'a str,
    arguments: &'a RawValue,
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

impl<'a> RequestBody<'a> {
    fn new(request: &ChatRequest<'a>, origin: ReplyOrigin<'_>) -> Self {
        let params = request.params;
        Self {
            model: request.model,
            messages: build_messages(request, origin),
            tools: request.tools.iter().map(Tool::from).collect(),
            stream: request.stream,
            format: match &params.response_format {
                ResponseFormat::Text => None,
                ResponseFormat::JsonObject => Some(OutputFormat::Name("json")),
                ResponseFormat::JsonSchema(schema) => Some(OutputFormat::Schema(schema)),
            },
            think: params.effort.map(|effort| Think::new(effort, request)),
            options: Options {
                temperature: params.temperature,
                num_predict: params.max_tokens,
                top_p: params.top_p,
                stop: &params.stop,
            },
        }
    }
}

fn build_messages<'a>(request: &ChatRequest<'a>, origin: ReplyOrigin<'_>) -> Vec<MessageOut<'a>> {
    let mut messages = Vec::with_capacity(request.messages.len() + 1);
    if !request.system.is_empty() {
        messages.push(MessageOut::System {
            content: request.system,
        });
    }
    let mut last_calls: &[ToolCall] = &[];
    for message in request.messages {
        match message {
            Message::User { content } => messages.push(match content {
                Content::Text(text) => MessageOut::User {
                    content: Cow::Borrowed(text),
                    images: Vec::new(),
                },
                Content::Parts(parts) => user_message(content_parts::user_parts(parts, request)),
            }),
            Message::Assistant(reply) => {
                last_calls = &reply.tool_calls;
                messages.push(MessageOut::Assistant {
                    content: &reply.content,
                    thinking: origin
                        .echo_body(reply)
                        .and_then(|body| serde_json::from_str::<Thinking<'_>>(body.get()).ok())
                        .map(|echo| echo.thinking),
                    tool_calls: reply.tool_calls.iter().map(call_out).collect(),
                });
            }
            Message::Tool { tool_results } => {
                for (index, result) in tool_results.iter().enumerate() {
                    let call = tool_call_codec::find_call(last_calls, index, result);
                    messages.push(MessageOut::Tool {
                        content: &result.content,
                        tool_name: call.map_or("", |call| &call.name),
                    });
                }
                // Models' templates ignore the images of messages with the role `tool`.
                let attachments = content_parts::result_attachment_parts(tool_results, request);
                if !attachments.is_empty() {
                    messages.push(user_message(attachments));
                }
            }
        }
    }
    messages
}

/// A user message. The API takes text and images in separate fields, and takes no files.
fn user_message(parts: Vec<ContentPart<'_>>) -> MessageOut<'_> {
    let (mut texts, mut images) = (Vec::new(), Vec::new());
    for part in parts {
        match part {
            ContentPart::Text(text) => texts.push(text),
            ContentPart::Image(data) => images.push(data.base64()),
            ContentPart::File { name, data } => texts.push(Cow::Owned(format!(
                "[file: {name}, {}, left out: Ollama takes no files]",
                data.media_type
            ))),
        }
    }
    MessageOut::User {
        content: Cow::Owned(texts.join("\n\n")),
        images,
    }
}

fn call_out(call: &ToolCall) -> CallOut<'_> {
    CallOut {
        function: FunctionOut {
            name: &call.name,
            arguments: &call.arguments,
        },
    }
}

/// The body of an echo: the reasoning of an assistant message.
#[derive(Serialize, Deserialize)]
struct Thinking<'a> {
    #[serde(borrow)]
    thinking: &'a RawValue,
}

/// One line of a stream, or a whole reply: they have the same fields.
#[derive(Deserialize)]
struct ResponseLine<'a> {
    model: Option<String>,
    #[serde(borrow)]
    message: Option<MessageIn<'a>>,
    done: Option<bool>,
    done_reason: Option<String>,
    #[serde(default)]
    prompt_eval_count: TokenCount,
    #[serde(default)]
    eval_count: TokenCount,
}

#[derive(Deserialize)]
struct MessageIn<'a> {
    content: Option<String>,
    thinking: Option<String>,
    #[serde(borrow)]
    tool_calls: Option<Vec<CallIn<'a>>>,
}

#[derive(Deserialize)]
struct CallIn<'a> {
    id: Option<String>,
    #[serde(borrow)]
    function: Option<FunctionIn<'a>>,
}

#[derive(Deserialize)]
struct FunctionIn<'a> {
    #[serde(default)]
    index: Lenient<u64>,
    name: Option<String>,
    #[serde(borrow)]
    arguments: Option<&'a RawValue>,
}

/// The usage fields of a line that failed to parse for another reason.
#[derive(Deserialize)]
struct UsageLine {
    #[serde(default)]
    done: Lenient<bool>,
    #[serde(default)]
    prompt_eval_count: TokenCount,
    #[serde(default)]
    eval_count: TokenCount,
}

#[derive(Default)]
pub struct OllamaReplyBuilder {
    text: String,
    thinking: String,
    calls: CallPieces,
    usage: Option<TokenUsage>,
    is_finished: bool,
    stop_reason: Option<String>,
    model: Option<String>,
}

impl ReplyBuilder for OllamaReplyBuilder {
    const FORMAT: StreamFormat = StreamFormat::Ndjson;

    fn push_part(
        &mut self,
        part: BodyPart<'_>,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<bool, PartError> {
        match part {
            BodyPart::Document(text) => self.push_line(text, true, deltas),
            BodyPart::Message { data, .. } => self.push_line(data, false, deltas),
            BodyPart::Done | BodyPart::End => Ok(self.is_finished),
        }
    }

    fn has_final_usage(&self) -> bool {
        self.is_finished && self.usage.is_some()
    }

    fn finish(self, origin: ReplyOrigin<'_>) -> Result<Reply, ProviderError> {
        // Older servers send `done` without a reason.
        let reason = match self.stop_reason.as_deref() {
            None if self.is_finished => Some("stop"),
            reason => reason,
        };
        let content = ReplyContent {
            has_text: !self.text.is_empty(),
            has_calls: !self.calls.is_empty(),
            is_refused: false,
        };
        let end = stop_reason::outcome(reason, content)?;
        let calls = self.calls.finish(stop_reason::limit(reason)).enumerate();
        let calls = calls.map(|(position, (call, _))| ToolCall {
            // Ollama's own ids are random, and later requests do not need them.
            id: format!("ollama_{position}"),
            ..call
        });
        let thinking = match self.thinking.is_empty() {
            true => None,
            false => to_raw_value(&self.thinking).ok(),
        };
        let echo = thinking.and_then(|thinking| {
            let body = Thinking {
                thinking: &thinking,
            };
            origin.echo(&body)
        });
        Ok(Reply {
            message: AssistantMessage {
                content: self.text,
                tool_calls: calls.collect(),
                echo,
            },
            usage: self.usage,
            stop_reason: self.stop_reason,
            model: self.model,
            outcome: end,
            refusal: None,
        })
    }
}

impl OllamaReplyBuilder {
    /// Adds one line. Returns whether it was the last.
    fn push_line(
        &mut self,
        text: &str,
        is_whole: bool,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<bool, PartError> {
        let line: ResponseLine<'_> = wire_json::parse(text).inspect_err(|_| {
            if let Ok(usage) = wire_json::parse::<UsageLine>(text) {
                self.set_usage(usage.prompt_eval_count, usage.eval_count, deltas);
                self.is_finished = usage.done.0 == Some(true);
            }
        })?;
        if let Some(message) = line.message {
            if let Some(content) = message.content.filter(|content| !content.is_empty()) {
                deltas(Delta::Text(&content));
                append(&mut self.text, content);
            }
            if let Some(thinking) = message.thinking.filter(|text| !text.is_empty()) {
                deltas(Delta::Reasoning(&thinking));
                append(&mut self.thinking, thinking);
            }
            self.calls.begin_message();
            for call in message.tool_calls.into_iter().flatten() {
                let piece = match call.function {
                    Some(function) => CallPiece::new(function.index.0, call.id, function.name)
                        .with_arguments(function.arguments),
                    None => CallPiece::new(None, call.id, None),
                };
                match is_whole {
                    true => self.calls.push_new(piece)?,
                    false => self.calls.push(piece)?,
                }
            }
        }
        self.set_usage(line.prompt_eval_count, line.eval_count, deltas);
        self.model = line.model.or(self.model.take());
        let reason = stop_reason::known(line.done_reason);
        self.stop_reason = reason.or(self.stop_reason.take());
        self.is_finished = line.done == Some(true);
        Ok(self.is_finished)
    }

    fn set_usage(
        &mut self,
        input: TokenCount,
        output: TokenCount,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) {
        if [input, output] == [TokenCount::Absent; 2] {
            return;
        }
        let counts = TokenCounts {
            input,
            output,
            ..TokenCounts::default()
        };
        token_counts::update(&mut self.usage, counts.into_usage(), deltas);
    }
}
