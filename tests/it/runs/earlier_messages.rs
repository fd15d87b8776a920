//! Earlier messages that a client sends with its request.

use crate::runs::sessions::solo;
use crate::support::app::{TestApp, send};
use crate::support::provider::answer::{calls, hangs, says};
use crate::support::provider::recorded_request::Wire;
use reqwest::Method;
use serde_json::{Value, json};

#[tokio::test]
async fn earlier_messages_of_a_request_come_first_on_every_wire() {
    let earlier = json!([
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "hm", "tool_calls": [
            {"id": "a", "name": "fly", "arguments": {"n": 1}},
            {"id": "b.2", "name": "walk"},
        ]},
        {"role": "tool", "tool_results": [
            {"call_id": "b.2", "content": "walked", "is_error": true},
            {"call_id": "a", "content": "flown"},
        ]},
        {"role": "assistant", "content": "one"},
    ]);
    for wire in Wire::ALL {
        let name = wire.name();
        let app = TestApp::setup()
            .agent(
                "solo",
                &format!("model = \"{name}/solo\"\nsub_agents = [\"x\"]"),
            )
            .spawn()
            .await;
        app.provider
            .will("solo", [calls([("fly", json!({}))]), says("two")]);

        let run = app
            .run_with("solo", json!({"input": "2", "messages": earlier}))
            .await;

        assert_eq!(run.output(), "two");
        let first = app.provider.wait_for_request("solo", 1).await;
        assert_eq!(first.user_messages(), ["1", "2"], "{wire:?}");
        assert_eq!(first.tool_results(), ["flown", "walked"], "{wire:?}");
        let said = &first.body["messages"];
        match wire {
            Wire::Anthropic => {
                assert_eq!(said[1]["content"][1]["id"], "a");
                assert_eq!(said[1]["content"][2]["id"], "b_2");
                assert_eq!(said[2]["content"][1]["tool_use_id"], "b_2");
                assert_eq!(first.tool_result_errors(), [false, true]);
            }
            Wire::Openai => {
                assert_eq!(said[1]["tool_calls"][1]["id"], "b.2");
                assert_eq!(said[1]["tool_calls"][1]["function"]["arguments"], "{}");
                assert_eq!(said[3]["tool_call_id"], "b.2");
            }
            Wire::Responses => {
                let said = &first.body["input"];
                assert_eq!(said[2]["call_id"], "a");
                assert_eq!(said[3]["call_id"], "b_2");
                assert_eq!(said[3]["arguments"], "{}");
                assert_eq!(said[5]["call_id"], "b_2");
            }
            Wire::Ollama => assert_eq!(said[3]["tool_name"], "walk"),
        }
        // What is shown can be sent again.
        let shown = run.messages().await["data"].clone();
        assert_eq!(shown.as_array().map(Vec::len), Some(8));
        assert_eq!(shown[2]["tool_results"][0]["call_id"], "a");
        app.provider.will("solo", [says("three")]);
        let again = json!({"input": "3", "messages": shown});
        assert_eq!(app.run_with("solo", again).await.output(), "three");
        assert_eq!(
            app.provider
                .wait_for_request("solo", 3)
                .await
                .user_messages(),
            ["1", "2", "3"]
        );
    }
}

#[tokio::test]
async fn earlier_messages_of_a_queued_run_survive_a_crash() {
    let mut app = TestApp::setup()
        .config("[runs]\nmax_running = 1")
        .agent("solo", "")
        .spawn()
        .await;
    app.provider.will("solo", [hangs()]);
    app.provider.always("solo", |seen| {
        says(format!("got {}", seen.user_messages().len()))
    });
    app.start("solo", "first").await;
    let body = json!({"input": "2", "messages": [{"role": "user", "content": "1"}]});
    let queued = app.start_with("solo", body).await;
    let shown = queued.messages().await["data"].clone();
    assert_eq!(shown.as_array().map(Vec::len), Some(2));
    let id = queued.id().to_owned();
    app.provider.wait_for_request("solo", 1).await;

    app.crash_and_restart().await;

    assert_eq!(app.find(&id).await.wait_for_end().await.output(), "got 2");
}

fn call(ids: &[&str]) -> Value {
    let calls: Vec<Value> = ids
        .iter()
        .map(|id| json!({"id": id, "name": "t"}))
        .collect();
    json!({"role": "assistant", "tool_calls": calls})
}

