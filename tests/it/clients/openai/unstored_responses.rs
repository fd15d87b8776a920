//! `/v1/responses` with `store: false`: no run stays, whatever becomes of its client and of the daemon.

use reqwest::{Method, RequestBuilder};
use serde_json::{Value, json};

use crate::support::app::{ApiResponse, TestApp, send};
use crate::support::gate::Gate;
use crate::support::provider::answer::{calls, says};
use crate::support::within_timeout;

/// An agent whose model replies `secret` once the gate is open.
async fn secretive() -> (TestApp, Gate) {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    let gate = Gate::closed();
    let held = gate.clone();
    app.provider
        .always("solo", move |_| says("secret").after_gate(&held));
    (app, gate)
}

fn request(app: &TestApp, more: &Value) -> RequestBuilder {
    let mut body = json!({"model": "solo", "input": "go", "store": false});
    for (key, value) in more.as_object().expect("an object") {
        body[key] = value.clone();
    }
    app.request(Method::POST, "/v1/responses").json(&body)
}

/// Sends the request, goes away while the model works, and returns the path of the run.
async fn go_away(app: &TestApp, request: RequestBuilder) -> String {
    tokio::select! {
        got = request.send() => panic!("a response before the model's reply: {got:?}"),
        _ = app.provider.wait_for_request("solo", 1) => {}
    }
    // The request to the model does not wait for the commit.
    let listed = |got: &ApiResponse| got.json()["data"][0]["id"].is_string();
    let runs = app.get_until("/runs", listed).await.json();
    format!("/runs/{}", runs["data"][0]["id"].as_str().expect("an id"))
}

async fn is_deleted(app: &TestApp, run: &str) {
    app.get_until(run, |got| got.status == 404).await;
}

#[tokio::test]
async fn a_run_whose_client_has_gone_away_is_deleted() {
    let (app, gate) = secretive().await;
    let run = go_away(&app, request(&app, &json!({}))).await;
    assert_eq!(app.get(&run).await.json()["status"], "running");
    gate.open();
    is_deleted(&app, &run).await;
}

#[tokio::test]
async fn a_streamed_run_whose_client_has_gone_away_is_deleted() {
    let (app, gate) = secretive().await;
    let response = request(&app, &json!({"stream": true})).send().await;
    let response = response.expect("a response");
    let id = response.headers()["x-run-id"].to_str().expect("an id");
    let run = format!("/runs/{id}");
    app.provider.wait_for_request("solo", 1).await;
    drop(response);
    gate.open();
    is_deleted(&app, &run).await;
}

#[tokio::test]
async fn a_run_is_deleted_after_a_crash_too() {
    let (mut app, gate) = secretive().await;
    let run = go_away(&app, request(&app, &json!({}))).await;
    app.crash_and_restart().await;
    assert_eq!(app.get(&run).await.status, 200);
    gate.open();
    is_deleted(&app, &run).await;
}

#[tokio::test]
async fn every_request_with_the_same_key_gets_the_response() {
    let (app, gate) = secretive().await;
    let open = async || {
        let request = request(&app, &json!({"stream": true})).header("Idempotency-Key", "k");
        request.send().await.expect("a response")
    };
    let (first, second) = (open().await, open().await);
    let id = first.headers()["x-run-id"].clone();
    assert_eq!(second.headers()["x-run-id"], id);
    gate.open();
    for response in [first, second] {
        let text = within_timeout("the end of a response", response.text());
        let text = text.await.expect("a stream");
        assert!(text.contains("response.completed"), "{text}");
    }
    let run = format!("/runs/{}", id.to_str().expect("an id"));
    assert_eq!(app.get(&run).await.status, 404);
}

/// Starts a run that calls a tool of the client, and returns the response and the body with the tool's result.
async fn call_weather(app: &TestApp) -> (ApiResponse, Value) {
    let call = calls([("weather", json!({"city": "Bonn"}))]);
    app.provider.will("solo", [call, says("Rain.")]);
    let tools = json!([{"type": "function", "name": "weather", "parameters": {"type": "object"}}]);
    let first = send(request(app, &json!({"tools": tools}))).await;
    assert_eq!(first.status, 200, "{}", first.text);
    let call = &first.json()["output"][0]["call_id"];
    let result = json!([{"type": "function_call_output", "call_id": call, "output": "rain"}]);
    let id = &first.json()["id"];
    let body = json!({"input": result, "previous_response_id": id, "tools": tools});
    (first, body)
}

#[tokio::test]
async fn the_last_request_decides_whether_a_run_stays() {
    for (is_stored, status) in [(false, 404), (true, 200)] {
        let app = TestApp::setup().agent("solo", "").spawn().await;
        let (first, mut body) = call_weather(&app).await;
        let run = first.header("x-run-id").to_owned();
        let path = format!("/runs/{run}");
        assert_eq!(app.get(&path).await.json()["status"], "waiting");
        body["store"] = is_stored.into();
        let second = send(request(&app, &body)).await;
        assert_eq!(second.header("x-run-id"), run, "{}", second.text);
        assert_eq!(second.json()["status"], "completed");
        assert_eq!(app.get(&path).await.status, status);
    }
}

#[tokio::test]
async fn a_run_without_the_results_of_its_client_is_deleted_after_its_cancellation() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    let (first, _) = call_weather(&app).await;
    let run = format!("/runs/{}", first.header("x-run-id"));
    app.post(&format!("{run}/cancel"), &json!({})).await;
    is_deleted(&app, &run).await;
}
