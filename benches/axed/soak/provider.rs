//! The soak's provider, on OpenAI's wire: its replies are chosen by the model's name and the turn, and each has a serial number,
//! so that a record shows which one it has.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{self, BoxStream};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_util::task::TaskTracker;

/// What a request's run is known by here: its input has it behind this mark, up to the next blank.
const TOKEN_PREFIX: &str = "token=";
/// The model `slow` takes so long.
const SLOW_DELAY: Duration = Duration::from_secs(30);

/// The requests that came, by the token of their run: of each turn the serial numbers of the replies that it was given.
#[derive(Clone, Default)]
pub struct Requests(Arc<Mutex<RequestLog>>);

#[derive(Default)]
struct RequestLog {
    last_serial: u64,
    turns: HashMap<String, Vec<Vec<u64>>>,
}

impl Requests {
    /// The serial numbers of the replies for this token, by turn.
    pub fn serials(&self, token: &str) -> Vec<Vec<u64>> {
        self.lock().turns.get(token).cloned().unwrap_or_default()
    }

    /// How many requests came for a turn that another had come for.
    pub fn repeated(&self) -> usize {
        let log = self.lock();
        let turns = log.turns.values().flatten();
        turns.map(|serials| serials.len().saturating_sub(1)).sum()
    }

    /// How many requests came.
    pub fn count(&self) -> u64 {
        self.lock().last_serial
    }

    /// Counts a request and numbers its reply.
    fn add(&self, token: &str, turn: usize) -> u64 {
        let mut log = self.lock();
        log.last_serial += 1;
        let serial = log.last_serial;
        let turns = log.turns.entry(token.to_owned()).or_default();
        if turns.len() <= turn {
            turns.resize(turn + 1, Vec::new());
        }
        turns[turn].push(serial);
        serial
    }

    fn lock(&self) -> MutexGuard<'_, RequestLog> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Starts it on a thread of its own, for as long as this process lives; returns its `host:port`.
pub fn start(requests: Requests) -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.set_nonblocking(true).expect("a socket");
    let address = listener.local_addr().expect("an address").to_string();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            let listener = TcpListener::from_std(listener).expect("a listener");
            serve(listener, requests).await;
        });
    });
    address
}

async fn serve(listener: TcpListener, requests: Requests) {
    let connections = TaskTracker::new();
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            continue;
        };
        let _ = stream.set_nodelay(true);
        let requests = requests.clone();
        connections.spawn(async move {
            let service = service_fn(move |request| respond(request, requests.clone()));
            // A disconnected client is no error here.
            let _ = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
    }
}

type Body = StreamBody<BoxStream<'static, Result<Frame<Bytes>, Infallible>>>;

