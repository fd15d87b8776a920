//! OpenAI's Responses API (`POST /responses`, <https://platform.openai.com/docs/api-reference/responses>): the client and
//! its requests. Nothing is kept at the service: every request carries the whole conversation. Knows no HTTP and no run.

use std::borrow::Cow;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use serde::Serialize;
use serde_json::value::RawValue;

use crate::config::models::ModelFacts;
use crate::domain::agent::{Effort, Params, ReasoningSummary, ResponseFormat};
use crate::domain::content::Content as MessageContent;
use crate::domain::message::{AssistantMessage, Message, ToolCall, ToolSpec};
use crate::providers::batches::{BatchItem, Batches};
use crate::providers::endpoint::Endpoint;
use crate::providers::openai::{OpenAi, is_closed, tier};
use crate::providers::parts::{self, DataUrl, Piece};
use crate::providers::responses::reply::Heard;
use crate::providers::wire::Base;
use crate::providers::{
    Batched, ChatRequest, Delta, Provider, ProviderError, Reply, calls, request_body,
};

mod reply;

/// Most letters of a `prompt_cache_key`.
const MAX_CACHE_KEY: usize = 64;

/// A client of one service that speaks OpenAI's Responses API.
pub struct Responses {
    endpoint: Endpoint<Heard>,
    /// The same service's chat API, for what this one lacks.
    chat: OpenAi,
}

/// Whether a model of OpenAI wants this API even where a request asks for something that only the chat API has: its
/// current models take no tools there.
fn wants_responses(model: &str, facts: Option<&ModelFacts>) -> bool {
    match facts {
        Some(facts) if facts.responses || facts.checked.is_some() => facts.responses,
        // Newer than the table, or of another service.
        Some(_) | None => is_current(model),
    }
}

/// Whether a request wants what only the chat API has.
fn is_for_chat(request: &ChatRequest<'_>) -> bool {
    !request.params.stop.is_empty() && !wants_responses(request.model, request.facts)
}

fn is_current(model: &str) -> bool {
    let model = family(model);
    let is_o_series = model
        .strip_prefix('o')
        .is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    let number = model.strip_prefix("gpt-").and_then(|rest| {
        let digits = rest.split(|c: char| !c.is_ascii_digit()).next()?;
        digits.parse::<u32>().ok()
    });
    is_o_series || (number.is_some_and(|number| number >= 5) && !is_chat(model))
}

/// Whether a model may think before it answers. Those of OpenAI that do not refuse a request that asks for their
/// thoughts; of all others nothing is known.
fn may_reason(model: &str, facts: Option<&ModelFacts>) -> bool {
    if let Some(known) = facts.and_then(|facts| facts.reasoning) {
        return known;
    }
    let model = family(model);
    let before = ["gpt-3", "gpt-4", "chatgpt-"];
    !is_chat(model) && !before.iter().any(|family| model.starts_with(family))
}

/// A model's name without the mark of a fine-tuned one.
fn family(model: &str) -> &str {
    model.strip_prefix("ft:").unwrap_or(model)
}

/// The models of ChatGPT's quick answers (`gpt-5-chat-latest`).
fn is_chat(model: &str) -> bool {
    model.starts_with("gpt-") && model.contains("-chat")
}

impl Responses {
    /// A client of the service at `base`, which `chat` speaks to as well.
    pub fn new(mark: String, base: &Base, chat: OpenAi) -> Self {
        let wire = chat.endpoint().wire().elsewhere(base, "/responses");
        Self {
            endpoint: Endpoint::new(wire, mark),
            chat,
        }
    }

    /// What it sends to and reads from.
    pub fn endpoint(&self) -> &Endpoint<Heard> {
        &self.endpoint
    }
}

impl Provider for Responses {
    fn batched(&self) -> Option<&dyn Batched> {
        Some(self)
    }

