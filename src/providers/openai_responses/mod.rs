//! OpenAI's Responses API (`POST /responses`, <https://platform.openai.com/docs/api-reference/responses>): the client and
//! its requests. Nothing is kept at the service: every request carries the whole conversation. Knows no HTTP and no run.

use std::borrow::Cow;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use serde::Serialize;
use serde_json::value::RawValue;

use crate::config::models::ModelFacts;
use crate::domain::agent::params::{Effort, Params, ReasoningSummary};
use crate::domain::agent::response_format::ResponseFormat;
use crate::domain::content::Content as MessageContent;
use crate::domain::message::{AssistantMessage, Message, ToolCall, ToolSpec};
use crate::providers::batches::{BatchClient, BatchItem};
use crate::providers::content_parts::{self, ContentPart, DataUrl};
use crate::providers::endpoint::Endpoint;
use crate::providers::http_client::BaseUrl;
use crate::providers::openai_chat::{OpenAiChat, is_strict_schema, service_tier};
use crate::providers::openai_responses::reply::ResponsesReplyBuilder;
use crate::providers::{
    BatchProvider, ChatRequest, Delta, Provider, ProviderError, Reply, request_body,
    tool_call_codec,
};

mod reply;

/// Most letters of a `prompt_cache_key`.
const MAX_CACHE_KEY: usize = 64;

/// A client of one service that speaks OpenAI's Responses API.
pub struct OpenAiResponses {
    endpoint: Endpoint<ResponsesReplyBuilder>,
    /// The same service's chat API, for what this one lacks.
    chat: OpenAiChat,
}

/// Whether a model of OpenAI wants this API even where a request asks for something that only the chat API has: its
/// current models take no tools there.
fn prefers_responses_api(model: &str, facts: Option<&ModelFacts>) -> bool {
    match facts {
        Some(facts) if facts.responses || facts.checked_on.is_some() => facts.responses,
        // Newer than the table, or of another service.
        Some(_) | None => is_current_model(model),
    }
}

/// Whether a request wants what only the chat API has.
fn needs_chat_api(request: &ChatRequest<'_>) -> bool {
    !request.params.stop.is_empty() && !prefers_responses_api(request.model, request.facts)
}

fn is_current_model(model: &str) -> bool {
    let model = base_model(model);
    let is_o_series = model
        .strip_prefix('o')
        .is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    let number = model.strip_prefix("gpt-").and_then(|rest| {
        let digits = rest.split(|c: char| !c.is_ascii_digit()).next()?;
        digits.parse::<u32>().ok()
    });
    is_o_series || (number.is_some_and(|number| number >= 5) && !is_chat_model(model))
}

/// Whether a model may think before it answers. Those of OpenAI that do not refuse a request that asks for their
/// thoughts; of all others nothing is known.
fn may_reason(model: &str, facts: Option<&ModelFacts>) -> bool {
    if let Some(is_reasoning) = facts.and_then(|facts| facts.reasoning) {
        return is_reasoning;
    }
    let model = base_model(model);
    let non_reasoning = ["gpt-3", "gpt-4", "chatgpt-"];
    !is_chat_model(model) && !non_reasoning.iter().any(|family| model.starts_with(family))
}

/// A model's name without the mark of a fine-tuned one.
fn base_model(model: &str) -> &str {
    model.strip_prefix("ft:").unwrap_or(model)
}

/// The models of ChatGPT's quick answers (`gpt-5-chat-latest`).
fn is_chat_model(model: &str) -> bool {
    model.starts_with("gpt-") && model.contains("-chat")
}

impl OpenAiResponses {
    /// A client of the service at `base`, which `chat` speaks to as well.
    pub fn new(service_id: String, base: &BaseUrl, chat: OpenAiChat) -> Self {
        let client = chat.endpoint().client().with_path(base, "/responses");
        Self {
            endpoint: Endpoint::new(client, service_id),
            chat,
        }
    }

    /// What it sends to and reads from.
    pub fn endpoint(&self) -> &Endpoint<ResponsesReplyBuilder> {
        &self.endpoint
    }
}

impl Provider for OpenAiResponses {
    fn batch_provider(&self) -> Option<&dyn BatchProvider> {
        Some(self)
    }

    fn complete<'a>(
        &'a self,
        request: ChatRequest<'a>,
        deltas: &'a mut (dyn FnMut(Delta<'_>) + Send),
    ) -> BoxFuture<'a, Result<Reply, ProviderError>> {
        if needs_chat_api(&request) {
            return self.chat.complete(request, deltas);
        }
        let body = RequestBody::new(&request, self);
        self.endpoint.complete(&body, &request, deltas)
    }

    fn dropped_params_warning(
        &self,
        model: &str,
        params: &Params,
        facts: Option<&ModelFacts>,
    ) -> Option<String> {
        (!params.stop.is_empty() && prefers_responses_api(model, facts)).then(|| {
            format!(
                "`stop` is not sent: {model} is served on OpenAI's Responses API, which has no stop sequences; remove \
                 it from the agent, or set api = \"chat\" for the provider"
            )
        })
    }
}

