//! Providers as the engine has them, facing a service that replays.

use std::collections::BTreeMap;
use std::sync::Arc;

use axed::config::{MAX_REPLY, OpenAiApi, Provider as ProviderConfig, ProviderKind};
use axed::domain::agent::Params;
use axed::domain::message::Message;
use axed::domain::usage::TokenUsage;
use axed::providers::registry::{Registry, Served};
use axed::providers::{ChatRequest, Delta, ProviderError, Reply};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::support::provider::seen::Wire;
use crate::support::replay::{Answer, Replay};

/// The wires.
pub const KINDS: [Wire; 4] = Wire::ALL;
/// The key that the clients hold.
pub const KEY: &str = "sk-very-secret-key";

/// The wire's name and the recordings' folder.
pub fn name(wire: Wire) -> &'static str {
    wire.name()
}

/// The kind of provider that speaks a wire.
fn kind(wire: Wire) -> ProviderKind {
    match wire {
        Wire::Anthropic => ProviderKind::Anthropic,
        Wire::Openai | Wire::Responses => ProviderKind::Openai,
        Wire::Ollama => ProviderKind::Ollama,
    }
}

/// A config whose service is at `base`.
pub fn config(wire: Wire, base: &str) -> ProviderConfig {
    ProviderConfig {
        kind: kind(wire),
        api_key: Some(KEY.into()),
        key_env: format!("{}_API_KEY", name(wire).to_uppercase()),
        base_url: Some(base.to_owned()),
        headers: BTreeMap::new(),
        max_concurrent: None,
        timeout: None,
        version: None,
        max_tokens_field: None,
        api: (wire == Wire::Responses).then_some(OpenAiApi::Responses),
        max_reply: MAX_REPLY,
        batch_poll: axed::config::BATCH_POLL,
        services: Vec::new(),
        scripts: Vec::new(),
        is_preset: false,
        missing_address: None,
        models: Default::default(),
    }
}

/// The client of a config.
pub fn served(config: ProviderConfig) -> Arc<Served> {
    let name = match config.kind {
        ProviderKind::Anthropic => "anthropic",
        ProviderKind::Openai => "openai",
        ProviderKind::Ollama => "ollama",
        ProviderKind::Scripted => "scripted",
    };
    let registry = Registry::build(&BTreeMap::from([(name.to_owned(), config)]));
    let registry = registry.expect("a valid config");
    Arc::clone(registry.get(name).expect("a served provider"))
}

/// A client of `kind` for a service that sends `answer`.
pub fn facing(kind: Wire, answer: Answer) -> (Replay, Arc<Served>) {
    let service = Replay::of([answer]);
    let served = served(config(kind, &service.base()));
    (service, served)
}

/// The reply, or why there is none, and the deltas on the way.
pub async fn ask(
    served: &Served,
    request: ChatRequest<'_>,
) -> (Result<Reply, ProviderError>, String) {
    let mut told = String::new();
    let mut deltas = |delta: Delta<'_>| {
        if let Delta::Text(text) = delta {
            told.push_str(text);
        }
    };
    let reply = served.provider.complete(request, &mut deltas).await;
    (reply, told)
}

/// Says hello, streamed or not.
pub async fn hello(served: &Served, stream: bool) -> (Result<Reply, ProviderError>, String) {
    let messages = [Message::user("hello")];
    say(served, &messages, stream).await
}

/// Goes on with a conversation that has neither system prompt nor tools.
pub async fn say(
    served: &Served,
    messages: &[Message],
    stream: bool,
) -> (Result<Reply, ProviderError>, String) {
    let request = ChatRequest {
        model: "model",
        system: "",
        messages,
        blobs: None,
        tools: &[],
        params: &Params::default(),
        stream,
        multi_turn: false,
        facts: None,
        cache_key: "",
        trace: None,
        key: None,
    };
    ask(served, request).await
}

/// Why there is no reply.
pub async fn error_of(kind: Wire, answer: Answer, stream: bool) -> ProviderError {
    let (_service, served) = facing(kind, answer);
    let (reply, _) = hello(&served, stream).await;
    reply.expect_err("no reply")
}

/// A recorded stream of `kind`.
pub fn stream_of(kind: Wire) -> Answer {
    let case = match kind {
        Wire::Openai => "06_tool_call_stream",
        Wire::Responses => "04_tool_call_stream",
        Wire::Anthropic => "06_tool_use_stream",
        _ => "06_tool_result_stream",
    };
    Answer::recorded(name(kind), case)
}

/// A reply in a form that can be compared.
#[derive(Debug, PartialEq)]
pub struct Told {
    pub text: String,
    pub calls: Vec<(String, String, Value)>,
    pub stop: Option<String>,
    pub usage: Option<TokenUsage>,
    pub model: Option<String>,
    pub echo: Option<Value>,
}

impl From<Reply> for Told {
    fn from(reply: Reply) -> Self {
        let json = |raw: &RawValue| serde_json::from_str::<Value>(raw.get()).expect("JSON");
        Self {
            text: reply.message.content,
            calls: reply
                .message
                .tool_calls
                .iter()
                .map(|call| (call.id.clone(), call.name.clone(), json(&call.arguments)))
                .collect(),
            stop: reply.stop_reason,
            usage: reply.usage,
            model: reply.model,
            echo: reply.message.echo.map(|echo| json(&echo.body)),
        }
    }
}