    fn complete<'a>(
        &'a self,
        request: ChatRequest<'a>,
        deltas: &'a mut (dyn FnMut(Delta<'_>) + Send),
    ) -> BoxFuture<'a, Result<Reply, ProviderError>> {
        if is_for_chat(&request) {
            return self.chat.complete(request, deltas);
        }
        let body = Body::of(&request, self);
        self.endpoint.complete(&body, &request, deltas)
    }

    fn left_out(&self, model: &str, params: &Params, facts: Option<&ModelFacts>) -> Option<String> {
        (!params.stop.is_empty() && wants_responses(model, facts)).then(|| {
            format!(
                "`stop` is not sent: {model} is served on OpenAI's Responses API, which has no stop sequences; remove \
                 it from the agent, or set api = \"chat\" for the provider"
            )
        })
    }
}

impl Batched for Responses {
    fn batches(&self) -> &Batches {
        self.chat.batches()
    }

    fn item(&self, request: &ChatRequest<'_>) -> Result<BatchItem, ProviderError> {
        if is_for_chat(request) {
            return self.chat.item(request);
        }
        let body = request_body::write(&Body::of(request, self), request)?;
        let path = "/v1/responses";
        Ok(BatchItem { path, body })
    }

    fn hear_item<'a>(
        &'a self,
        request: ChatRequest<'a>,
        status: u16,
        body: Bytes,
        deltas: &'a mut (dyn FnMut(Delta<'_>) + Send),
    ) -> BoxFuture<'a, Result<Reply, ProviderError>> {
        if is_for_chat(&request) {
            return self.chat.hear_item(request, status, body, deltas);
        }
        (self.endpoint).read_item(request.model, status, body, deltas)
    }
}

