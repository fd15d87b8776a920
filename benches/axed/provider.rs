//! An instant provider on OpenAI's wire, as lean as it gets: prebuilt answers, chosen by a glance at the body.
//!
//! Models: `hang` never answers; `fan-9-leaf` calls the agent `leaf` nine times at once, then says its text;
//! `gate-fan-9-leaf` does so once the gate is open; `steps-40-5-read_file` makes forty replies with five calls of that tool
//! each, then says its text; `stream-200-10` streams two hundred chunks 10 ms apart, each with the time. `GET /busy` returns the number of requests in progress, and
//! `POST /gate` opens the gate for those that wait.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{self, BoxStream, StreamExt};
use http_body_util::{BodyExt, Either, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio_util::task::TaskTracker;

use crate::load::request;
use crate::process::listen;
use crate::streams::since_epoch;

const TEXT: &[u8] = br#"{"id":"c","object":"chat.completion","created":0,"model":"bench","choices":[{"index":0,"message":{"role":"assistant","content":"Hello to everybody in the building."},"finish_reason":"stop"}],"usage":{"prompt_tokens":20,"completion_tokens":10,"total_tokens":30}}"#;

const THREE_CALLS: &[u8] = br#"{"id":"c","object":"chat.completion","created":0,"model":"bench","choices":[{"index":0,"message":{"role":"assistant","content":null,"tool_calls":[{"id":"a","type":"function","function":{"name":"call_agent","arguments":"{\"agent\":\"leaf\",\"task\":\"greet the cellar\"}"}},{"id":"b","type":"function","function":{"name":"call_agent","arguments":"{\"agent\":\"leaf\",\"task\":\"greet the hall\"}"}},{"id":"c","type":"function","function":{"name":"call_agent","arguments":"{\"agent\":\"leaf\",\"task\":\"greet the attic\"}"}}]},"finish_reason":"tool_calls"}],"usage":{"prompt_tokens":90,"completion_tokens":60,"total_tokens":150}}"#;

type Body = Either<Full<Bytes>, StreamBody<BoxStream<'static, Result<Frame<Bytes>, Infallible>>>>;

/// Serves for ever, after `delay` each time.
pub fn serve(delay: Duration) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let listener = listen();
        let connections = TaskTracker::new();
        let state = SharedState::default();
        loop {
            let Ok((stream, _)) = listener.accept().await else {
                continue;
            };
            let _ = stream.set_nodelay(true);
            let state = state.clone();
            connections.spawn(async move {
                let service = service_fn(move |request| respond(request, delay, state.clone()));
                // A disconnected client is no error here.
                let _ = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service)
                    .await;
            });
        }
    });
}

/// A request that asks the provider without anything between.
pub fn direct_request(address: &str) -> Vec<u8> {
    let body = r#"{"model":"solo","messages":[{"role":"user","content":"Say hello."}]}"#;
    request(address, "/v1/chat/completions", body)
}

/// What all requests share.
#[derive(Clone, Default)]
struct SharedState {
    in_flight: Arc<AtomicUsize>,
    gate: Arc<Notify>,
}

/// A request in progress. It is dropped with its connection if the client disconnects.
struct InFlight(Arc<AtomicUsize>);

impl InFlight {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(count))
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

async fn respond(
    request: Request<Incoming>,
    delay: Duration,
    state: SharedState,
) -> Result<Response<Body>, Infallible> {
    match request.uri().path() {
        "/busy" => {
            let in_flight = state.in_flight.load(Ordering::Relaxed).to_string();
            return Ok(Response::new(whole(in_flight)));
        }
        "/gate" => {
            state.gate.notify_one();
            return Ok(Response::new(whole(Bytes::new())));
        }
        _ => {}
    }
    let _in_flight = InFlight::new(&state.in_flight);
    let body = request
        .into_body()
        .collect()
        .await
        .map(|body| body.to_bytes());
    let body = body.unwrap_or_default();
    let text = std::str::from_utf8(&body).unwrap_or_default();
    let model = text
        .split_once("\"model\":\"")
        .and_then(|(_, rest)| rest.split('"').next());
    let model = model.unwrap_or_default();
    if model == "hang" {
        std::future::pending::<()>().await;
    }
    let is_first_turn = text.contains("\"tools\":[") && !text.contains("\"role\":\"tool\"");
    let (is_gated, script) = match model.strip_prefix("gate-") {
        Some(script) => (is_first_turn, script),
        None => (false, model),
    };
    if is_gated {
        state.gate.notified().await;
    }
    if let Some(chunks) = script.strip_prefix("stream-") {
        return Ok(timed_stream(chunks));
    }
    let reply = if let Some(steps) = script.strip_prefix("steps-") {
        scripted_reply(steps, text.matches("\"role\":\"tool\"").count())
    } else {
        match script
            .strip_prefix("fan-")
            .and_then(|rest| rest.split_once('-'))
        {
            Some((count, agent)) if is_first_turn => {
                fan_out_reply(count.parse().unwrap_or(1), agent)
            }
            None if is_first_turn => Bytes::from_static(THREE_CALLS),
            _ => Bytes::from_static(TEXT),
        }
    };
    if !delay.is_zero() {
        tokio::time::sleep(delay).await;
    }
    let mut response = Response::new(whole(reply));
    response.headers_mut().insert(
        hyper::header::CONTENT_TYPE,
        hyper::header::HeaderValue::from_static("application/json"),
    );
    Ok(response)
}

