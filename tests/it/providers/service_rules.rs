//! What single services require beyond OpenAI's chat API, in conversations that began with another model too.

use axed::providers::json_prompt::JSON_PROMPT;
use serde_json::{Value, json};

use crate::support::app::TestApp;
use crate::support::gate::Gate;
use crate::support::provider::answer::{ScriptedAnswer, calls, fails, raw, says};
use crate::support::provider::recorded_request::RecordedRequest;

fn chat_reply(message: Value) -> ScriptedAnswer {
    let body = json!({
        "id": "1", "object": "chat.completion", "created": 0, "model": "m",
        "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    });
    raw(200, "application/json", body.to_string())
}

/// The signature of the first call of each reply with calls.
fn signatures(seen: &RecordedRequest) -> Vec<Value> {
    let messages = seen.messages().iter();
    let first_calls = messages.filter_map(|message| message["tool_calls"].get(0));
    first_calls
        .map(|call| call["extra_content"]["google"]["thought_signature"].clone())
        .collect()
}

/// Answers as Gemini does, which refuses calls without a signature.
fn gemini(seen: &RecordedRequest) -> ScriptedAnswer {
    match signatures(seen).iter().all(Value::is_string) {
        true => says("done"),
        false => fails(
            400,
            "Function call is missing a thought_signature in functionCall parts.",
        ),
    }
}

/// A reply of Gemini with so many calls, the first of which is signed.
fn signed_calls(count: usize) -> ScriptedAnswer {
    let calls = (0..count).map(|index| {
        let mut call = json!({
            "id": format!("call_{index}"), "type": "function",
            "function": {"name": "list_directory", "arguments": "{}"},
        });
        if index == 0 {
            call["extra_content"] = json!({"google": {"thought_signature": "c2lnbmVk"}});
        }
        call
    });
    let calls: Vec<Value> = calls.collect();
    chat_reply(json!({"role": "assistant", "content": null, "tool_calls": calls}))
}

#[tokio::test]
async fn gemini_gets_signatures_with_calls_that_it_did_not_sign() {
    let common = "fallback_models = [\"gemini/flash\"]\ntools = [\"list_directory\"]\n[retry]\nmax_retries = 0";
    let app = TestApp::setup()
        .config("[providers.gemini]\nbase_url = \"{provider}\"\napi_key = \"k\"")
        .config("[runs]\nmax_calls = 2")
        .agent("pro", &format!("model = \"gemini/pro\"\n{common}"))
        .agent("claude", common)
        .agent(
            "many",
            "model = \"gemini/many\"\ntools = [\"list_directory\"]",
        )
        .spawn()
        .await;
    let busy = || fails(503, "overloaded");
    app.provider.will("pro", [signed_calls(2), busy()]);
    let call = calls([("list_directory", json!({}))]);
    app.provider.will("claude", [call, busy()]);
    app.provider.will("many", [signed_calls(4)]);
    for model in ["flash", "many"] {
        app.provider.always(model, gemini);
    }

    for agent in ["pro", "claude", "many"] {
        assert_eq!(app.run(agent, "go").await.output(), "done", "{agent}");
    }

    let own = app.provider.wait_for_request("pro", 2).await;
    assert_eq!(signatures(&own), ["c2lnbmVk"]);
    let foreign = app.provider.wait_for_request("flash", 1).await;
    assert_eq!(signatures(&foreign), ["skip_thought_signature_validator"]);
}

/// Why Mistral refuses a request.
fn mistral_refusal(seen: &RecordedRequest) -> Option<&'static str> {
    let messages = seen.messages();
    let calls = |message: &Value| {
        let calls = message["tool_calls"].as_array();
        calls.cloned().unwrap_or_default()
    };
    let ids: Vec<Value> = (messages.iter().flat_map(calls))
        .map(|call| call["id"].clone())
        .collect();
    let results = messages.iter().filter(|message| message["role"] == "tool");
    let result_ids: Vec<Value> = results
        .map(|message| message["tool_call_id"].clone())
        .collect();
    let is_id = |id: &Value| {
        let id = id.as_str().unwrap_or_default();
        id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric())
    };
    let is_empty = |message: &Value| {
        let text = message["content"].as_str().unwrap_or_default();
        message["role"] == "assistant" && text.is_empty() && calls(message).is_empty()
    };
    let is_user_after_tool =
        |pair: &[Value]| pair[0]["role"] == "tool" && pair[1]["role"] == "user";
    if seen.body.get("stream_options").is_some() {
        Some("Extra inputs are not permitted")
    } else if !ids.iter().all(is_id) {
        Some("Tool call id must be a-z, A-Z, 0-9, with a length of 9.")
    } else if ids != result_ids {
        Some("Not the same number of function calls and responses")
    } else if messages.windows(2).any(is_user_after_tool) {
        Some("Unexpected role 'user' after role 'tool'")
    } else if messages.iter().any(is_empty) {
        Some("Assistant message must have either content or tool_calls, but not none.")
    } else {
        None
    }
}

