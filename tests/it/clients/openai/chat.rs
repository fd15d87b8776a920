//! `/v1/chat/completions`, without tools of the client.

use serde_json::{Value, json};

use crate::support::app::{ApiResponse, TestApp, send};
use crate::support::provider::answer::{delegates, fails, says};

/// One chat completion of the agent `solo`.
async fn chat(app: &TestApp, body: Value) -> ApiResponse {
    let mut whole = json!({"model": "solo", "messages": [{"role": "user", "content": "hi"}]});
    for (key, value) in body.as_object().expect("an object") {
        whole[key] = value.clone();
    }
    app.post("/v1/chat/completions", &whole).await
}

async fn solo(toml: &str) -> TestApp {
    TestApp::setup().agent("solo", toml).spawn().await
}

/// The chunks of a stream, without comments.
pub fn chunks(response: &ApiResponse) -> Vec<Value> {
    assert_eq!(response.header("content-type"), "text/event-stream");
    let data = response
        .text
        .lines()
        .filter_map(|it| it.strip_prefix("data: "));
    let mut data: Vec<&str> = data.collect();
    assert_eq!(data.pop(), Some("[DONE]"), "{}", response.text);
    data.iter()
        .map(|it| serde_json::from_str(it).expect("JSON"))
        .collect()
}

/// The streamed text.
pub fn text(chunks: &[Value]) -> String {
    let texts = chunks
        .iter()
        .filter_map(|it| it["choices"][0]["delta"]["content"].as_str());
    texts.collect()
}

#[tokio::test]
async fn a_completion_is_a_run() {
    let app = solo("system_prompt = \"Be kind.\"").await;
    app.provider.will("solo", [says("hello").with_usage(11, 3)]);
    let messages = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "developer", "content": [{"type": "text", "text": "And clear."}]},
        {"role": "user", "content": [{"type": "text", "text": "c"}]},
    ]);
    let body = json!({
        "messages": messages, "max_completion_tokens": 77, "user": "kim", "metadata": {"team": "blue"},
        "logit_bias": {}, "seed": 7,
    });
    let got = chat(&app, body).await;
    assert_eq!(got.status, 200, "{}", got.text);
    let completion = got.json();
    assert_eq!(completion["object"], "chat.completion");
    assert_eq!(completion["model"], "solo");
    let choice = &completion["choices"][0];
    assert_eq!(choice["message"]["content"], "hello");
    assert_eq!(choice["finish_reason"], "stop");
    let usage = &completion["usage"];
    assert_eq!(
        (
            &usage["prompt_tokens"],
            &usage["completion_tokens"],
            &usage["total_tokens"]
        ),
        (&json!(11), &json!(3), &json!(14))
    );

    let run = app.find(got.header("x-run-id")).await;
    assert_eq!(run["status"], "completed");
    assert_eq!(run["labels"], json!({"team": "blue", "user": "kim"}));
    assert_eq!(run["input"], "c");
    let request = app.provider.wait_for_request("solo", 1).await;
    assert_eq!(
        request.system(),
        "Be kind.\n\n## Instructions\n\nBe brief.\n\nAnd clear."
    );
    assert_eq!(request.user_messages(), ["a", "c"]);
    assert_eq!(request.body["max_tokens"], 77);
    let recorded = app.get(&format!("/runs/{}/messages", run.id())).await;
    assert!(recorded.text.contains("\"b\""), "{}", recorded.text);
}

#[tokio::test]
async fn metadata_has_the_length_that_openai_allows() {
    let app = solo("").await;
    app.provider.always("solo", |_| says("ok"));
    for path in ["chat/completions", "responses"] {
        let send = async |length: usize| {
            let value = "ä".repeat(length);
            let body = json!({
                "model": "solo", "messages": [{"role": "user", "content": "hi"}], "input": "hi",
                "metadata": {"trace": value},
            });
            app.post(&format!("/v1/{path}"), &body).await
        };
        let longest = send(512).await;
        assert_eq!(longest.status, 200, "{}", longest.text);
        let run = app.find(longest.header("x-run-id")).await;
        assert_eq!(run["labels"]["trace"], "ä".repeat(512));
        let refused = send(513).await;
        assert_eq!(refused.status, 400, "{}", refused.text);
    }
}

