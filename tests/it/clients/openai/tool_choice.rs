//! `tool_choice` for the tools of the client, on each wire.

use serde_json::{Value, json};

use crate::support::app::{ApiResponse, TestApp};
use crate::support::events::assert_complete;
use crate::support::provider::answer::{calls, says};

async fn complete(app: &TestApp, agent: &str, choice: Value) -> ApiResponse {
    let body = json!({
        "model": agent, "messages": [{"role": "user", "content": "go"}], "tool_choice": choice,
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}],
    });
    app.post("/v1/chat/completions", &body).await
}

async fn respond(app: &TestApp, agent: &str, choice: Value) -> ApiResponse {
    let body = json!({
        "model": agent, "input": "go", "tool_choice": choice,
        "tools": [{"type": "function", "name": "weather", "parameters": {"type": "object"}}],
    });
    app.post("/v1/responses", &body).await
}

#[tokio::test]
async fn each_wire_has_its_own_form_of_a_choice() {
    let named = json!({"type": "function", "function": {"name": "weather"}});
    let own_named = json!({"type": "function", "name": "weather"});
    for (model, required, expected) in [
        (
            "anthropic/solo",
            json!({"type": "any"}),
            json!({"type": "tool", "name": "weather"}),
        ),
        ("openai/solo", json!("required"), named.clone()),
        ("responses/solo", json!("required"), own_named.clone()),
    ] {
        let toml = format!("model = \"{model}\"");
        let app = TestApp::setup().agent("solo", &toml).spawn().await;
        app.provider
            .always("solo", |_| calls([("weather", json!({}))]));
        for (at, choice, sent) in [
            (1, json!("required"), required),
            (2, named.clone(), expected),
            (3, json!("auto"), Value::Null),
        ] {
            let got = complete(&app, "solo", choice).await;
            assert_eq!(got.status, 200, "{}", got.text);
            let request = app.provider.wait_for_request("solo", at).await;
            assert_eq!(request.body["tool_choice"], sent, "{model}");
        }
        let got = respond(&app, "solo", own_named.clone()).await.json();
        assert_eq!(got["tool_choice"], own_named);
        assert_eq!(got["output"][0]["name"], "weather");
    }
}