async fn respond(
    request: Request<Incoming>,
    requests: Requests,
) -> Result<Response<Body>, hyper::Error> {
    let body = request.into_body().collect().await?.to_bytes();
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    let parsed = ParsedRequest::read(&body, &requests);
    tokio::time::sleep(parsed.delay()).await;
    let reply = parsed.reply();
    let (kind, chunks) = match body["stream"].as_bool() {
        Some(true) => ("text/event-stream", parsed.chunks(&reply)),
        _ => ("application/json", vec![parsed.full_body(&reply)]),
    };
    let pause = Duration::from_millis(if chunks.len() > 1 { 40 } else { 0 });
    let chunks = stream::unfold(chunks.into_iter(), move |mut pieces| async move {
        let chunk = pieces.next()?;
        tokio::time::sleep(pause).await;
        Some((Ok(Frame::data(Bytes::from(chunk))), pieces))
    });
    let mut response = Response::new(StreamBody::new(Box::pin(chunks) as BoxStream<'static, _>));
    let kind = hyper::header::HeaderValue::from_static(kind);
    response
        .headers_mut()
        .insert(hyper::header::CONTENT_TYPE, kind);
    Ok(response)
}

/// One request, numbered.
struct ParsedRequest {
    model: String,
    token: String,
    /// From 0.
    turn: usize,
    serial: u64,
    /// The tokens of all user messages: of a session's runs one after another.
    session_tokens: Vec<String>,
}

/// The model's reply.
enum Reply {
    Text(String),
    /// Calls of one tool, by their arguments.
    Calls(&'static str, Vec<Value>),
}

impl ParsedRequest {
    fn read(body: &Value, requests: &Requests) -> Self {
        let messages = body["messages"].as_array().map_or(&[][..], Vec::as_slice);
        let mut session_tokens = Vec::new();
        let mut turn = 0;
        for message in messages {
            match message["role"].as_str() {
                Some("user") => {
                    let text = message["content"].as_str().unwrap_or_default();
                    session_tokens.extend(token(text).map(str::to_owned));
                    turn = 0;
                }
                Some("assistant") => turn += 1,
                _ => {}
            }
        }
        let token = session_tokens.last().cloned().unwrap_or_default();
        Self {
            model: body["model"].as_str().unwrap_or_default().to_owned(),
            serial: requests.add(&token, turn),
            token,
            turn,
            session_tokens,
        }
    }

    fn delay(&self) -> Duration {
        match self.model.as_str() {
            "slow" => SLOW_DELAY,
            _ => Duration::from_millis(50 + self.serial * 7919 % 400),
        }
    }

    fn reply(&self) -> Reply {
        let Self { token, serial, .. } = self;
        let delegate = |agent: &str, count: usize| {
            let task =
                |at| json!({"agent": agent, "task": format!("{TOKEN_PREFIX}{token}.{at} go on")});
            Reply::Calls("call_agent", (0..count).map(task).collect())
        };
        let file = format!("{token}.txt");
        match (self.model.as_str(), self.turn) {
            ("lead", 0) => delegate("middle", 2),
            ("middle" | "streamer", 0) => delegate("leaf", 2),
            ("long", 0) => delegate("longer", 2),
            ("longer", 0) => delegate("slow", 2),
            ("writer" | "careful", 0) => {
                let write = json!({"path": file, "content": "x"});
                Reply::Calls("write_file", vec![write])
            }
            ("writer", 1) => {
                let edit = json!({"path": file, "old_string": "x", "new_string": "xy"});
                Reply::Calls("edit_file", vec![edit])
            }
            ("shell", 0) => {
                let command = format!("echo {token} {serial} >> performed");
                Reply::Calls("run_command", vec![json!({ "command": command })])
            }
            ("talker", _) => {
                Reply::Text(format!("got {} #{serial}", self.session_tokens.join(",")))
            }
            _ => Reply::Text(format!("done {token} #{serial}")),
        }
    }

    /// Calls as the wire has them, with the reply's number in their ids.
    fn calls(&self, tool: &str, arguments: &[Value]) -> Vec<Value> {
        let call = |(at, arguments): (usize, &Value)| {
            json!({"index": at, "id": format!("c{}-{at}", self.serial), "type": "function",
                "function": {"name": tool, "arguments": arguments.to_string()}})
        };
        arguments.iter().enumerate().map(call).collect()
    }

    fn full_body(&self, reply: &Reply) -> String {
        let (message, finish) = match reply {
            Reply::Text(text) => (json!({"role": "assistant", "content": text}), "stop"),
            Reply::Calls(tool, calls) => (
                json!({"role": "assistant", "content": null, "tool_calls": self.calls(tool, calls)}),
                "tool_calls",
            ),
        };
        let choice = json!({"index": 0, "message": message, "finish_reason": finish});
        json!({"id": "c", "object": "chat.completion", "created": 0, "model": self.model,
            "choices": [choice], "usage": usage()})
        .to_string()
    }

    /// The reply in the pieces of a stream.
    fn chunks(&self, reply: &Reply) -> Vec<String> {
        let event = |delta: Value, finish: Option<&str>| {
            let choice = json!({"index": 0, "delta": delta, "finish_reason": finish});
            let chunk = json!({"id": "c", "object": "chat.completion.chunk", "created": 0,
                "model": self.model, "choices": [choice]});
            format!("data: {chunk}\n\n")
        };
        let mut chunks = Vec::new();
        let finish = match reply {
            Reply::Text(text) => {
                let words = text.split_inclusive(' ');
                chunks.extend(words.map(|term| event(json!({ "content": term }), None)));
                "stop"
            }
            Reply::Calls(tool, calls) => {
                let calls = self.calls(tool, calls);
                chunks.push(event(json!({ "tool_calls": calls }), None));
                "tool_calls"
            }
        };
        let usage = json!({"id": "c", "object": "chat.completion.chunk", "created": 0,
            "model": self.model, "choices": [], "usage": usage()});
        let end = event(json!({}), Some(finish));
        chunks.push(format!("{end}data: {usage}\n\ndata: [DONE]\n\n"));
        chunks
    }
}

fn usage() -> Value {
    json!({"prompt_tokens": 20, "completion_tokens": 10, "total_tokens": 30})
}

/// The token in a user message.
pub fn token(text: &str) -> Option<&str> {
    let (_, rest) = text.split_once(TOKEN_PREFIX)?;
    rest.split_whitespace().next()
}

/// The input of the run of this token.
pub fn input(token: &str) -> String {
    format!("{TOKEN_PREFIX}{token} do your work")
}

/// The number of the reply that an assistant message of the record is.
pub fn serial(message: &Value) -> Option<u64> {
    if let Some(id) = message["tool_calls"][0]["id"].as_str() {
        return id.strip_prefix('c')?.split('-').next()?.parse().ok();
    }
    let (_, serial) = message["content"].as_str()?.rsplit_once('#')?;
    serial.parse().ok()
}
