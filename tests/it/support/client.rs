//! Providers as the engine has them, facing a service that replays.

use std::collections::BTreeMap;
use std::sync::Arc;

use axed::config::{DEFAULT_MAX_REPLY, OpenAiApi, Provider as ProviderConfig, ProviderKind};
use axed::domain::agent::params::Params;
use axed::domain::message::Message;
use axed::domain::usage::TokenUsage;
use axed::providers::registry::{ProviderHandle, ProviderRegistry};
use axed::providers::{ChatRequest, Delta, ProviderError, Reply};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::support::provider::recorded_request::Wire;
use crate::support::replay::{CannedResponse, ReplayServer};

/// The wires.
pub const WIRES: [Wire; 4] = Wire::ALL;
/// The key that the clients hold.
pub const KEY: &str = "sk-very-secret-key";

/// The wire's name and the recordings' folder.
pub fn wire_name(wire: Wire) -> &'static str {
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
pub fn provider_config(wire: Wire, base: &str) -> ProviderConfig {
    ProviderConfig {
        kind: kind(wire),
        api_key: Some(KEY.into()),
        key_env: format!("{}_API_KEY", wire_name(wire).to_uppercase()),
        base_url: Some(base.to_owned()),
        headers: BTreeMap::new(),
        max_concurrent: None,
        timeout: None,
        version: None,
        max_tokens_field: None,
        api: (wire == Wire::Responses).then_some(OpenAiApi::Responses),
        max_reply: DEFAULT_MAX_REPLY,
        batch_poll: axed::config::DEFAULT_BATCH_POLL,
        services: Vec::new(),
        scripts: Vec::new(),
        is_preset: false,
        missing_address: None,
        limits: BTreeMap::new(),
        models: Default::default(),
    }
}

/// The client of a config.
pub fn provider_handle(config: ProviderConfig) -> Arc<ProviderHandle> {
    let name = match config.kind {
        ProviderKind::Anthropic => "anthropic",
        ProviderKind::Openai => "openai",
        ProviderKind::Ollama => "ollama",
        ProviderKind::Scripted => "scripted",
    };
    let registry = ProviderRegistry::build(&BTreeMap::from([(name.to_owned(), config)]));
    let registry = registry.expect("a valid config");
    Arc::clone(registry.get(name).expect("a served provider"))
}

/// A client of `kind` for a service that sends `answer`.
pub fn replay_client(wire: Wire, answer: CannedResponse) -> (ReplayServer, Arc<ProviderHandle>) {
    let service = ReplayServer::start([answer]);
    let provider = provider_handle(provider_config(wire, &service.base_url()));
    (service, provider)
}

/// The reply, or why there is none, and the deltas on the way.
pub async fn complete(
    provider: &ProviderHandle,
    request: ChatRequest<'_>,
) -> (Result<Reply, ProviderError>, String) {
    let mut text = String::new();
    let mut deltas = |delta: Delta<'_>| {
        if let Delta::Text(delta) = delta {
            text.push_str(delta);
        }
    };
    let reply = provider.provider.complete(request, &mut deltas).await;
    (reply, text)
}

/// Says hello, streamed or not.
pub async fn complete_hello(
    provider: &ProviderHandle,
    stream: bool,
) -> (Result<Reply, ProviderError>, String) {
    let messages = [Message::user("hello")];
    complete_messages(provider, &messages, stream).await
}

/// Continues a conversation that has neither system prompt nor tools.
pub async fn complete_messages(
    provider: &ProviderHandle,
    messages: &[Message],
    stream: bool,
) -> (Result<Reply, ProviderError>, String) {
    let request = ChatRequest {
        tool_choice: None,
        model: "model",
        system: "",
        messages,
        blobs: None,
        tools: &[],
        params: &Params::default(),
        stream,
        is_prompt_reused: false,
        facts: None,
        cache_key: "",
        conversation_id: "",
        trace: None,
        api_key: None,
    };
    complete(provider, request).await
}

/// Why there is no reply.
pub async fn expect_error(wire: Wire, answer: CannedResponse, stream: bool) -> ProviderError {
    let (_service, provider) = replay_client(wire, answer);
    let (reply, _) = complete_hello(&provider, stream).await;
    reply.expect_err("no reply")
}

/// A recorded stream of `kind`.
pub fn recorded_stream(wire: Wire) -> CannedResponse {
    let case = match wire {
        Wire::Openai => "06_tool_call_stream",
        Wire::Responses => "04_tool_call_stream",
        Wire::Anthropic => "06_tool_use_stream",
        _ => "06_tool_result_stream",
    };
    CannedResponse::recorded(wire_name(wire), case)
}

/// A reply in a form that can be compared.
#[derive(Debug, PartialEq)]
pub struct ComparableReply {
    pub text: String,
    pub calls: Vec<(String, String, Value)>,
    pub stop: Option<String>,
    pub usage: Option<TokenUsage>,
    pub model: Option<String>,
    pub echo: Option<Value>,
}

impl From<Reply> for ComparableReply {
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