fn mistral(seen: &RecordedRequest) -> ScriptedAnswer {
    match mistral_refusal(seen) {
        Some(message) => fails(400, message),
        None => says("done"),
    }
}

/// A stream of Mistral, which reports its usage unasked.
fn mistral_stream(delta: &Value) -> ScriptedAnswer {
    let chunk = |delta: &Value, finish_reason: Value, usage: Value| {
        json!({
            "id": "1", "object": "chat.completion.chunk", "created": 0, "model": "large", "usage": usage,
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}],
        })
    };
    let usage = json!({"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15});
    let chunks = [
        chunk(delta, Value::Null, Value::Null),
        chunk(&json!({"content": ""}), json!("stop"), usage),
    ];
    let events = chunks.map(|chunk| format!("data: {chunk}\n\n")).concat();
    raw(
        200,
        "text/event-stream",
        format!("{events}data: [DONE]\n\n"),
    )
}

const MISTRAL: &str = "[providers.mistral]\nbase_url = \"{provider}\"\napi_key = \"k\"";

#[tokio::test]
async fn mistral_gets_a_message_to_a_streaming_run_after_an_assistants() {
    let app = TestApp::setup()
        .config(MISTRAL)
        .agent(
            "solo",
            "model = \"mistral/large\"\nstream = true\ntools = [\"list_directory\"]",
        )
        .spawn()
        .await;
    let gate = Gate::closed();
    let call = json!({"id": "aB3xK9mP2", "index": 0, "function": {"name": "list_directory", "arguments": "{}"}});
    let call = json!({"role": "assistant", "content": "", "tool_calls": [call]});
    app.provider.will(
        "large",
        [
            mistral_stream(&call).after_gate(&gate),
            mistral_stream(&json!({"role": "assistant", "content": "done"})),
        ],
    );
    let run = app.start("solo", "go").await;
    app.provider.wait_for_request("large", 1).await;
    let path = format!("/runs/{}/messages", run.id());
    let added = app.post(&path, &json!({"content": "be brief"})).await;
    assert_eq!(added.status, 202, "{}", added.text);
    gate.open();

    let run = run.wait_for_end().await;

    assert_eq!((run.output(), run.usage()), ("done", (20, 10, 1)));
    for seen in app.provider.requests() {
        assert_eq!(mistral_refusal(&seen), None, "{}", seen.body);
    }
    let steered = app.provider.wait_for_request("large", 2).await;
    assert_eq!(steered.user_messages(), ["go", "be brief"]);
    assert_eq!(steered.messages()[1]["tool_calls"][0]["id"], "aB3xK9mP2");
}

#[tokio::test]
async fn mistral_gets_calls_of_another_service_and_no_empty_reply() {
    let app = TestApp::setup()
        .config(MISTRAL)
        .agent(
            "claude",
            "fallback_models = [\"mistral/large\"]\ntools = [\"list_directory\"]\n[retry]\nmax_retries = 0",
        )
        .agent("talker", "model = \"mistral/talker\"")
        .spawn()
        .await;
    let look = || ("list_directory", json!({}));
    app.provider.will(
        "claude",
        [calls([look(), look()]), fails(503, "overloaded")],
    );
    app.provider.always("large", mistral);
    assert_eq!(app.run("claude", "go").await.output(), "done");

    let empty = chat_reply(json!({"role": "assistant", "content": ""}));
    app.provider.will("talker", [empty]);
    app.provider.always("talker", mistral);
    for _ in 0..2 {
        let body = json!({"input": "go", "session": "talk"});
        let run = app.run_with("talker", body).await;
        assert_eq!(run.status(), "completed", "{run:?}");
    }
    let last = app.provider.wait_for_request("talker", 2).await;
    assert_eq!(last.user_messages(), ["go\n\ngo"]);
}

#[tokio::test]
async fn only_openai_is_sent_a_prompt_for_json_besides_the_format() {
    let format = "[params.response_format]\ntype = \"json_object\"";
    let app = TestApp::setup()
        .config("[providers.gemini]\nbase_url = \"{provider}\"\napi_key = \"k\"")
        .agent("open", &format!("model = \"openai/open\"\n{format}"))
        .agent("flash", &format!("model = \"gemini/flash\"\n{format}"))
        .agent("new", &format!("model = \"responses/new\"\n{format}"))
        .spawn()
        .await;
    for (agent, is_openai) in [("open", true), ("flash", false), ("new", false)] {
        app.provider.will(agent, [says("{}")]);
        assert_eq!(app.run(agent, "go").await.status(), "completed");
        let sent = app
            .provider
            .wait_for_request(agent, 1)
            .await
            .body
            .to_string();
        assert!(sent.contains("json_object"), "{sent}");
        assert_eq!(sent.contains(JSON_PROMPT), is_openai, "{sent}");
    }
}