fn results(ids: &[&str]) -> Value {
    let results: Vec<Value> = ids
        .iter()
        .map(|id| json!({"call_id": id, "content": ""}))
        .collect();
    json!({"role": "tool", "tool_results": results})
}

fn call_with_arguments(arguments: Value) -> Value {
    json!([{"role": "user", "content": "go"}, {"role": "assistant", "tool_calls": [{"id": "a", "name": "t", "arguments": arguments}]}])
}

/// Messages in a wrong order, with the position that the error points to and a part of its text.
fn wrong_orders() -> Vec<(Value, &'static str, &'static str)> {
    let user = json!({"role": "user", "content": "go"});
    let reply = json!({"role": "assistant", "content": "done"});
    vec![
        (json!([reply]), "0", "first message is a user's"),
        (json!([results(&["a"])]), "0", "does not follow a reply"),
        (json!([user, reply, reply]), "2", "follows another reply"),
        (
            json!([user, reply, results(&["a"])]),
            "2",
            "does not follow a reply",
        ),
        (json!([user, call(&["a"])]), "1", "no result"),
        (
            json!([user, call(&["a"]), user]),
            "2",
            "before the result of the call \"a\"",
        ),
        (json!([user, call(&["a"]), reply]), "2", "before the result"),
        (
            json!([user, call(&["a", "b"]), results(&["a"])]),
            "2",
            "no result for the call \"b\"",
        ),
        (
            json!([user, call(&["a"]), results(&["a", "a"])]),
            "2",
            "two results",
        ),
        (
            json!([user, call(&["a"]), results(&["a", "c"])]),
            "2",
            "answers \"c\"",
        ),
        (
            json!([user, call(&["a"]), results(&["a"]), results(&["a"])]),
            "3",
            "does not follow",
        ),
        (
            json!([user, call(&["a", "a"])]),
            "1",
            "two calls with the id",
        ),
        (json!([user, call(&[""])]), "1", "not empty"),
    ]
}

/// Messages with wrong fields, with the position that the error points to and a part of its text.
fn wrong_messages() -> Vec<(Value, &'static str, &'static str)> {
    let user = json!({"role": "user", "content": "go"});
    vec![
        (json!([user, {"role": "assistant"}]), "1", "needs a content"),
        (
            json!([{"role": "user", "content": " "}]),
            "0",
            "needs a content",
        ),
        (
            json!([{"role": "user", "content": "x", "tool_calls": []}]),
            "0",
            "no tool_calls",
        ),
        (
            json!([user, {"role": "assistant", "content": "x", "tool_results": []}]),
            "1",
            "no tool_results",
        ),
        (
            json!([user, call(&["a"]), {"role": "tool", "content": "x"}]),
            "2",
            "no content",
        ),
        (call_with_arguments(json!([1])), "1", "no object"),
        (
            json!([user, {"role": "system", "content": "x"}]),
            "1/role",
            "unknown value",
        ),
        (
            json!([user, {"role": "user", "text": "x"}]),
            "1/text",
            "unknown field",
        ),
        (json!([user, "go"]), "1", "expected"),
    ]
}

#[tokio::test]
async fn an_invalid_message_order_is_refused_with_its_index() {
    let app = solo().await;
    for (messages, at, why) in wrong_orders().into_iter().chain(wrong_messages()) {
        let got = app
            .post("/agents/solo/runs", &json!({"messages": messages}))
            .await;
        got.problem(422);
        let error = got.json()["errors"][0].clone();
        assert_eq!(error["pointer"], format!("/messages/{at}"), "{}", got.text);
        let detail = error["detail"].as_str().expect("a detail");
        assert!(detail.contains(why), "{detail}");
    }
    let body = json!({"messages": call_with_arguments(json!("DEEP"))}).to_string();
    let deep = format!(
        "{}{}",
        "{\"a\":".repeat(200),
        "1".to_owned() + &"}".repeat(200)
    );
    let request = app.request(Method::POST, "/agents/solo/runs");
    let request = request.header("content-type", "application/json");
    let got = send(request.body(body.replace("\"DEEP\"", &deep))).await;
    assert!(got.problem(422).contains("128 levels"), "{}", got.text);
    let both = json!({"session": "talk", "messages": [{"role": "user", "content": "go"}]});
    let got = app.post("/agents/solo/runs", &both).await;
    got.problem(422);
    assert_eq!(got.json()["errors"][0]["pointer"], "/messages");
    assert!(app.provider.requests().is_empty());
}
