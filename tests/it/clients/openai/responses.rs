//! `/v1/responses`.

use reqwest::Method;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::clients::openai::client_tools::NO_OBJECTS;
use crate::support::app::{ApiResponse, TestApp, send};
use crate::support::gate::Gate;
use crate::support::provider::answer::{calls, fails, hangs, says};

async fn solo() -> TestApp {
    TestApp::setup().agent("solo", "").spawn().await
}

async fn create(app: &TestApp, body: Value) -> ApiResponse {
    let mut whole = json!({"model": "solo"});
    for (key, value) in body.as_object().expect("an object") {
        whole[key] = value.clone();
    }
    app.post("/v1/responses", &whole).await
}

fn output_text(response: &Value) -> &str {
    let output = response["output"].as_array().expect("items");
    let last = output.last().expect("an item");
    last["content"][0]["text"].as_str().unwrap_or_default()
}

fn weather() -> Value {
    json!([{"type": "function", "name": "weather", "parameters": {"type": "object"}}])
}

/// The events of a stream.
fn stream_events(got: &ApiResponse) -> Vec<Value> {
    let data = got.text.lines().filter_map(|it| it.strip_prefix("data: "));
    let mut data: Vec<&str> = data.collect();
    assert_eq!(data.pop(), Some("[DONE]"), "{}", got.text);
    data.iter()
        .map(|it| serde_json::from_str(it).expect("JSON"))
        .collect()
}

#[tokio::test]
async fn a_response_is_kept_and_continued() {
    let app = solo().await;
    app.provider
        .will("solo", [says("hello").with_usage(9, 2), says("Kim")]);
    let got = create(
        &app,
        json!({"input": "I am Kim.", "instructions": "Be brief.", "metadata": {"team": "blue"}}),
    )
    .await;
    assert_eq!(got.status, 200, "{}", got.text);
    let first = got.json();
    assert_eq!(
        (&first["status"], output_text(&first)),
        (&json!("completed"), "hello")
    );
    assert_eq!(first["usage"]["total_tokens"], 11);
    assert_eq!(first["instructions"], "Be brief.");
    let id = first["id"].as_str().expect("an id").to_owned();
    assert_eq!(id, got.header("x-run-id").replace("run_", "resp_"));
    let path = format!("/v1/responses/{id}");
    assert_eq!(app.get(&path).await.json(), first);
    let items = app.get(&format!("{path}/input_items")).await.json();
    assert_eq!(items["data"][0]["content"][0]["text"], "I am Kim.");

    let second = create(
        &app,
        json!({"input": "Who am I?", "previous_response_id": id}),
    )
    .await;
    let second = second.json();
    assert_eq!(output_text(&second), "Kim", "{second}");
    assert_eq!(second["previous_response_id"], id.as_str());
    let sent = app.provider.wait_for_request("solo", 2).await;
    assert_eq!(sent.user_messages(), ["I am Kim.", "Who am I?"]);
    assert_eq!(sent.system(), "", "instructions are not taken over");
    let id = second["id"].as_str().expect("an id");
    let items = app.get(&format!("/v1/responses/{id}/input_items")).await;
    assert_eq!(items.json()["data"].as_array().map(Vec::len), Some(1));

    assert_eq!(app.delete(&path).await.json()["deleted"], true);
    assert_eq!(app.get(&path).await.status, 404);
}

