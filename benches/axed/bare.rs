//! What axed is measured against: an axum handler that makes the same provider calls with reqwest and keeps nothing.

use std::process::Stdio;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use axum::routing::post;
use axum::serve::ListenerExt;
use axum::{Json, Router};
use futures_util::future::join_all;
use serde::{Deserialize, Serialize};
use tokio::io::AsyncWriteExt;

use crate::process::listen;

#[derive(Clone)]
struct Provider {
    client: reqwest::Client,
    /// `host:port`.
    address: String,
    url: String,
}

#[derive(Deserialize)]
struct RunRequest {
    input: String,
}

#[derive(Serialize)]
struct RunResponse {
    content: String,
    input_tokens: u64,
    output_tokens: u64,
}

#[derive(Serialize)]
struct Chat<'a> {
    model: &'a str,
    messages: &'a [Message],
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    tools: &'a [serde_json::Value],
}

#[derive(Clone, Deserialize, Serialize)]
struct Message {
    role: String,
    content: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Call>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tool_call_id: Option<String>,
}

#[derive(Clone, Deserialize, Serialize)]
struct Call {
    id: String,
    #[serde(rename = "type")]
    kind: String,
    function: Function,
}

#[derive(Clone, Deserialize, Serialize)]
struct Function {
    name: String,
    arguments: String,
}

#[derive(Deserialize)]
struct Reply {
    choices: Vec<Choice>,
    usage: Usage,
}

#[derive(Deserialize)]
struct Choice {
    message: Message,
}

#[derive(Deserialize)]
struct Usage {
    prompt_tokens: u64,
    completion_tokens: u64,
}

/// Serves for ever.
pub fn serve(address: String) {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let provider = Provider::new(address);
        // Otherwise chunks wait for each other.
        let listener = listen().tap_io(|stream| drop(stream.set_nodelay(true)));
        let routes = Router::new()
            .route("/run", post(one_call))
            .route("/process", post(one_process))
            .route("/tree", post(five_calls))
            .route("/stream", post(pass_through))
            .with_state(provider);
        axum::serve(listener, routes).await.expect("serve");
    });
}

async fn one_call(
    State(provider): State<Provider>,
    Json(request): Json<RunRequest>,
) -> Json<RunResponse> {
    let reply = provider.complete("solo", &[user(request.input)], &[]).await;
    Json(response([reply]))
}

/// The same by a process of its own.
async fn one_process(State(provider): State<Provider>, body: Bytes) -> impl IntoResponse {
    let mut process = tokio::process::Command::new(std::env::current_exe().expect("this binary"))
        .args(["--role", "once", "--provider", &provider.address])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("start a process");
    let mut stdin = process.stdin.take().expect("its input");
    stdin.write_all(&body).await.expect("it reads");
    drop(stdin);
    let output = process.wait_with_output().await.expect("its output");
    ([(CONTENT_TYPE, "application/json")], output.stdout)
}

/// One run: its request comes by the standard input, its response goes to the standard output.
pub fn run_once(address: String) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    let request: RunRequest = serde_json::from_reader(std::io::stdin()).expect("a request");
    let provider = State(Provider::new(address));
    let Json(response) = runtime.block_on(one_call(provider, Json(request)));
    serde_json::to_writer(std::io::stdout(), &response).expect("a response");
}

/// A stream of the provider as it comes.
async fn pass_through(State(provider): State<Provider>, body: Bytes) -> impl IntoResponse {
    let response = provider.client.post(&provider.url).body(body).send().await;
    let chunks = response.expect("an answer").bytes_stream();
    (
        [(CONTENT_TYPE, "text/event-stream")],
        Body::from_stream(chunks),
    )
}

/// One call, three at once, and one more with their results.
async fn five_calls(
    State(provider): State<Provider>,
    Json(request): Json<RunRequest>,
) -> Json<RunResponse> {
    let tools = [serde_json::json!({"type": "function", "function": {
        "name": "call_agent", "description": "Delegate a task to a sub-agent.",
        "parameters": {"type": "object", "properties": {
            "agent": {"type": "string"}, "task": {"type": "string"}}},
    }})];
    let mut messages = vec![user(request.input)];
    let first = provider.complete("root", &messages, &tools).await;
    let message = first.choices[0].message.clone();
    let tasks = message.tool_calls.iter().map(|call| {
        let provider = provider.clone();
        async move {
            let task = [user(call.function.arguments.clone())];
            provider.complete("leaf", &task, &[]).await
        }
    });
    let mut replies = join_all(tasks).await;
    messages.push(message.clone());
    for (call, reply) in message.tool_calls.into_iter().zip(&replies) {
        messages.push(Message {
            role: "tool".to_owned(),
            content: reply.choices[0].message.content.clone(),
            tool_calls: Vec::new(),
            tool_call_id: Some(call.id),
        });
    }
    replies.push(first);
    replies.push(provider.complete("root", &messages, &tools).await);
    Json(response(replies))
}

impl Provider {
    fn new(address: String) -> Self {
        Self {
            client: reqwest::Client::new(),
            url: format!("http://{address}/v1/chat/completions"),
            address,
        }
    }

    async fn complete(
        &self,
        model: &str,
        messages: &[Message],
        tools: &[serde_json::Value],
    ) -> Reply {
        let chat = Chat {
            model,
            messages,
            tools,
        };
        let response = self.client.post(&self.url).json(&chat).send().await;
        response.expect("an answer").json().await.expect("a reply")
    }
}

fn user(content: String) -> Message {
    Message {
        role: "user".to_owned(),
        content: Some(content),
        tool_calls: Vec::new(),
        tool_call_id: None,
    }
}

/// The last reply's text, and what all of them used.
fn response(replies: impl IntoIterator<Item = Reply>) -> RunResponse {
    let mut response = RunResponse {
        content: String::new(),
        input_tokens: 0,
        output_tokens: 0,
    };
    for reply in replies {
        response.input_tokens += reply.usage.prompt_tokens;
        response.output_tokens += reply.usage.completion_tokens;
        let content = reply
            .choices
            .into_iter()
            .next()
            .and_then(|choice| choice.message.content);
        response.content = content.unwrap_or_default();
    }
    response
}