/// Structured output through a tool, as instructor, LangChain and pydantic-ai request it: no result ever comes.
#[tokio::test]
async fn a_run_whose_call_was_forced_is_completed() {
    for model in ["anthropic/solo", "openai/solo", "responses/solo"] {
        let toml = format!("model = \"{model}\"");
        let app = TestApp::setup().agent("solo", &toml).spawn().await;
        app.provider.will(
            "solo",
            [
                calls([("weather", json!({"city": "Bonn"}))]),
                calls([("weather", json!({"city": "Ulm"}))]),
                says("It is warm."),
                calls([("weather", json!({"city": "Kiel"}))]),
                says("It is cold."),
            ],
        );
        let named = json!({"type": "function", "function": {"name": "weather"}});

        let got = complete(&app, "solo", named).await;

        let choice = got.json()["choices"][0].clone();
        assert_eq!(choice["finish_reason"], "tool_calls", "{model}");
        let call = &choice["message"]["tool_calls"][0];
        assert_eq!(call["function"]["arguments"], "{\"city\":\"Bonn\"}");
        let run = app.find(got.header("x-run-id")).await;
        assert_eq!(run["status"], "completed");
        assert_complete(&run.events().await);

        // A client that sends a result nevertheless begins another run with it.
        let got = complete(&app, "solo", json!("required")).await;
        let message = got.json()["choices"][0]["message"].clone();
        let result = json!({"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "warm"});
        let messages = json!([{"role": "user", "content": "go"}, message, result]);
        let body = json!({"model": "solo", "messages": messages});
        let next = app.post("/v1/chat/completions", &body).await;
        assert_eq!(
            next.json()["choices"][0]["message"]["content"],
            "It is warm."
        );
        assert_ne!(next.header("x-run-id"), got.header("x-run-id"));

        let got = respond(&app, "solo", json!("required")).await;
        let response = got.json();
        assert_eq!(response["status"], "completed");
        let call = &response["output"][0];
        assert_eq!(call["name"], "weather");
        let run = app.find(got.header("x-run-id")).await;
        assert_eq!(run["status"], "completed");
        let output =
            json!([{"type": "function_call_output", "call_id": call["call_id"], "output": "cold"}]);
        let body =
            json!({"model": "solo", "previous_response_id": response["id"], "input": output});
        let next = app.post("/v1/responses", &body).await;
        assert_eq!(next.status, 200, "{}", next.text);
        assert_eq!(
            next.json()["output"][0]["content"][0]["text"],
            "It is cold."
        );
    }
}

#[tokio::test]
async fn only_the_first_reply_has_to_call_a_tool() {
    let app = TestApp::setup()
        .agent("solo", "tools = [\"list_directory\"]\nworkdir = \".\"")
        .spawn()
        .await;
    let look = calls([("list_directory", json!({"path": "."}))]);
    app.provider.will("solo", [look, says("done")]);
    let got = complete(&app, "solo", json!("required")).await;
    assert_eq!(got.json()["choices"][0]["message"]["content"], "done");
    let first = app.provider.wait_for_request("solo", 1).await;
    assert_eq!(first.body["tool_choice"], json!({"type": "any"}));
    let second = app.provider.wait_for_request("solo", 2).await;
    assert!(second.body["tool_choice"].is_null());
}

#[tokio::test]
async fn a_model_that_has_to_call_a_tool_does_not_think() {
    let app = TestApp::setup()
        .agent("solo", "effort = \"high\"")
        .spawn()
        .await;
    app.provider
        .will("solo", [calls([("weather", json!({}))]), says("done")]);
    complete(&app, "solo", json!("required")).await;
    complete(&app, "solo", json!("auto")).await;
    let first = &app.provider.wait_for_request("solo", 1).await.body;
    assert_eq!(first["output_config"], json!({"effort": "high"}));
    assert!(first["thinking"].is_null());
    let second = &app.provider.wait_for_request("solo", 2).await.body;
    assert_eq!(second["thinking"], json!({"type": "adaptive"}));
}

#[tokio::test]
async fn a_model_that_decides_about_tools_itself_refuses_a_choice() {
    let app = TestApp::setup()
        .config(
            "[providers.gateway]\nkind = \"openai\"\nbase_url = \"{provider}\"\napi_key = \"k\"\n\
             [providers.gateway.models.\"claude-sonnet-5-5\"]\nforced_tools = true",
        )
        .agent("opus", "model = \"anthropic/claude-opus-5-5\"")
        .agent("sonnet", "model = \"anthropic/claude-sonnet-5-5\"")
        .agent("served", "model = \"gateway/anthropic/claude-sonnet-5.5\"")
        .agent("overridden", "model = \"gateway/claude-sonnet-5-5\"")
        .spawn()
        .await;
    for (agent, model) in [
        ("opus", "anthropic/claude-opus-5-5"),
        ("sonnet", "anthropic/claude-sonnet-5-5"),
        ("served", "gateway/anthropic/claude-sonnet-5.5"),
    ] {
        let got = complete(&app, agent, json!("required")).await;
        assert_eq!(got.status, 400, "{}", got.text);
        let message = got.json()["error"]["message"].to_string();
        let expected = format!("{model} decides itself whether it calls a tool");
        assert!(message.contains(&expected), "{message}");
    }
    app.provider
        .will("claude-sonnet-5-5", [calls([("weather", json!({}))])]);
    let got = complete(&app, "overridden", json!("required")).await;
    assert_eq!(got.status, 200, "{}", got.text);
    let sent = app.provider.wait_for_request("claude-sonnet-5-5", 1).await;
    assert_eq!(sent.body["tool_choice"], "required");
}

#[tokio::test]
async fn a_wire_without_choices_refuses_them() {
    let app = TestApp::setup()
        .agent("solo", "model = \"ollama/solo\"")
        .agent("second", "fallback_models = [\"ollama/solo\"]")
        .spawn()
        .await;
    for agent in ["solo", "second"] {
        for got in [
            complete(&app, agent, json!("required")).await,
            respond(&app, agent, json!("required")).await,
        ] {
            assert_eq!(got.status, 400, "{}", got.text);
            let error = &got.json()["error"];
            assert_eq!(error["param"], "tool_choice");
            let message = error["message"].as_str().expect("a message");
            assert!(message.contains("ollama/solo"), "{message}");
        }
    }
}
