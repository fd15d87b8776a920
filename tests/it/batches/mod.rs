//! Batches: many runs of one request.

mod budgets;
mod kills;
mod results;

use reqwest::Method;
use serde_json::Value;

use crate::support::app::{ApiResponse, TestApp, send};

/// Sends a batch with this idempotency key.
pub async fn send_batch(app: &TestApp, key: &str, body: &str) -> ApiResponse {
    let request = app.request(Method::POST, "/agents/solo/runs:batch");
    let request = request.header("content-type", "application/jsonl");
    send(request.header("idempotency-key", key).body(body.to_owned())).await
}

/// A batch of that many lines.
pub fn lines(count: usize) -> String {
    (0..count)
        .map(|index| format!("{{\"input\": \"line {index}\"}}\n"))
        .collect()
}

/// The id of an accepted batch.
pub fn accepted(response: &ApiResponse) -> String {
    assert_eq!(response.status, 202, "{}", response.text);
    let id = response.json()["id"].as_str().expect("an id").to_owned();
    assert!(response.location().ends_with(&format!("/batches/{id}")));
    id
}

/// The batch at its end.
pub async fn finished(app: &TestApp, id: &str) -> Value {
    let path = format!("/batches/{id}");
    let is_finished = |got: &ApiResponse| got.json()["finished_at"].is_string();
    app.get_until(&path, is_finished).await.json()
}

/// The results, each with the index of its line.
pub async fn results(app: &TestApp, id: &str) -> Vec<Value> {
    let got = app.get(&format!("/batches/{id}/results")).await;
    assert_eq!(got.status, 200, "{}", got.text);
    assert_eq!(got.header("content-type"), "application/jsonl");
    let lines = got.text.lines();
    let results: Vec<Value> = lines
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    for (index, result) in results.iter().enumerate() {
        assert_eq!(result["index"], index);
    }
    results
}
