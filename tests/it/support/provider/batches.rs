//! The fake provider's batches, on OpenAI's wires and on Anthropic's: each request of a batch is answered from the script of
//! its model, and the batch is done once its answer's gate is open.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{get, post};
use serde_json::{Value, json};

use crate::support::provider::answer::{Ending, ScriptedAnswer};
use crate::support::provider::recorded_request::{RecordedRequest, Wire};
use crate::support::provider::{SharedState, wires};

/// All batches and files.
#[derive(Clone, Default)]
pub struct BatchStore(Arc<Mutex<Contents>>);

#[derive(Default)]
struct Contents {
    files: HashMap<String, String>,
    batches: Vec<Batch>,
    /// What the next downloads of results return instead.
    replaced_downloads: VecDeque<&'static str>,
    downloads: usize,
}

struct Batch {
    id: String,
    is_openai: bool,
    item: String,
    metadata: Value,
    seen: Arc<RecordedRequest>,
    answer: ScriptedAnswer,
    is_cancelled: bool,
}

impl Batch {
    fn is_done(&self) -> bool {
        self.is_cancelled
            || self
                .answer
                .start_gate
                .as_ref()
                .is_none_or(|gate| gate.is_open())
    }

    fn view(&self) -> Value {
        match self.is_openai {
            true => {
                let status = match (self.is_cancelled, self.is_done(), self.answer.expires) {
                    (true, ..) => "cancelled",
                    (_, true, true) => "expired",
                    (_, true, false) => "completed",
                    (_, false, _) => "in_progress",
                };
                let has_reply = status == "completed";
                json!({
                    "id": self.id, "object": "batch", "status": status, "metadata": self.metadata,
                    "output_file_id": has_reply.then(|| format!("file-out-{}", self.id)),
                    "error_file_id": (status == "expired").then(|| format!("file-err-{}", self.id)),
                })
            }
            false => json!({
                "id": self.id, "type": "message_batch",
                "processing_status": if self.is_done() { "ended" } else { "in_progress" },
            }),
        }
    }

    /// The line of its results.
    fn result_line(&self) -> String {
        let written = wires::encode(&self.seen, &self.answer);
        let body = written.pieces.concat();
        let body: Value = serde_json::from_slice(&body).expect("a reply in JSON");
        let line = match self.is_openai {
            true if self.answer.expires => json!({
                "id": "r", "custom_id": self.item, "response": null,
                "error": {"code": "batch_expired", "message": "out of time"},
            }),
            true => json!({
                "id": "r", "custom_id": self.item, "error": null,
                "response": {"status_code": written.status, "request_id": "q", "body": body},
            }),
            false if self.is_cancelled => {
                json!({"custom_id": self.item, "result": {"type": "canceled"}})
            }
            false if self.answer.expires => {
                json!({"custom_id": self.item, "result": {"type": "expired"}})
            }
            false if written.status == 200 => json!({
                "custom_id": self.item, "result": {"type": "succeeded", "message": body},
            }),
            false => json!({"custom_id": self.item, "result": {"type": "errored", "error": body}}),
        };
        let mut line = line.to_string();
        if self.answer.ending == Ending::Cut {
            line.truncate(20);
        }
        // Results are in no order, and others may precede this one.
        format!(
            "{}\n{line}\n",
            json!({"custom_id": "another", "result": {"type": "canceled"}})
        )
    }
}