#[tokio::test]
async fn a_stream_has_items_and_numbers() {
    let app = solo().await;
    app.provider.will("solo", [says("one two")]);
    let events = stream_events(&create(&app, json!({"input": "go", "stream": true})).await);
    let kinds: Vec<&str> = events.iter().filter_map(|it| it["type"].as_str()).collect();
    let mut names = kinds.clone();
    names.dedup();
    assert_eq!(
        names,
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
    let numbers: Vec<u64> = events
        .iter()
        .filter_map(|it| it["sequence_number"].as_u64())
        .collect();
    assert!(
        numbers.len() == events.len() && numbers.is_sorted_by(|a, b| a < b),
        "{numbers:?}"
    );
    let deltas = events.iter().filter_map(|it| it["delta"].as_str());
    assert_eq!(deltas.collect::<String>(), "one two");
    assert_eq!(
        output_text(&events[events.len() - 1]["response"]),
        "one two"
    );
}

#[tokio::test]
async fn results_make_the_next_response_of_the_same_run() {
    let app = solo().await;
    let call = || calls([("weather", json!({"city": "Bonn"}))]);
    app.provider.will(
        "solo",
        [
            call().with_usage(5, 1),
            says("Rain.").with_usage(7, 2),
            says("Snow."),
        ],
    );
    let first = create(&app, json!({"input": "How is it?", "tools": weather()})).await;
    let run = first.header("x-run-id").to_owned();
    let first = first.json();
    let item = &first["output"][0];
    assert_eq!(
        (&item["type"], &item["name"]),
        (&json!("function_call"), &json!("weather"))
    );
    assert_eq!(first["usage"]["total_tokens"], 6);
    let result = |text: &str| json!([{"type": "function_call_output", "call_id": item["call_id"], "output": text}]);
    let body = |text: &str| json!({"input": result(text), "previous_response_id": first["id"], "tools": weather()});
    let second = create(&app, body("rain")).await;
    assert_eq!(second.header("x-run-id"), run);
    let second = second.json();
    assert_eq!(output_text(&second), "Rain.");
    assert_eq!(
        second["id"],
        format!("{}_2", first["id"].as_str().expect("an id"))
    );
    assert_eq!(second["usage"]["total_tokens"], 9);
    for response in [&first, &second] {
        let path = format!("/v1/responses/{}", response["id"].as_str().expect("an id"));
        assert_eq!(&app.get(&path).await.json(), response);
    }

    let other = create(&app, body("snow")).await;
    assert_ne!(
        other.header("x-run-id"),
        run,
        "another result is another run"
    );
    assert_eq!(output_text(&other.json()), "Snow.");
    let sent = app.provider.wait_for_request("solo", 3).await;
    assert_eq!(sent.tool_results(), ["snow"]);
}

#[tokio::test]
async fn arguments_that_are_no_object_are_those_of_the_item() {
    let app = solo().await;
    for sent in NO_OBJECTS {
        for stream in [false, true] {
            app.provider
                .will("solo", [calls([("weather", json!(sent))]), says("Rain.")]);
            let body = json!({"input": "How is it?", "tools": weather(), "stream": stream});
            let got = create(&app, body).await;
            let response = match stream {
                false => got.json(),
                true => {
                    let events = stream_events(&got);
                    for (kind, field) in [("delta", "delta"), ("done", "arguments")] {
                        let kind = format!("response.function_call_arguments.{kind}");
                        let event = events.iter().find(|it| it["type"] == kind.as_str());
                        assert_eq!(event.expect("arguments")[field], sent);
                    }
                    events[events.len() - 1]["response"].clone()
                }
            };
            let item = &response["output"][0];
            assert_eq!(item["arguments"], sent, "{response}");
            let result = json!([{"type": "function_call_output", "call_id": item["call_id"], "output": "rain"}]);
            let body = json!({"input": result, "previous_response_id": response["id"], "tools": weather()});
            let second = create(&app, body).await;
            assert_eq!(output_text(&second.json()), "Rain.");
        }
    }
}

#[tokio::test]
async fn results_and_a_message_continue_the_run_once() {
    let app = solo().await;
    let call = calls([("weather", json!({"city": "Bonn"}))]);
    app.provider.will("solo", [call, says("Rain.")]);
    let first = create(&app, json!({"input": "How is it?", "tools": weather()})).await;
    let run = first.header("x-run-id").to_owned();
    let first = first.json();
    let input = json!([
        {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "rain"},
        {"role": "user", "content": " "},
        {"role": "user", "content": "Be brief."},
        {"role": "developer", "content": "Be kind."},
    ]);
    let body = json!({"model": "solo", "input": input, "previous_response_id": first["id"], "tools": weather()});
    let continue_run = async || {
        let request = app.request(Method::POST, "/v1/responses");
        send(request.header("Idempotency-Key", "k").json(&body)).await
    };
    let second = continue_run().await;
    assert_eq!(second.header("x-run-id"), run, "{}", second.text);
    assert_eq!(output_text(&second.json()), "Rain.");
    let again = continue_run().await;
    assert_eq!(again.json(), second.json());
    let sent = app.provider.wait_for_request("solo", 2).await;
    assert_eq!(sent.user_messages(), ["How is it?", "Be brief."]);
    assert_eq!(app.provider.requests().len(), 2);
}

#[tokio::test]
async fn a_refused_request_leaves_nothing_in_the_run() {
    let app = solo().await;
    let call = |city: &str| ("weather", json!({"city": city}));
    app.provider
        .will("solo", [calls([call("Bonn"), call("Rome")]), says("Both.")]);
    let first = create(&app, json!({"input": "How is it?", "tools": weather()})).await;
    let run = first.header("x-run-id").to_owned();
    let first = first.json();
    let result = |at: usize| json!({"type": "function_call_output", "call_id": first["output"][at]["call_id"], "output": "rain"});
    let body = |input: Value| json!({"input": input, "previous_response_id": first["id"], "tools": weather()});
    let user = |content: Value| json!({"role": "user", "content": content});
    let picture = json!([{"type": "input_image", "image_url": "https://pics.example/a.png"}]);
    for input in [
        json!([result(0), user(json!("Wrong."))]),
        json!([result(0), result(1), user(picture)]),
    ] {
        let refused = create(&app, body(input)).await;
        assert_eq!(refused.status, 400, "{}", refused.text);
        assert_eq!(refused.json()["error"]["param"], "input");
    }
    let input = json!([result(0), result(1), user(json!("Be brief."))]);
    let got = create(&app, body(input)).await;
    assert_eq!(got.header("x-run-id"), run, "{}", got.text);
    let sent = app.provider.wait_for_request("solo", 2).await;
    assert_eq!(sent.user_messages(), ["How is it?", "Be brief."]);
}

#[tokio::test]
async fn a_background_response_is_read_and_cancelled_later() {
    let app = solo().await;
    let gate = Gate::closed();
    app.provider.will("solo", [says("late").after_gate(&gate)]);
    let started = create(&app, json!({"input": "go", "background": true}))
        .await
        .json();
    assert_ne!(started["status"], "completed");
    let path = format!("/v1/responses/{}", started["id"].as_str().expect("an id"));
    app.provider.wait_for_request("solo", 1).await;
    assert_eq!(app.get(&path).await.json()["status"], "in_progress");
    let cancelled = app.post(&format!("{path}/cancel"), &json!({})).await.json();
    assert_eq!(cancelled["status"], "cancelled");
    gate.open();
}

#[tokio::test]
async fn a_response_that_is_not_stored_is_gone() {
    let app = solo().await;
    app.provider.will("solo", [says("secret")]);
    let got = create(&app, json!({"input": "go", "store": false})).await;
    assert_eq!(output_text(&got.json()), "secret");
    assert_eq!(
        app.get(&format!("/runs/{}", got.header("x-run-id")))
            .await
            .status,
        404
    );
}

#[tokio::test]
async fn a_conversation_is_a_session() {
    let app = solo().await;
    app.provider.will("solo", [says("a"), says("b")]);
    for input in ["one", "two"] {
        let got = create(
            &app,
            json!({"input": input, "conversation": {"id": "talk"}}),
        )
        .await
        .json();
        assert_eq!(got["conversation"], json!({"id": "talk"}));
    }
    let sent = app.provider.wait_for_request("solo", 2).await;
    assert_eq!(sent.user_messages(), ["one", "two"]);
    assert_eq!(app.get("/sessions/talk").await.status, 200);
}

#[tokio::test]
async fn a_daemon_that_stops_has_clients_repeat_only_requests_with_a_key() {
    let mut app = TestApp::setup()
        .server("drain_timeout = 0")
        .agent("solo", "")
        .spawn()
        .await;
    app.provider.always("solo", |_| hangs());
    let paths = ["/v1/responses", "/v1/chat/completions"];
    let request = |app: &TestApp, path: &str, has_key: bool| {
        let messages = json!([{"role": "user", "content": "go"}]);
        let body = match path {
            "/v1/responses" => json!({"model": "solo", "input": messages}),
            _ => json!({"model": "solo", "messages": messages}),
        };
        let request = app.request(Method::POST, path).json(&body);
        match has_key {
            true => request.header("idempotency-key", "k"),
            false => request,
        }
    };
    let mut clients = JoinSet::new();
    for path in paths {
        for has_key in [false, true] {
            let got = send(request(&app, path, has_key));
            clients.spawn(async move { (path, has_key, got.await) });
        }
    }
    app.provider.wait_for_request("solo", 4).await;
    // The requests to the model do not wait for the commits.
    app.get_until("/runs", |got| {
        got.json()["data"]
            .as_array()
            .is_some_and(|runs| runs.len() == 4)
    })
    .await;
    app.daemon.signal("TERM");
    let interrupted = clients.join_all().await;
    app.daemon.wait_for_exit().await;
    app.provider.always("solo", |_| says("done"));
    app.restart_after_end().await;

    for (path, has_key, got) in interrupted {
        assert_eq!(got.status, 503, "{path} {}", got.text);
        assert_eq!(got.json()["error"]["code"], "draining");
        // Without a key, a repetition would be another run.
        let (should_retry, after) = match has_key {
            true => ("", "5"),
            false => ("false", ""),
        };
        assert_eq!(got.header("x-should-retry"), should_retry, "{path}");
        assert_eq!(got.header("retry-after"), after, "{path}");
        let run = app.find(got.header("x-run-id")).await;
        assert_eq!(run.wait_for_end().await.output(), "done");
        if has_key {
            let again = send(request(&app, path, true)).await;
            assert_eq!(again.status, 200, "{path} {}", again.text);
            assert_eq!(again.header("x-run-id"), got.header("x-run-id"));
        }
    }
}

#[tokio::test]
async fn a_failed_response_says_why() {
    let app = TestApp::setup()
        .agent("solo", "[retry]\nmax_retries = 0")
        .spawn()
        .await;
    app.provider.always("solo", |_| fails(500, "broken"));
    let got = create(&app, json!({"input": "go"})).await;
    assert_eq!(got.status, 200, "{}", got.text);
    assert_eq!(got.json()["status"], "failed");
    assert_eq!(got.json()["error"]["code"], "provider_server");
    for (body, param) in [
        (
            json!({"input": "x", "background": true, "store": false}),
            "store",
        ),
        (json!({}), "input"),
        (
            json!({"input": "x", "tools": [{"type": "function"}]}),
            "tools[0].name",
        ),
        (
            json!({"input": [{"type": "item_reference", "id": "x"}]}),
            "input[0].type",
        ),
        (
            json!({"input": "x", "max_output_tokens": 0}),
            "max_output_tokens",
        ),
        (
            json!({"input": "x", "metadata": {"team": "v".repeat(513)}}),
            "metadata.team",
        ),
        (
            json!({"input": "x", "conversation": {"id": "a b"}}),
            "conversation.id",
        ),
    ] {
        let refused = create(&app, body).await;
        assert_eq!(refused.status, 400, "{}", refused.text);
        assert_eq!(refused.json()["error"]["param"], param);
    }
    assert_eq!(app.get("/v1/responses/resp_1").await.status, 404);
}
