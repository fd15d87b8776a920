//! A2A: cards, messages and tasks, streams, lists, push notifications, keys.

use reqwest::{Method, RequestBuilder};
use serde_json::{Value, json};

use crate::support::app::{ApiResponse, TestApp, send};

mod cards;
mod messages;
mod push;
mod rpc;
mod streams;
mod tasks;

/// A request of a client of version 1.0.
pub fn request(app: &TestApp, method: Method, path: &str) -> RequestBuilder {
    app.request(method, &format!("/a2a/{path}"))
        .header("a2a-version", "1.0")
}

pub async fn get(app: &TestApp, path: &str) -> ApiResponse {
    send(request(app, Method::GET, path)).await
}

pub async fn post(app: &TestApp, path: &str, body: &Value) -> ApiResponse {
    send(request(app, Method::POST, path).json(body)).await
}

/// A message with a text.
pub fn message(id: &str, text: &str) -> Value {
    with_parts(id, &json!([{ "text": text }]))
}

pub fn with_parts(id: &str, parts: &Value) -> Value {
    json!({ "message": { "messageId": id, "role": "ROLE_USER", "parts": parts } })
}

/// The same message to a task.
pub fn to_task(mut message: Value, task: &Value) -> Value {
    message["message"]["taskId"] = task["id"].clone();
    message["message"]["contextId"] = task["contextId"].clone();
    message
}

/// Sends a message to the agent and returns the task.
pub async fn task_of(app: &TestApp, agent: &str, message: &Value) -> Value {
    let got = post(app, &format!("{agent}/message:send"), message).await;
    assert_eq!(got.status, 200, "{}", got.text);
    assert_eq!(got.header("content-type"), "application/a2a+json");
    let task = got.json()["task"].clone();
    assert_eq!(task["id"], got.header("x-run-id"));
    task
}

pub fn state(task: &Value) -> &str {
    task["status"]["state"].as_str().expect("a state")
}

/// The text of the task's result.
pub fn result(task: &Value) -> &str {
    let text = task["artifacts"][0]["parts"][0]["text"].as_str();
    text.unwrap_or_else(|| panic!("a result in {task:#}"))
}

/// The status, the reason and our code of an error.
pub fn error(got: &ApiResponse) -> (u16, String, String) {
    let body = got.json();
    let error = &body["error"];
    assert_eq!(error["code"], got.status, "{body}");
    assert!(
        error["message"].is_string() && error["status"].is_string(),
        "{body}"
    );
    let info = &error["details"][0];
    assert_eq!(info["@type"], "type.googleapis.com/google.rpc.ErrorInfo");
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    (
        got.status,
        text(&info["reason"]),
        text(&info["metadata"]["code"]),
    )
}

/// The events of a stream.
pub fn events(got: &ApiResponse) -> Vec<Value> {
    assert_eq!(got.status, 200, "{}", got.text);
    assert_eq!(got.header("content-type"), "text/event-stream");
    data(&got.text)
}

/// The events in the text of a stream.
pub fn data(text: &str) -> Vec<Value> {
    let data = text.lines().filter_map(|it| it.strip_prefix("data: "));
    data.map(|data| serde_json::from_str(data).expect("JSON"))
        .collect()
}

/// What each event is.
pub fn kinds(events: &[Value]) -> Vec<&str> {
    let kind = |event: &Value| {
        ["task", "statusUpdate", "artifactUpdate"]
            .into_iter()
            .find(|kind| event[kind].is_object())
    };
    events
        .iter()
        .map(|event| kind(event).expect("a kind"))
        .collect()
}