impl BatchStore {
    fn with<T>(&self, change: impl FnOnce(&mut Contents) -> T) -> T {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The ids of the batches that were made, and of those that were cancelled.
    pub fn created_and_cancelled(&self) -> (Vec<String>, Vec<String>) {
        self.with(|it| {
            let ids = |of: &dyn Fn(&&Batch) -> bool| {
                it.batches
                    .iter()
                    .filter(of)
                    .map(|batch| batch.id.clone())
                    .collect()
            };
            (ids(&|_| true), ids(&|batch| batch.is_cancelled))
        })
    }

    /// Replaces the next downloads of results by these bodies, as a proxy does.
    pub fn replace_downloads(&self, bodies: impl IntoIterator<Item = &'static str>) {
        self.with(|it| it.replaced_downloads.extend(bodies));
    }

    /// How often results were downloaded.
    pub fn downloads(&self) -> usize {
        self.with(|it| it.downloads)
    }

    /// The routes.
    pub(super) fn routes(&self, book: SharedState) -> Router {
        Router::new()
            .route("/v1/files", post(upload))
            .route("/v1/files/{id}/content", get(content))
            .route("/v1/batches", post(create_openai).get(list))
            .route("/v1/batches/{id}", get(get_batch))
            .route("/v1/batches/{id}/cancel", post(cancel))
            .route("/v1/messages/batches", post(create_anthropic))
            .route("/v1/messages/batches/{id}", get(get_batch))
            .route("/v1/messages/batches/{id}/results", get(results))
            .route("/v1/messages/batches/{id}/cancel", post(cancel))
            .with_state((self.clone(), book))
    }
}

type BatchState = State<(BatchStore, SharedState)>;

async fn upload(State((batch_store, _)): BatchState, headers: HeaderMap, body: Bytes) -> Response {
    let kind = headers["content-type"].to_str().expect("a type");
    let boundary = kind
        .strip_prefix("multipart/form-data; boundary=")
        .expect("a form");
    let body = String::from_utf8(body.to_vec()).expect("text");
    let parts: Vec<&str> = body.split(&format!("--{boundary}")).collect();
    assert!(
        parts.last().is_some_and(|end| end.starts_with("--")),
        "the form has no end"
    );
    let part = |name: &str| {
        let wanted = format!("name=\"{name}\"");
        let part = parts
            .iter()
            .find(|part| part.contains(&wanted))
            .expect("a field");
        part.split_once("\r\n\r\n")
            .expect("a value")
            .1
            .trim_end_matches("\r\n")
            .to_owned()
    };
    assert_eq!(part("purpose"), "batch");
    let id = batch_store.with(|it| {
        let id = format!("file-{}", it.files.len());
        it.files.insert(id.clone(), part("file"));
        id
    });
    axum::Json(json!({"id": id, "object": "file", "purpose": "batch"})).into_response()
}

async fn create_openai(
    State((batch_store, book)): BatchState,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let body: Value = serde_json::from_slice(&body).expect("JSON");
    assert_eq!(body["completion_window"], "24h");
    let file = body["input_file_id"].as_str().expect("a file");
    let lines = batch_store.with(|it| it.files[file].clone());
    let line: Value = serde_json::from_str(lines.trim()).expect("a line");
    assert_eq!(
        (&line["url"], &line["method"]),
        (&body["endpoint"], &json!("POST"))
    );
    let wire = match line["url"].as_str() {
        Some("/v1/responses") => Wire::Responses,
        Some("/v1/chat/completions") => Wire::Openai,
        other => panic!("no endpoint of batches: {other:?}"),
    };
    let name = line["custom_id"].as_str().expect("a name").to_owned();
    create_batch(
        &batch_store,
        &book,
        wire,
        headers,
        name,
        &line["body"],
        body["metadata"].clone(),
    )
    .await
}

async fn create_anthropic(
    State((batch_store, book)): BatchState,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let body: Value = serde_json::from_slice(&body).expect("JSON");
    let request = &body["requests"][0];
    let name = request["custom_id"].as_str().expect("a name").to_owned();
    assert!(
        name.len() <= 64
            && name
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || "-_".contains(c)),
        "{name}"
    );
    create_batch(
        &batch_store,
        &book,
        Wire::Anthropic,
        headers,
        name,
        &request["params"],
        Value::Null,
    )
    .await
}

async fn create_batch(
    batch_store: &BatchStore,
    book: &SharedState,
    wire: Wire,
    headers: HeaderMap,
    item: String,
    request: &Value,
    metadata: Value,
) -> Response {
    let (seen, answer) = book.record_batch_request(wire, headers, request.to_string().as_bytes());
    let middle = answer.resume_gate.clone();
    let view = batch_store.with(|it| {
        let batch = Batch {
            id: format!("batch_{}", it.batches.len()),
            is_openai: wire != Wire::Anthropic,
            item,
            metadata,
            seen,
            answer,
            is_cancelled: false,
        };
        let view = batch.view();
        it.batches.push(batch);
        view
    });
    book.write(|pages| pages.batches += 1);
    if let Some(gate) = middle {
        gate.wait_until_open().await;
    }
    axum::Json(view).into_response()
}

/// The newest batch is another one, on a page of its own.
async fn list(
    State((batch_store, _)): BatchState,
    Query(query): Query<HashMap<String, String>>,
) -> Response {
    let newest = "batch_newest";
    if query.get("after").is_none_or(|after| after != newest) {
        let data = json!([{"id": newest, "status": "completed", "metadata": {}}]);
        return axum::Json(json!({"object": "list", "data": data, "has_more": true}))
            .into_response();
    }
    let data: Vec<Value> = batch_store.with(|it| {
        it.batches
            .iter()
            .rev()
            .filter(|it| it.is_openai)
            .map(Batch::view)
            .collect()
    });
    axum::Json(json!({"object": "list", "data": data, "has_more": false})).into_response()
}

fn find<T>(
    batch_store: &BatchStore,
    id: &str,
    found: impl FnOnce(&mut Batch) -> T,
) -> Result<T, StatusCode> {
    batch_store.with(|it| {
        let batch = it.batches.iter_mut().find(|batch| batch.id == id);
        batch.map(found).ok_or(StatusCode::NOT_FOUND)
    })
}

async fn get_batch(State((batch_store, book)): BatchState, Path(id): Path<String>) -> Response {
    let view = find(&batch_store, &id, |batch| axum::Json(batch.view()));
    book.write(|pages| pages.batch_polls += 1);
    view.into_response()
}

async fn results(State((batch_store, _)): BatchState, Path(id): Path<String>) -> Response {
    download(&batch_store, &id)
}

async fn content(State((batch_store, _)): BatchState, Path(id): Path<String>) -> Response {
    let id = id
        .trim_start_matches("file-out-")
        .trim_start_matches("file-err-");
    download(&batch_store, id)
}

fn download(batch_store: &BatchStore, id: &str) -> Response {
    let replaced = batch_store.with(|it| {
        it.downloads += 1;
        it.replaced_downloads.pop_front()
    });
    match replaced {
        Some(body) => Html(body).into_response(),
        None => find(batch_store, id, |batch| batch.result_line()).into_response(),
    }
}

async fn cancel(State((batch_store, _)): BatchState, Path(id): Path<String>) -> Response {
    let view = find(&batch_store, &id, |batch| {
        batch.is_cancelled = true;
        axum::Json(batch.view())
    });
    view.into_response()
}
