//! Ollama's chat API (`POST /api/chat`, <https://docs.ollama.com/api/chat>): its request, its reply and its NDJSON stream.
//! Knows no HTTP and no run.

use std::borrow::Cow;

use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};

use crate::config;
use crate::domain::agent::{Effort, ResponseFormat};
use crate::domain::content::Content;
use crate::domain::message::{AssistantMessage, Message, ToolCall, ToolSpec};
use crate::domain::usage::TokenUsage;
use crate::providers::counts::{Count, Counts, Lenient};
use crate::providers::echo::Origin;
use crate::providers::endpoint::Endpoint;
use crate::providers::lines::Format;
use crate::providers::parts::{self, Base64, Piece};
use crate::providers::reply_builder::ReplyBuilder;
use crate::providers::wire::{Base, KeyHeader, Part, Wire};
use crate::providers::{
    Category, ChatRequest, Delta, End, Provider, ProviderError, Reply, calls, refusal, wire,
};

const BASE: &str = "http://localhost:11434";

/// A client of one Ollama server.
pub struct Ollama {
    endpoint: Endpoint<Heard>,
}

impl Ollama {
    /// A client of the configured server. The error says what is wrong with the configuration.
    pub fn new(mark: String, config: &config::Provider) -> Result<Self, String> {
        let base = Base::parse(config.base_url.as_deref().unwrap_or(BASE))?;
        let refused = format!("connection refused: is Ollama running? (expected at {base})");
        let wire = Wire::new(config, &base, "/api/chat", KeyHeader::Bearer)?;
        let wire = wire.when_refused(refused);
        let endpoint = Endpoint::new(wire, mark);
        Ok(Self { endpoint })
    }

    /// What it sends to and reads from.
    pub fn endpoint(&self) -> &Endpoint<Heard> {
        &self.endpoint
    }
}

impl Provider for Ollama {
    fn complete<'a>(
        &'a self,
        request: ChatRequest<'a>,
        deltas: &'a mut (dyn FnMut(Delta<'_>) + Send),
    ) -> BoxFuture<'a, Result<Reply, ProviderError>> {
        let body = Body::of(&request, self.endpoint.origin(request.model));
        self.endpoint.complete(&body, &request, deltas)
    }
}

#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    messages: Vec<Turn<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tools: Vec<Tool<'a>>,
    // Always there: Ollama streams unless it is told not to.
    stream: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    format: Option<Shape<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    think: Option<Think>,
    #[serde(skip_serializing_if = "Options::is_empty")]
    options: Options<'a>,
}