/// A client sends back what a model was cut in.
#[tokio::test]
async fn broken_arguments_in_the_history_are_empty() {
    let app = solo("").await;
    app.provider.always("solo", |_| says("ok"));
    let user = json!({"role": "user", "content": "hi"});
    for (arguments, sent) in [
        (json!("{\"zone\": "), json!({})),
        (json!("[1]"), json!({})),
        (json!("zone"), json!({})),
        (json!(null), json!({})),
        (json!(""), json!({})),
        (json!(" {\"zone\":1} "), json!({"zone": 1})),
        (json!("\"{\\\"zone\\\":1}\""), json!({"zone": 1})),
        (json!({"zone": 1}), json!({"zone": 1})),
    ] {
        let call = json!({"name": "now", "arguments": arguments});
        let messages = json!([
            user,
            {"role": "assistant", "content": null, "tool_calls": [{"id": "c1", "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": "c1", "content": "cut"},
            user,
        ]);
        let got = chat(&app, json!({"messages": messages})).await;
        assert_eq!(got.status, 200, "{arguments}: {}", got.text);
        let input = json!([
            user,
            {"type": "function_call", "call_id": "c1", "name": "now", "arguments": arguments},
            {"type": "function_call_output", "call_id": "c1", "output": "cut"},
            user,
        ]);
        let response = json!({"model": "solo", "input": input});
        let got = app.post("/v1/responses", &response).await;
        assert_eq!(got.status, 200, "{arguments}: {}", got.text);
        let requests = app.provider.requests();
        for request in requests.iter().rev().take(2) {
            // Without tools, a call is sent as a text.
            let call = &request.body["messages"][1]["content"][0];
            assert_eq!(
                call["text"],
                format!("[Calls now with {sent}]"),
                "{arguments}"
            );
        }
    }
}

#[tokio::test]
async fn a_stream_has_the_chunks_that_clients_expect() {
    let app = solo("").await;
    app.provider
        .will("solo", [says("one two three").with_usage(5, 7)]);
    let options = json!({"stream": true, "stream_options": {"include_usage": true}});
    let got = chat(&app, options).await;
    let chunks = chunks(&got);
    let first = &chunks[0];
    assert_eq!(first["object"], "chat.completion.chunk");
    assert_eq!(first["choices"][0]["delta"]["role"], "assistant");
    assert_eq!(first["usage"], Value::Null);
    assert_eq!(text(&chunks), "one two three");
    let [.., end, usage] = chunks.as_slice() else {
        panic!("{chunks:?}")
    };
    assert_eq!(end["choices"][0]["finish_reason"], "stop");
    assert_eq!(usage["choices"], json!([]));
    assert_eq!(usage["usage"]["total_tokens"], 12);
    assert!(chunks.iter().all(|it| it["id"] == first["id"]));
    assert!(!got.header("x-run-id").is_empty());
}

#[tokio::test]
async fn a_tree_is_one_completion_with_the_usage_of_all() {
    let app = TestApp::setup()
        .agent("solo", "sub_agents = [\"helper\"]")
        .agent("helper", "")
        .spawn()
        .await;
    let delegates = || delegates([("helper", "look")]).with_usage(10, 1);
    app.provider.will(
        "solo",
        [
            delegates(),
            says("done").with_usage(20, 2),
            delegates(),
            says("done"),
        ],
    );
    app.provider
        .always("helper", |_| says("found").with_usage(100, 5));
    let got = chat(&app, json!({})).await.json();
    assert_eq!(got["choices"][0]["message"]["content"], "done");
    assert_eq!(got["usage"]["prompt_tokens"], 130);
    assert_eq!(got["usage"]["completion_tokens"], 8);
    let streamed = chat(&app, json!({"stream": true})).await;
    assert_eq!(
        text(&chunks(&streamed)),
        "done",
        "the child's text is not the answer"
    );
}

#[tokio::test]
async fn json_is_checked_and_corrected_before_it_is_streamed() {
    let app = solo("").await;
    app.provider
        .will("solo", [says("no json"), says("{\"n\":1}")]);
    let schema =
        json!({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]});
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "strict": true, "schema": schema}});
    let got = chat(&app, json!({"response_format": format, "stream": true})).await;
    assert_eq!(text(&chunks(&got)), "{\"n\":1}");
}

#[tokio::test]
async fn pictures_come_as_data_urls() {
    const PIXEL: &str = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==";
    let app = solo("").await;
    app.provider.will("solo", [says("a dot")]);
    let picture = |url: &str| {
        json!([{"role": "user", "content": [
            {"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": url}},
        ]}])
    };
    let url = format!("data:image/png;base64,{PIXEL}");
    let got = chat(&app, json!({"messages": picture(&url)})).await;
    assert_eq!(got.status, 200, "{}", got.text);
    let sent = app.provider.wait_for_request("solo", 1).await;
    assert!(sent.body.to_string().contains(PIXEL), "{}", sent.body);
    for url in ["data:text/plain,x", "http://127.0.0.1:1/x.png", "ftp://a/b"] {
        let refused = chat(&app, json!({"messages": picture(url)})).await;
        assert_eq!(refused.status, 400, "{url}: {}", refused.text);
        assert_eq!(
            refused.json()["error"]["param"],
            "messages[0].content[1].image_url"
        );
    }
}