#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    instructions: &'a str,
    input: Vec<Item<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tools: Vec<Tool<'a>>,
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
    // Always there: the service keeps replies for a month unless it is told not to.
    store: bool,
    #[serde(skip_serializing_if = "str::is_empty")]
    prompt_cache_key: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream: Option<bool>,
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
    format: Shape<'a>,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Shape<'a> {
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
    // The service's default is true, and then it refuses every schema with an open object.
    strict: bool,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Item<'a> {
    Echo(Cow<'a, RawValue>),
    Written(Written<'a>),
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Written<'a> {
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
    /// What an assistant said; some servers take it in no other form.
    Said([OutputText<'a>; 1]),
}

#[derive(Serialize)]
#[serde(tag = "type")]
enum InputPart<'a> {
    #[serde(rename = "input_text")]
    Text { text: Cow<'a, str> },
    #[serde(rename = "input_image")]
    Image {
        image_url: DataUrl<'a>,
        // The package's types demand it; this is what the service does without.
        detail: &'static str,
    },
    #[serde(rename = "input_file")]
    File {
        filename: &'a str,
        file_data: DataUrl<'a>,
    },
}

impl<'a> From<Piece<'a>> for InputPart<'a> {
    fn from(piece: Piece<'a>) -> Self {
        match piece {
            Piece::Text(text) => Self::Text { text },
            Piece::Image(data) => Self::Image {
                image_url: data.url(),
                detail: "auto",
            },
            Piece::File { name, data } => Self::File {
                filename: name,
                file_data: data.url(),
            },
        }
    }
}

impl<'a> Content<'a> {
    fn parts(pieces: Vec<Piece<'a>>) -> Self {
        Self::Parts(pieces.into_iter().map(InputPart::from).collect())
    }
}

#[derive(Serialize)]
struct OutputText<'a> {
    r#type: &'static str,
    text: &'a str,
    annotations: [(); 0],
}

impl<'a> Body<'a> {
    fn of(request: &ChatRequest<'a>, service: &Responses) -> Self {
        let params = request.params;
        let may_reason = may_reason(request.model, request.facts);
        let summary = params
            .reasoning_summary
            .filter(|_| may_reason && params.effort != Some(Effort::None));
        let version = request.cache_key;
        let key = version
            .rsplit_once(':')
            .map_or(version, |(_, digest)| digest);
        Self {
            model: request.model,
            instructions: request.system,
            input: input(request, service),
            tools: request.tools.iter().map(Tool::from).collect(),
            temperature: params.temperature,
            top_p: params.top_p,
            max_output_tokens: params.max_tokens,
            reasoning: (params.effort.is_some() || summary.is_some()).then_some(Reasoning {
                effort: params.effort,
                summary,
            }),
            text: match &params.response_format {
                ResponseFormat::Text => None,
                ResponseFormat::JsonObject => Some(Shape::JsonObject),
                ResponseFormat::JsonSchema(schema) => Some(Shape::JsonSchema {
                    name: "reply",
                    schema,
                    strict: is_closed(schema),
                }),
            }
            .map(|format| TextConfig { format }),
            service_tier: tier(params),
            include: match may_reason {
                true => &["reasoning.encrypted_content"],
                false => &[],
            },
            store: false,
            prompt_cache_key: crate::domain::message::beginning(key, MAX_CACHE_KEY),
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

fn input<'a>(request: &ChatRequest<'a>, service: &Responses) -> Vec<Item<'a>> {
    let mut items = Vec::with_capacity(request.messages.len());
    let mut called: &[ToolCall] = &[];
    let origin = service.endpoint.origin(request.model);
    for message in request.messages {
        match message {
            Message::User { content } => items.push(Item::Written(Written::Message {
                role: "user",
                content: match content {
                    MessageContent::Text(text) => Content::Text(text),
                    MessageContent::Parts(parts) => Content::parts(parts::pieces(parts, request)),
                },
            })),
            Message::Assistant(said) => {
                called = &said.tool_calls;
                let echo = origin.body(said);
                match echo.and_then(|body| reply::items(body, &said.tool_calls)) {
                    Some(echo) => items.extend(echo.into_iter().map(Item::Echo)),
                    None => items.extend(rebuilt(said).map(Item::Written)),
                }
            }
            Message::Tool { tool_results } => {
                items.extend(tool_results.iter().enumerate().map(|(place, result)| {
                    let call = calls::answered(called, place, result);
                    let id = call.map_or(&result.call_id, |call| &call.id);
                    Item::Written(Written::FunctionCallOutput {
                        call_id: calls::short_id(id),
                        output: match parts::result_pieces(result, request) {
                            pieces if pieces.is_empty() => Content::Text(&result.content),
                            pieces => Content::parts(pieces),
                        },
                    })
                }));
            }
        }
    }
    items
}

/// An assistant message from its text and calls. One without either is not missed.
fn rebuilt(said: &AssistantMessage) -> impl Iterator<Item = Written<'_>> {
    let text = (!said.content.is_empty()).then(|| Written::Message {
        role: "assistant",
        content: Content::Said([OutputText {
            r#type: "output_text",
            text: &said.content,
            annotations: [],
        }]),
    });
    let calls = said.tool_calls.iter().map(|call| Written::FunctionCall {
        call_id: calls::short_id(&call.id),
        name: calls::plain_name(&call.name),
        arguments: call.arguments.get(),
    });
    text.into_iter().chain(calls)
}

#[cfg(test)]
mod tests {
    use super::{ModelFacts, may_reason, wants_responses};

    #[test]
    fn openais_models_are_told_apart_by_their_names() {
        for (model, wants, reasons) in [
            ("gpt-5", true, true),
            ("gpt-5.1-codex-max", true, true),
            ("gpt-6-astra", true, true),
            ("gpt-10", true, true),
            ("o3", true, true),
            ("o4-mini-2025-04-16", true, true),
            ("ft:o4-mini:me::x", true, true),
            ("gpt-5-chat-latest", false, false),
            ("gpt-4.1-mini", false, false),
            ("gpt-4o", false, false),
            ("ft:gpt-4.1:me::x", false, false),
            ("gpt-3.5-turbo", false, false),
            ("chatgpt-4o-latest", false, false),
            ("qwen3", false, true),
            ("olmo", false, true),
        ] {
            assert_eq!(wants_responses(model, None), wants, "{model}");
            assert_eq!(may_reason(model, None), reasons, "{model}");
        }
        let known = |responses, reasoning| ModelFacts {
            checked: Some("2026-11-22".to_owned()),
            responses,
            reasoning: Some(reasoning),
            ..ModelFacts::default()
        };
        assert!(!wants_responses("gpt-5", Some(&known(false, true))));
        assert!(wants_responses("gpt-4o", Some(&known(true, true))));
        assert!(!may_reason("gpt-5", Some(&known(true, false))));
        // What the configuration says of a model that the table does not have is not all about it.
        let priced = ModelFacts::default();
        assert!(wants_responses("gpt-7", Some(&priced)) && may_reason("gpt-7", Some(&priced)));
    }
}