impl BatchProvider for OpenAiResponses {
    fn batch_client(&self) -> &BatchClient {
        self.chat.batch_client()
    }

    fn batch_item(&self, request: &ChatRequest<'_>) -> Result<BatchItem, ProviderError> {
        if needs_chat_api(request) {
            return self.chat.batch_item(request);
        }
        let body = request_body::serialize_with_extra(&RequestBody::new(request, self), request)?;
        let path = "/v1/responses";
        Ok(BatchItem { path, body })
    }

    fn read_batch_reply<'a>(
        &'a self,
        request: ChatRequest<'a>,
        status: u16,
        body: Bytes,
        deltas: &'a mut (dyn FnMut(Delta<'_>) + Send),
    ) -> BoxFuture<'a, Result<Reply, ProviderError>> {
        if needs_chat_api(&request) {
            return self.chat.read_batch_reply(request, status, body, deltas);
        }
        (self.endpoint).read_batch_reply(request.model, status, body, deltas)
    }
}

#[derive(Serialize)]
struct RequestBody<'a> {
    model: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    instructions: &'a str,
    input: Vec<InputItem<'a>>,
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
    // The service's default is true, and then it refuses every schema with an open object.
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
    /// What an assistant said; some servers take it in no other form.
    Output([OutputText<'a>; 1]),
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

impl<'a> From<ContentPart<'a>> for InputPart<'a> {
    fn from(part: ContentPart<'a>) -> Self {
        match part {
            ContentPart::Text(text) => Self::Text { text },
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
    fn new(request: &ChatRequest<'a>, service: &OpenAiResponses) -> Self {
        let params = request.params;
        let may_reason = may_reason(request.model, request.facts);
        let summary = params
            .reasoning_summary
            .filter(|_| may_reason && params.effort != Some(Effort::None));
        let cache_key = request.cache_key;
        let digest = cache_key
            .rsplit_once(':')
            .map_or(cache_key, |(_, digest)| digest);
        Self {
            model: request.model,
            instructions: request.system,
            input: input_items(request, service),
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
                ResponseFormat::JsonObject => Some(OutputFormat::JsonObject),
                ResponseFormat::JsonSchema(schema) => Some(OutputFormat::JsonSchema {
                    name: "reply",
                    schema,
                    strict: is_strict_schema(schema),
                }),
            }
            .map(|format| TextConfig { format }),
            service_tier: service_tier(params),
            include: match may_reason {
                true => &["reasoning.encrypted_content"],
                false => &[],
            },
            store: false,
            prompt_cache_key: crate::domain::message::truncate_to_bytes(digest, MAX_CACHE_KEY),
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

fn input_items<'a>(request: &ChatRequest<'a>, service: &OpenAiResponses) -> Vec<InputItem<'a>> {
    let mut items = Vec::with_capacity(request.messages.len());
    let mut last_calls: &[ToolCall] = &[];
    let origin = service.endpoint.origin(request.model);
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
                match echo.and_then(|body| reply::echo_items(body, &reply.tool_calls)) {
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

/// An assistant message from its text and calls. One without either is not missed.
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

#[cfg(test)]
mod tests {
    use super::{ModelFacts, may_reason, prefers_responses_api};

    #[test]
    fn openai_models_are_classified_by_name() {
        for (model, is_preferred, reasons) in [
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
            assert_eq!(prefers_responses_api(model, None), is_preferred, "{model}");
            assert_eq!(may_reason(model, None), reasons, "{model}");
        }
        let model_facts = |responses, reasoning| ModelFacts {
            checked_on: Some("2026-11-22".to_owned()),
            responses,
            reasoning: Some(reasoning),
            ..ModelFacts::default()
        };
        assert!(!prefers_responses_api(
            "gpt-5",
            Some(&model_facts(false, true))
        ));
        assert!(prefers_responses_api(
            "gpt-4o",
            Some(&model_facts(true, true))
        ));
        assert!(!may_reason("gpt-5", Some(&model_facts(true, false))));
        // What the configuration says of a model that the table does not have is not all about it.
        let priced = ModelFacts::default();
        assert!(
            prefers_responses_api("gpt-7", Some(&priced)) && may_reason("gpt-7", Some(&priced))
        );
    }
}
