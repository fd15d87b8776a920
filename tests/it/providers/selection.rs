//! Which wire and which headers a provider gets, from its configuration.

use crate::support::client::{
    complete, complete_hello, provider_config, provider_handle, recorded_stream,
};
use crate::support::provider::recorded_request::Wire;
use crate::support::replay::{CannedResponse, ReplayServer};
use axed::config::Provider as ProviderConfig;
use axed::domain::agent::params::Params;
use axed::domain::message::Message;
use axed::providers::ChatRequest;
use axed::providers::openai_service::OpenAiService;
use axed::providers::registry::ProviderRegistry;
use std::collections::BTreeMap;

#[tokio::test]
async fn stop_sequences_use_chat_or_are_left_out_for_models_that_need_responses() {
    let service = ReplayServer::start([
        CannedResponse::recorded("openai", "10_plain"),
        CannedResponse::recorded("responses", "01_plain"),
    ]);
    let served = provider_handle(provider_config(Wire::Responses, &service.base_url()));
    let params = Params {
        stop: vec!["STOP".to_owned()],
        ..Params::default()
    };
    for (model, path) in [
        ("gpt-4.1", "/v1/chat/completions"),
        ("gpt-5-mini", "/v1/responses"),
    ] {
        let request = ChatRequest {
            tool_choice: None,
            model,
            system: "",
            messages: &[Message::user("hello")],
            blobs: None,
            tools: &[],
            params: &params,
            stream: false,
            is_prompt_reused: false,
            facts: None,
            cache_key: "",
            conversation_id: "",
            trace: None,
            api_key: None,
        };
        complete(&served, request).await.0.expect("a reply");
        let seen = service.requests().pop().expect("a request");
        assert_eq!(seen.path, path);
        let left_out = served.provider.dropped_params_warning(model, &params, None);
        let is_sent = seen.body.contains("STOP");
        assert_eq!(is_sent, left_out.is_none(), "{left_out:?}");
        assert!(left_out.is_none_or(|why| why.contains("`stop` is not sent: gpt-5-mini")));
    }
}

#[test]
fn openais_wire_is_chosen_by_address_and_by_configuration() {
    use axed::config::OpenAiApi::{Chat, Responses};
    for (base, api, chosen, address) in [
        (None, None, Responses, "https://api.openai.com/v1"),
        (None, Some(Chat), Chat, "https://api.openai.com/v1"),
        (
            Some("https://api.openai.com"),
            None,
            Responses,
            "https://api.openai.com/v1",
        ),
        (
            Some("https://eu.api.openai.com/v1"),
            None,
            Responses,
            "https://eu.api.openai.com/v1",
        ),
        (
            Some("http://localhost:8000"),
            None,
            Chat,
            "http://localhost:8000/v1",
        ),
        (
            Some("http://localhost:8000/api"),
            Some(Responses),
            Responses,
            "http://localhost:8000/api",
        ),
    ] {
        let config = ProviderConfig {
            base_url: base.map(str::to_owned),
            api,
            ..provider_config(Wire::Openai, "")
        };
        let base = axed::providers::openai_chat::base_url(&config).expect("an address");
        let service = OpenAiService::new("mine", base.host());
        let api = config.api.unwrap_or(service.default_api());
        assert_eq!((base.to_string().as_str(), api), (address, chosen));
    }
}

#[tokio::test]
async fn configured_headers_are_sent_and_take_precedence() {
    let service = ReplayServer::start([recorded_stream(Wire::Anthropic)]);
    let mut config = provider_config(Wire::Anthropic, &format!("{}/proxy/", service.base_url()));
    config.version = Some("2026-10-21".to_owned());
    config.headers = BTreeMap::from([
        ("x-api-key".to_owned(), "another-key".into()),
        ("X-Team".to_owned(), "blue".into()),
    ]);
    complete_hello(&provider_handle(config), true)
        .await
        .0
        .expect("a reply");
    let seen = service.requests().pop().expect("a request");
    assert_eq!(seen.path, "/proxy/v1/messages");
    assert_eq!(seen.headers["x-api-key"], "another-key");
    assert_eq!(seen.headers["x-team"], "blue");
    assert_eq!(seen.headers["anthropic-version"], "2026-10-21");
}

#[test]
fn a_provider_without_its_key_is_listed_but_unavailable() {
    let without = |kind, base: Option<&str>| ProviderConfig {
        api_key: None,
        base_url: base.map(str::to_owned),
        ..provider_config(kind, "")
    };
    let local = Some("http://localhost:8000");
    let registry = ProviderRegistry::build(&BTreeMap::from([
        ("anthropic".to_owned(), without(Wire::Anthropic, local)),
        ("openai".to_owned(), without(Wire::Openai, None)),
        ("ollama".to_owned(), without(Wire::Ollama, None)),
        ("vllm".to_owned(), without(Wire::Openai, local)),
        (
            "work".to_owned(),
            provider_config(Wire::Openai, "https://work.example/v1"),
        ),
    ]))
    .expect("valid configs");
    let why = |name: &str| registry.get(name).err().map(|why| why.to_string());
    let missing = |name: &str, env: &str| {
        Some(format!(
            "API key for provider \"{name}\" is not configured (set {env} or add to config.toml); in config/axed.toml it is \
             api_key in [providers.{name}]"
        ))
    };
    assert_eq!(why("anthropic"), missing("anthropic", "ANTHROPIC_API_KEY"));
    assert_eq!(why("openai"), missing("openai", "OPENAI_API_KEY"));
    for served in ["ollama", "vllm", "work"] {
        assert_eq!(why(served), None);
    }
    assert_eq!(
        why("gemini").as_deref(),
        Some(
            "unsupported provider \"gemini\": supported providers are anthropic, openai, ollama, vllm, work"
        )
    );
}

#[test]
fn an_impossible_configuration_is_rejected_without_secrets() {
    let broken: [fn(&mut ProviderConfig); 5] = [
        |config| config.base_url = Some("http://me:hunter2@localhost".to_owned()),
        |config| config.base_url = Some("localhost:hunter2".to_owned()),
        |config| config.api_key = Some("hunter2\nx: y".into()),
        |config| config.headers = BTreeMap::from([("x y".to_owned(), "hunter2".into())]),
        |config| config.headers = BTreeMap::from([("Host".to_owned(), "hunter2".into())]),
    ];
    for breaks in broken {
        let mut config = provider_config(Wire::Openai, "http://localhost:1");
        breaks(&mut config);
        let built = ProviderRegistry::build(&BTreeMap::from([("openai".to_owned(), config)]));
        let why = built.err().expect("no registry").to_string();
        assert!(
            why.starts_with("[providers.openai]: ") && !why.contains("hunter2"),
            "{why}"
        );
    }
}