#[tokio::test]
async fn wrong_requests_have_the_shape_of_openai() {
    let app = solo("").await;
    for (body, status, param, code) in [
        (
            json!({"model": "nobody"}),
            404,
            Value::Null,
            "agent_not_found",
        ),
        (
            json!({"messages": []}),
            400,
            json!("messages"),
            "invalid_field",
        ),
        (json!({"n": 2}), 400, json!("n"), "invalid_field"),
        (
            json!({"max_tokens": 5, "max_completion_tokens": 6}),
            400,
            json!("max_tokens"),
            "invalid_field",
        ),
        (
            json!({"temperature": "hot"}),
            400,
            json!("temperature"),
            "invalid_field",
        ),
        (
            json!({"stream_options": {}}),
            400,
            json!("stream_options"),
            "invalid_field",
        ),
        (
            json!({"model": "solo@nowhere"}),
            400,
            json!("model"),
            "invalid_model",
        ),
        (
            json!({"tool_choice": "required"}),
            400,
            json!("tool_choice"),
            "invalid_field",
        ),
        (
            json!({"messages": [{"role": "user", "content": "a"}, {"role": "tool", "tool_call_id": "x", "content": "y"}]}),
            400,
            json!("messages[1]"),
            "invalid_messages",
        ),
    ] {
        let got = chat(&app, body.clone()).await;
        assert_eq!(got.status, status, "{body} {}", got.text);
        let error = &got.json()["error"];
        assert_eq!(
            (&error["param"], &error["code"]),
            (&param, &json!(code)),
            "{body}"
        );
        assert_eq!(error["type"], "invalid_request_error");
        assert!(error["message"].is_string());
    }
    assert!(app.provider.requests().is_empty());
}

#[tokio::test]
async fn errors_name_the_fields_that_the_client_sent() {
    let app = solo("").await;
    for (body, param) in [
        (json!({"max_completion_tokens": 0}), "max_completion_tokens"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"metadata": {"k".repeat(65): "v"}}), "metadata"),
        (json!({"user": "u".repeat(257)}), "user"),
    ] {
        let got = chat(&app, body).await;
        assert_eq!(got.status, 400, "{}", got.text);
        let error = &got.json()["error"];
        assert_eq!(error["param"], param);
        let message = error["message"].as_str().expect("a message");
        assert!(message.starts_with(&format!("/{param}: ")), "{message}");
    }
}

#[tokio::test]
async fn a_failed_run_is_an_error_that_clients_do_not_repeat() {
    let app = solo("[retry]\nmax_retries = 0").await;
    app.provider.always("solo", |_| fails(500, "broken"));
    let got = chat(&app, json!({})).await;
    assert_eq!(got.status, 502, "{}", got.text);
    assert_eq!(got.header("x-should-retry"), "false");
    assert_eq!(got.json()["error"]["code"], "provider_server");
    assert_eq!(app.find(got.header("x-run-id")).await["status"], "failed");
    let streamed = chat(&app, json!({"stream": true})).await;
    let last = chunks(&streamed).pop().expect("a chunk");
    assert_eq!(last["error"]["code"], "provider_server");
}

#[tokio::test]
async fn the_same_idempotency_key_is_the_same_run() {
    let app = solo("").await;
    app.provider.will("solo", [says("once")]);
    let body = json!({"model": "solo", "messages": [{"role": "user", "content": "hi"}]});
    let request = || {
        let request = app.request(reqwest::Method::POST, "/v1/chat/completions");
        send(request.header("idempotency-key", "k1").json(&body))
    };
    let (first, second) = (request().await, request().await);
    assert_eq!(first.json(), second.json());
    assert_eq!(app.provider.requests().len(), 1);
}

#[tokio::test]
async fn the_model_may_be_replaced() {
    let app = solo("").await;
    app.provider.will("other", [says("from the other")]);
    let got = chat(&app, json!({"model": "solo@anthropic/other"}))
        .await
        .json();
    assert_eq!(got["choices"][0]["message"]["content"], "from the other");
    assert_eq!(got["model"], "solo@anthropic/other");
}