fn whole(body: impl Into<Bytes>) -> Body {
    Either::Left(Full::new(body.into()))
}

/// A stream of chunks whose texts are the times at which they are sent. `chunks` is `<count>-<milliseconds between them>`.
fn timed_stream(chunks: &str) -> Response<Body> {
    let mut parts = chunks.split('-').map(|part| part.parse().unwrap_or(0));
    let (count, pause) = (parts.next().unwrap_or(0), parts.next().unwrap_or(0));
    let chunks = stream::iter(0..count).then(move |_| async move {
        tokio::time::sleep(Duration::from_millis(pause)).await;
        chunk(&format!("@{};", since_epoch().as_nanos()), "null", "null")
    });
    let usage = r#"{"prompt_tokens":20,"completion_tokens":10,"total_tokens":30}"#;
    let end = chunk("", "\"stop\"", usage) + "data: [DONE]\n\n";
    let frames = chunks.chain(stream::once(async { end }));
    let frames = frames.map(|text| Ok(Frame::data(text.into())));
    let mut response = Response::new(Either::Right(StreamBody::new(frames.boxed())));
    let kind = hyper::header::HeaderValue::from_static("text/event-stream");
    response
        .headers_mut()
        .insert(hyper::header::CONTENT_TYPE, kind);
    response
}

fn chunk(text: &str, finish_reason: &str, usage: &str) -> String {
    format!(
        r#"data: {{"id":"c","object":"chat.completion.chunk","created":0,"model":"bench","choices":[{{"index":0,"delta":{{"content":"{text}"}},"finish_reason":{finish_reason}}}],"usage":{usage}}}"#
    ) + "\n\n"
}

fn fan_out_reply(count: usize, agent: &str) -> Bytes {
    let arguments = |at| json!({"agent": agent, "task": format!("part {at}")}).to_string();
    let calls = (0..count).map(|at| call(at, "call_agent", &arguments(at)));
    reply_with(calls.collect())
}

/// The reply of a run that has so many results: the next calls, or its last text. `steps` is `<replies>-<calls>-<tool>`.
fn scripted_reply(steps: &str, results: usize) -> Bytes {
    let mut parts = steps.splitn(3, '-');
    let mut number = || parts.next().and_then(|part| part.parse().ok()).unwrap_or(0);
    let (replies, count): (usize, usize) = (number(), number());
    if results >= replies * count {
        return Bytes::from_static(TEXT);
    }
    let (name, arguments) = match parts.next().unwrap_or_default() {
        "refused" => ("list_directory", "{\"path\":\".\",\"depth\":2}"),
        "call_agent" => ("call_agent", "{\"agent\":\"leaf\",\"task\":\"greet\"}"),
        "read_file" => ("read_file", "{\"path\":\"f\"}"),
        other => (other, "{\"path\":\".\"}"),
    };
    let calls = (results..results + count).map(|at| call(at, name, arguments));
    reply_with(calls.collect())
}

fn call(at: usize, name: &str, arguments: &str) -> Value {
    json!({"id": format!("call-{at}"), "type": "function",
        "function": {"name": name, "arguments": arguments}})
}

fn reply_with(calls: Vec<Value>) -> Bytes {
    let reply = json!({"id": "c", "object": "chat.completion", "created": 0, "model": "bench", "choices": [{
        "index": 0, "finish_reason": "tool_calls",
        "message": {"role": "assistant", "content": null, "tool_calls": calls}}],
        "usage": {"prompt_tokens": 90, "completion_tokens": 60, "total_tokens": 150}});
    reply.to_string().into()
}