/// Whether, or how much, the model thinks.
#[derive(Serialize)]
#[serde(untagged)]
enum Think {
    Flag(bool),
    Level(&'static str),
}

impl From<Effort> for Think {
    /// Ollama has three levels.
    fn from(effort: Effort) -> Self {
        match effort {
            Effort::None => Self::Flag(false),
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
enum Shape<'a> {
    Word(&'static str),
    Schema(&'a RawValue),
}

#[derive(Serialize)]
#[serde(tag = "role", rename_all = "lowercase")]
enum Turn<'a> {
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

impl<'a> Body<'a> {
    fn of(request: &ChatRequest<'a>, origin: Origin<'_>) -> Self {
        let params = request.params;
        Self {
            model: request.model,
            messages: turns(request, origin),
            tools: request.tools.iter().map(Tool::from).collect(),
            stream: request.stream,
            format: match &params.response_format {
                ResponseFormat::Text => None,
                ResponseFormat::JsonObject => Some(Shape::Word("json")),
                ResponseFormat::JsonSchema(schema) => Some(Shape::Schema(schema)),
            },
            think: params.effort.map(Think::from),
            options: Options {
                temperature: params.temperature,
                num_predict: params.max_tokens,
                top_p: params.top_p,
                stop: &params.stop,
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
            Message::User { content } => turns.push(match content {
                Content::Text(text) => Turn::User {
                    content: Cow::Borrowed(text),
                    images: Vec::new(),
                },
                Content::Parts(parts) => user(parts::pieces(parts, request)),
            }),
            Message::Assistant(said) => {
                called = &said.tool_calls;
                turns.push(Turn::Assistant {
                    content: &said.content,
                    thinking: origin
                        .body(said)
                        .and_then(|body| serde_json::from_str::<Thinking<'_>>(body.get()).ok())
                        .map(|echo| echo.thinking),
                    tool_calls: said.tool_calls.iter().map(call_out).collect(),
                });
            }
            Message::Tool { tool_results } => {
                for (place, result) in tool_results.iter().enumerate() {
                    let call = calls::answered(called, place, result);
                    turns.push(Turn::Tool {
                        content: &result.content,
                        tool_name: call.map_or("", |call| &call.name),
                    });
                }
                // Templates of models show no images of the role `tool`.
                let shown = parts::shown_after(tool_results, request);
                if !shown.is_empty() {
                    turns.push(user(shown));
                }
            }
        }
    }
    turns
}

/// A user's message: all text, then all pictures, as the API has it. It has nothing for files.
fn user(pieces: Vec<Piece<'_>>) -> Turn<'_> {
    let (mut texts, mut images) = (Vec::new(), Vec::new());
    for piece in pieces {
        match piece {
            Piece::Text(text) => texts.push(text),
            Piece::Image(data) => images.push(data.base64()),
            Piece::File { name, data } => texts.push(Cow::Owned(format!(
                "[file: {name}, {}, left out: Ollama takes no files]",
                data.media_type
            ))),
        }
    }
    Turn::User {
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

/// What an assistant message had besides text and calls.
#[derive(Serialize, Deserialize)]
struct Thinking<'a> {
    #[serde(borrow)]
    thinking: &'a RawValue,
}

/// One line of a stream, or the whole reply: they have the same fields.
#[derive(Deserialize)]
struct Line<'a> {
    model: Option<String>,
    message: Option<Said<'a>>,
    done: Option<bool>,
    done_reason: Option<String>,
    #[serde(default)]
    prompt_eval_count: Count,
    #[serde(default)]
    eval_count: Count,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Said<'a> {
    content: Option<String>,
    thinking: Option<String>,
    #[serde(borrow)]
    tool_calls: Option<Vec<CallIn<'a>>>,
}

#[derive(Deserialize)]
struct CallIn<'a> {
    #[serde(borrow)]
    function: Option<FunctionIn<'a>>,
}

#[derive(Deserialize)]
struct FunctionIn<'a> {
    name: Option<String>,
    #[serde(borrow)]
    arguments: Option<&'a RawValue>,
}

/// What counts of a line that could not be read for other reasons.
#[derive(Deserialize)]
struct Unread {
    #[serde(default)]
    done: Lenient<bool>,
    #[serde(default)]
    prompt_eval_count: Count,
    #[serde(default)]
    eval_count: Count,
}

/// A reply as far as it has come.
#[derive(Default)]
pub struct Heard {
    text: String,
    thinking: String,
    calls: Vec<ToolCall>,
    usage: Option<TokenUsage>,
    done: bool,
    stop_reason: Option<String>,
    model: Option<String>,
}

impl ReplyBuilder for Heard {
    const FORMAT: Format = Format::Ndjson;

    fn part(
        &mut self,
        part: Part<'_>,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<bool, ProviderError> {
        let (Part::Whole(text) | Part::Message(text)) = part;
        self.line(text, deltas)
    }

    fn is_counted(&self) -> bool {
        self.done && self.usage.is_some()
    }

    fn reply(self, origin: Origin<'_>) -> Result<Reply, ProviderError> {
        // Older servers give no reason with `done`.
        let normal_end = self.done && matches!(self.stop_reason.as_deref(), None | Some("stop"));
        let end = match self.stop_reason.as_deref() {
            _ if normal_end || !self.text.is_empty() || !self.calls.is_empty() => End::Answer,
            Some("length") => End::Truncated,
            _ => {
                let why = "response contains no content";
                return Err(ProviderError::new(Category::Server, why));
            }
        };
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
                tool_calls: self.calls,
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
    /// Takes one line; says whether it was the last.
    fn line(
        &mut self,
        text: &str,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<bool, ProviderError> {
        let line: Line<'_> = wire::read(text).inspect_err(|_| {
            if let Ok(unread) = serde_json::from_str::<Unread>(text) {
                self.report(unread.prompt_eval_count, unread.eval_count, deltas);
                self.done = unread.done.0 == Some(true);
            }
        })?;
        if line.error.is_some() {
            return Err(refusal::in_reply(text));
        }
        if let Some(said) = line.message {
            if let Some(content) = said.content.filter(|content| !content.is_empty()) {
                deltas(Delta::Text(&content));
                wire::append(&mut self.text, content);
            }
            if let Some(thinking) = said.thinking.filter(|text| !text.is_empty()) {
                deltas(Delta::Reasoning(&thinking));
                wire::append(&mut self.thinking, thinking);
            }
            for call in said.tool_calls.into_iter().flatten() {
                calls::check_count(self.calls.len() + 1)?;
                let (name, arguments) = match call.function {
                    Some(function) => (function.name.unwrap_or_default(), function.arguments),
                    None => (String::new(), None),
                };
                self.calls.push(ToolCall {
                    // Ollama's own ids are random and not asked back.
                    id: format!("ollama_{}", self.calls.len()),
                    provider_id: String::new(),
                    name,
                    arguments: calls::arguments_from_json(arguments),
                });
            }
        }
        self.report(line.prompt_eval_count, line.eval_count, deltas);
        self.model = line.model.or(self.model.take());
        self.stop_reason = line.done_reason.or(self.stop_reason.take());
        self.done = line.done == Some(true);
        Ok(self.done)
    }

    /// Keeps what the service has reported so far.
    fn report(&mut self, input: Count, output: Count, deltas: &mut dyn FnMut(Delta<'_>)) {
        if [input, output] == [Count::Absent; 2] {
            return;
        }
        let counts = Counts {
            input,
            output,
            ..Counts::default()
        };
        self.usage = counts.usage();
        if let Some(usage) = self.usage {
            deltas(Delta::Usage(usage));
        }
    }
}
