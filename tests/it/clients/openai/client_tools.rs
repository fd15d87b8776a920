//! Tools that the client executes: the run waits for their results, also over a restart.

use reqwest::Method;
use serde_json::{Value, json};

use crate::clients::openai::chat::{chunks, text};
use crate::support::app::{ApiResponse, TestApp, send};
use crate::support::eventually;
use crate::support::provider::answer::{calls, says};
use crate::support::provider::recorded_request::Wire;

fn tools() -> Value {
    json!([{"type": "function", "function": {
        "name": "weather", "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }}])
}

async fn solo() -> TestApp {
    TestApp::setup()
        .agent("solo", "tools = [\"list_directory\"]\nworkdir = \".\"")
        .spawn()
        .await
}

async fn chat(app: &TestApp, messages: &[Value], stream: bool) -> ApiResponse {
    let body = json!({"model": "solo", "messages": messages, "tools": tools(), "stream": stream});
    app.post("/v1/chat/completions", &body).await
}

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

fn result(call: &Value, text: &str) -> Value {
    json!({"role": "tool", "tool_call_id": call["id"], "content": text})
}

/// Starts a run that calls the client's tool, and returns the messages so far, the call and the run's id.
async fn waiting(app: &TestApp) -> (Vec<Value>, Value, String) {
    let weather = || ("weather", json!({"city": "Bonn"}));
    app.provider.will(
        "solo",
        [calls([("list_directory", json!({"path": "."})), weather()]).with_usage(10, 1)],
    );
    let mut messages = vec![user("How is it?")];
    let got = chat(app, &messages, false).await;
    assert_eq!(got.status, 200, "{}", got.text);
    let choice = got.json()["choices"][0].clone();
    assert_eq!(choice["finish_reason"], "tool_calls");
    let call = choice["message"]["tool_calls"][0].clone();
    assert_eq!(
        choice["message"]["tool_calls"].as_array().map(Vec::len),
        Some(1)
    );
    assert_eq!(call["function"]["name"], "weather");
    assert_eq!(call["function"]["arguments"], "{\"city\":\"Bonn\"}");
    messages.push(choice["message"].clone());
    (messages, call, got.header("x-run-id").to_owned())
}

#[tokio::test]
async fn the_run_continues_with_the_results_of_the_next_request() {
    let app = solo().await;
    let (mut messages, call, id) = waiting(&app).await;
    let run = app.find(&id).await;
    assert_eq!(
        (&run["status"], &run["waiting_for"]),
        (&json!("waiting"), &json!("client_tools"))
    );
    let metrics = app.get("/metrics").await.text;
    assert!(metrics.contains("\naxed_inputs_pending 1\n"), "{metrics}");

    app.provider
        .will("solo", [says("It rains.").with_usage(30, 4)]);
    messages.push(result(&call, "rain"));
    let got = chat(&app, &messages, false).await;
    assert_eq!(got.header("x-run-id"), id);
    let completion = got.json();
    assert_eq!(completion["choices"][0]["message"]["content"], "It rains.");
    assert_eq!(
        completion["usage"]["prompt_tokens"], 30,
        "only of this request"
    );
    let run = app.find(&id).await;
    assert_eq!(
        (&run["status"], &run["turns"], &run["tool_calls"]),
        (&json!("completed"), &json!(2), &json!(2))
    );
    let sent = app.provider.wait_for_request("solo", 2).await;
    assert_eq!(sent.tool_results().last().map(String::as_str), Some("rain"));
}

#[tokio::test]
async fn a_stream_ends_with_the_calls() {
    let app = solo().await;
    app.provider.will(
        "solo",
        [calls([("weather", json!({"city": "Bonn"}))]), says("Sun.")],
    );
    let mut messages = vec![user("How is it?")];
    let got = chunks(&chat(&app, &messages, true).await);
    let delta = got
        .iter()
        .find(|it| it["choices"][0]["delta"]["tool_calls"].is_array());
    let call = delta.expect("calls")["choices"][0]["delta"]["tool_calls"][0].clone();
    assert_eq!(call["index"], 0);
    assert_eq!(
        got[got.len() - 1]["choices"][0]["finish_reason"],
        "tool_calls"
    );
    messages.push(json!({"role": "assistant", "content": null, "tool_calls": [call]}));
    messages.push(result(&call, "sun"));
    assert_eq!(text(&chunks(&chat(&app, &messages, true).await)), "Sun.");
}

#[tokio::test]
async fn the_wait_survives_a_crash() {
    let mut app = solo().await;
    let (mut messages, call, id) = waiting(&app).await;
    app.crash_and_restart().await;
    app.provider.will("solo", [says("It rains.")]);
    messages.push(result(&call, "rain"));
    let got = chat(&app, &messages, false).await;
    assert_eq!(
        (got.status, got.header("x-run-id")),
        (200, id.as_str()),
        "{}",
        got.text
    );
    assert_eq!(got.json()["choices"][0]["message"]["content"], "It rains.");
    assert_eq!(
        app.find(&id).await["tool_calls"],
        2,
        "nothing is executed twice"
    );
}

#[tokio::test]
async fn results_for_an_ended_run_start_a_new_one() {
    let app = solo().await;
    let (mut messages, call, id) = waiting(&app).await;
    app.post(&format!("/runs/{id}/cancel?wait=180"), &json!({}))
        .await;
    app.provider.will("solo", [says("It rained.")]);
    messages.push(result(&call, "rain"));
    let got = chat(&app, &messages, false).await;
    assert_eq!(got.json()["choices"][0]["message"]["content"], "It rained.");
    assert_ne!(got.header("x-run-id"), id);
    let sent = app.provider.wait_for_request("solo", 2).await;
    assert_eq!(sent.tool_results(), ["rain"]);
}

#[tokio::test]
async fn results_of_a_chat_start_a_new_run_as_a_response() {
    let app = solo().await;
    let (mut messages, call, id) = waiting(&app).await;
    app.provider
        .will("solo", [says("A response."), says("It rains.")]);
    let input = json!([
        user("How is it?"),
        {"type": "function_call", "call_id": call["id"], "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": call["id"], "output": "rain"},
    ]);
    let tools = json!([{"type": "function", "name": "weather"}]);
    let body = json!({"model": "solo", "input": input, "tools": tools});
    let got = app.post("/v1/responses", &body).await;
    assert_eq!(got.status, 200, "{}", got.text);
    assert_ne!(got.header("x-run-id"), id);
    messages.push(result(&call, "rain"));
    let got = chat(&app, &messages, false).await;
    assert_eq!(got.header("x-run-id"), id, "{}", got.text);
    assert_eq!(got.json()["choices"][0]["message"]["content"], "It rains.");
}

#[tokio::test]
async fn a_client_that_sends_no_results_is_not_waited_for_forever() {
    let app = TestApp::setup()
        .agent("solo", "tools = [\"list_directory\"]\nworkdir = \".\"")
        .config("[clients]\ntool_wait = 10")
        .spawn()
        .await;
    let (_, _, id) = waiting(&app).await;
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run["status"], "cancelled");
    let reason = run["cancel_reason"].as_str().unwrap_or_default();
    assert!(reason.contains("clients.tool_wait"), "{reason}");
}

#[tokio::test]
async fn all_calls_of_a_reply_are_answered_at_once() {
    let app = solo().await;
    let weather = |city: &str| ("weather", json!({"city": city}));
    app.provider.will(
        "solo",
        [calls([weather("Bonn"), weather("Rome")]), says("Both.")],
    );
    let mut messages = vec![user("How is it?")];
    let message = chat(&app, &messages, false).await.json()["choices"][0]["message"].clone();
    let all = message["tool_calls"].as_array().expect("calls").clone();
    messages.push(message);
    messages.push(result(&all[1], "sun"));
    let refused = chat(&app, &messages, false).await;
    assert_eq!(refused.status, 400, "{}", refused.text);
    messages.push(result(&all[0], "rain"));
    let got = chat(&app, &messages, false).await;
    assert_eq!(got.json()["choices"][0]["message"]["content"], "Both.");
    let sent = app.provider.wait_for_request("solo", 2).await;
    assert_eq!(sent.tool_results(), ["rain", "sun"]);
}

#[tokio::test]
async fn results_with_a_key_are_given_once() {
    let app = solo().await;
    let (mut messages, call, id) = waiting(&app).await;
    app.provider
        .will("solo", [says("It rains.").with_usage(30, 4)]);
    messages.push(result(&call, "rain"));
    let continue_run = async |content: &str| {
        let mut messages = messages.clone();
        messages.push(user(content));
        let body = json!({"model": "solo", "messages": messages, "tools": tools()});
        let request = app.request(Method::POST, "/v1/chat/completions");
        send(request.header("Idempotency-Key", "k").json(&body)).await
    };
    let first = continue_run("Be brief.").await;
    assert_eq!((first.status, first.header("x-run-id")), (200, id.as_str()));
    assert_eq!(app.find(&id).await["status"], "completed");
    // The run has ended: without its key the request would start another one.
    let again = continue_run("Be brief.").await;
    assert_eq!(again.header("x-run-id"), id, "{}", again.text);
    assert_eq!(again.json(), first.json());
    let other = continue_run("Be long.").await;
    assert_eq!(other.status, 400, "{}", other.text);
    assert_eq!(app.provider.requests().len(), 2);
}

#[tokio::test]
async fn a_message_after_refused_results_is_added_once() {
    let app = solo().await;
    let weather = |city: &str| ("weather", json!({"city": city}));
    app.provider.will(
        "solo",
        [calls([weather("Bonn"), weather("Rome")]), says("Both.")],
    );
    let mut messages = vec![user("How is it?")];
    let message = chat(&app, &messages, false).await.json()["choices"][0]["message"].clone();
    let all = message["tool_calls"].as_array().expect("calls").clone();
    messages.push(message);
    let with = |results: &[Value]| {
        let mut messages = messages.clone();
        messages.extend_from_slice(results);
        messages.push(user("Be brief."));
        messages
    };
    let (rain, sun) = (result(&all[0], "rain"), result(&all[1], "sun"));
    for _ in 0..2 {
        let refused = chat(&app, &with(std::slice::from_ref(&sun)), false).await;
        assert_eq!(refused.status, 400, "{}", refused.text);
    }
    let got = chat(&app, &with(&[sun.clone(), rain]), false).await;
    assert_eq!(got.json()["choices"][0]["message"]["content"], "Both.");
    let sent = app.provider.wait_for_request("solo", 2).await;
    assert_eq!(sent.user_messages(), ["How is it?", "Be brief."]);
}

#[tokio::test]
async fn the_time_for_results_stands_still_while_a_run_is_paused() {
    let mut app = TestApp::setup()
        .agent("solo", "tools = [\"list_directory\"]\nworkdir = \".\"")
        .config("[clients]\ntool_wait = 20")
        .spawn()
        .await;
    let (mut messages, call, id) = waiting(&app).await;
    let paused = app.post(&format!("/runs/{id}/pause"), &json!({})).await;
    assert!([200, 202].contains(&paused.status), "{}", paused.text);
    let later = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(21);
    eventually("more time than it waits", async || {
        (jiff::Timestamp::now() > later).then_some(())
    })
    .await;
    app.crash_and_restart().await;
    app.post(&format!("/runs/{id}/resume"), &json!({})).await;
    app.provider.will("solo", [says("It rains.")]);
    messages.push(result(&call, "rain"));
    let got = chat(&app, &messages, false).await;
    assert_eq!(got.header("x-run-id"), id, "{}", got.text);
    assert_eq!(got.json()["choices"][0]["message"]["content"], "It rains.");
}

#[tokio::test]
async fn a_name_of_the_agents_own_tools_is_refused() {
    let app = solo().await;
    let tool = json!([{"type": "function", "function": {"name": "list_directory"}}]);
    let body = json!({"model": "solo", "messages": [user("hi")], "tools": tool});
    let got = app.post("/v1/chat/completions", &body).await;
    assert_eq!(got.status, 400, "{}", got.text);
    assert_eq!(got.json()["error"]["param"], "tools");
}

/// Qwen Code has a `tool_search`, which axed offers only to agents with many MCP tools.
#[tokio::test]
async fn names_of_tools_that_the_agent_does_not_have_are_the_clients() {
    let app = solo().await;
    let names = [
        "tool_search",
        "tool_call",
        "call_agent",
        "recall",
        "run_command",
    ];
    let tools = names.map(|name| json!({"type": "function", "function": {"name": name}}));
    app.provider.will(
        "solo",
        [calls([(
            "tool_call",
            json!({"name": "a__b", "arguments": {}}),
        )])],
    );
    let body = json!({"model": "solo", "messages": [user("hi")], "tools": tools});
    let got = app.post("/v1/chat/completions", &body).await;
    assert_eq!(got.status, 200, "{}", got.text);
    let call = &got.json()["choices"][0]["message"]["tool_calls"][0]["function"];
    assert_eq!(call["name"], "tool_call");
    let request = app.provider.wait_for_request("solo", 1).await;
    let offered = request.tool_names();
    for name in names {
        assert!(offered.iter().any(|it| it == name), "{name} in {offered:?}");
    }
}

/// As Codex CLI sends them.
#[tokio::test]
async fn tools_that_are_no_functions_are_left_out_with_a_warning() {
    let app = solo().await;
    app.provider.always("solo", |_| says("ok"));
    let others = [
        json!({"type": "namespace", "name": "mcp__x", "tools": [{"type": "function", "name": "t"}]}),
        json!({"type": "web_search", "external_web_access": false}),
        json!({"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}}),
        json!({"type": "local_shell"}),
    ];
    let chat = [others.to_vec(), tools().as_array().expect("tools").clone()].concat();
    let flat = json!({"type": "function", "name": "weather", "parameters": {"type": "object"}});
    let flat = [others.to_vec(), vec![flat]].concat();
    for (path, body) in [
        (
            "/v1/chat/completions",
            json!({"model": "solo", "messages": [user("hi")], "tools": chat}),
        ),
        (
            "/v1/responses",
            json!({"model": "solo", "input": "hi", "tools": flat}),
        ),
    ] {
        let got = app.post(path, &body).await;
        assert_eq!(got.status, 200, "{}", got.text);
        let run = app.find(got.header("x-run-id")).await;
        let warning = &run["warnings"][0];
        assert_eq!(warning["code"], "tool_not_offered");
        let message = warning["message"].as_str().expect("a message");
        for kind in ["namespace", "web_search", "custom", "local_shell"] {
            assert!(message.contains(kind), "{message}");
        }
    }
    let requests = app.provider.requests();
    for request in requests {
        assert_eq!(request.tool_names(), ["list_directory", "weather"]);
    }
}

#[tokio::test]
async fn schemas_are_made_plain_before_a_provider_sees_them() {
    let app = solo().await;
    app.provider.always("solo", |_| says("ok"));
    let schemas = [
        json!({"properties": {"a": "string"}, "required": null}),
        json!([]),
        json!({"type": "object", "properties": []}),
        json!({"oneOf": [{"properties": {"a": {}}, "required": ["a"]}]}),
        json!({"type": "array"}),
    ];
    let tools = schemas.iter().enumerate().map(|(at, schema)| {
        json!({"type": "function", "function": {"name": format!("t{at}"), "parameters": schema}})
    });
    let tools: Vec<Value> = tools.collect();
    let body = json!({"model": "solo", "messages": [user("hi")], "tools": tools});
    let got = app.post("/v1/chat/completions", &body).await;
    assert_eq!(got.status, 200, "{}", got.text);
    let request = app.provider.requests().remove(0);
    let names = request.tool_names();
    assert_eq!(names, ["list_directory", "t0", "t1", "t2", "t3"]);
    for tool in request.tools() {
        let schema = &tool["parameters"];
        assert_eq!(schema["type"], "object", "{tool}");
        let is_plain = schema["properties"].is_object() && schema.get("oneOf").is_none();
        assert!(is_plain, "{tool}");
    }
    let run = app.find(got.header("x-run-id")).await;
    let warning = run["warnings"][0]["message"].as_str();
    assert!(
        warning.is_some_and(|it| it.contains("\"t4\"")),
        "{warning:?}"
    );
}

/// What a model may send instead of an object.
pub const NO_OBJECTS: [&str; 4] = [
    "{\"city\": \"Bonn",
    "Bonn, \"please\"",
    "{'city': 'Bonn'}",
    "[\"Bonn\"]",
];

#[tokio::test]
async fn arguments_that_are_no_object_reach_the_client_as_they_came() {
    let mut app = solo().await;
    for sent in NO_OBJECTS {
        for stream in [false, true] {
            app.provider.will(
                "solo",
                [calls([("weather", json!(sent))]), says("It rains.")],
            );
            let mut messages = vec![user("How is it?")];
            let got = chat(&app, &messages, stream).await;
            let call = match stream {
                false => got.json()["choices"][0]["message"]["tool_calls"][0].clone(),
                true => {
                    let chunks = chunks(&got);
                    let delta =
                        |chunk: &Value| chunk["choices"][0]["delta"]["tool_calls"][0].clone();
                    let call = chunks.iter().map(delta).find(Value::is_object);
                    call.expect("a call")
                }
            };
            assert_eq!(call["function"]["arguments"], sent);
            let id = got.header("x-run-id").to_owned();
            let recorded = app.get(&format!("/runs/{id}/messages")).await.json();
            assert_eq!(recorded["data"][1]["tool_calls"][0]["arguments"], sent);
            let events = app.get(&format!("/runs/{id}/events")).await.json();
            let events = events["data"].as_array().expect("events").iter();
            let started = events.filter(|it| it["type"] == "tool.started");
            let arguments: Vec<&Value> = started.map(|it| &it["arguments"]).collect();
            assert_eq!(arguments, [sent]);

            if stream {
                app.crash_and_restart().await;
            }
            messages.push(json!({"role": "assistant", "content": null, "tool_calls": [call]}));
            messages.push(result(&call, "rain"));
            let got = chat(&app, &messages, false).await;
            assert_eq!(got.header("x-run-id"), id, "{}", got.text);
            assert_eq!(got.json()["choices"][0]["message"]["content"], "It rains.");
            assert_eq!(app.find(&id).await["tool_calls"], 1);
        }
    }
}

#[tokio::test]
async fn arguments_that_are_no_object_go_back_as_empty_ones() {
    let mut setup = TestApp::setup();
    for wire in Wire::ALL {
        let settings = format!("model = \"{}/solo\"", wire.name());
        setup = setup.agent(&format!("{}-solo", wire.name()), &settings);
    }
    let app = setup.spawn().await;
    for wire in Wire::ALL {
        for sent in NO_OBJECTS {
            app.provider.will(
                "solo",
                [calls([("weather", json!(sent))]), says("It rains.")],
            );
            let agent = format!("{}-solo", wire.name());
            let mut messages = vec![user("How is it?")];
            let body = |messages: &[Value]| json!({"model": agent, "messages": messages, "tools": tools()});
            let got = app.post("/v1/chat/completions", &body(&messages)).await;
            let message = got.json()["choices"][0]["message"].clone();
            let call = message["tool_calls"][0].clone();
            assert_eq!(call["function"]["arguments"], sent, "{wire:?}");
            messages.extend([message, result(&call, "rain")]);
            let got = app.post("/v1/chat/completions", &body(&messages)).await;
            assert_eq!(
                got.json()["choices"][0]["message"]["content"],
                "It rains.",
                "{wire:?}"
            );
            let request = app.provider.requests().pop().expect("a request");
            let call = match wire {
                Wire::Anthropic => request.messages()[1]["content"][0]["input"].clone(),
                Wire::Responses => request.body["input"][1]["arguments"].clone(),
                Wire::Openai | Wire::Ollama => {
                    request.messages()[1]["tool_calls"][0]["function"]["arguments"].clone()
                }
            };
            let accepted = match wire {
                Wire::Openai | Wire::Responses => json!("{}"),
                Wire::Anthropic | Wire::Ollama => json!({}),
            };
            assert_eq!(call, accepted, "{wire:?}: {}", request.body);
        }
    }
}
