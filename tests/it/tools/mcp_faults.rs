//! MCP servers that fail: a session that is lost, an answer with another id, none at all, an error's status, a process
//! that ends. Each call ends at once with what happened, and the next one works.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axed::config::environment::process_environment;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use futures_util::stream::{iter, unfold};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::support::app::{Setup, TestApp};
use crate::support::http_server::serve;
use crate::support::provider::answer::{calls, says};
use crate::support::run::Run;
use crate::support::{eventually, within_timeout};
use crate::tools::mcp::UNATTENDED;

/// Below the timeout of a call, above what a loaded machine needs.
const AT_ONCE: Duration = Duration::from_secs(55);

/// What the server does with a call of a tool.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Restarted,
    RestartedBadRequest,
    WrongId,
    NoId,
    Accepted,
    Empty,
    Html,
    NoJson,
    OwnMessage,
    StreamClosed,
    StreamBroken,
    StreamWrongId,
    StreamNoJson,
    StreamNotResumed,
    Broken,
    Status(u16),
    Hangs,
}

/// An MCP server over HTTP with sessions.
#[derive(Clone, Default)]
struct Server {
    state: Arc<Mutex<Sessions>>,
}

#[derive(Default)]
struct Sessions {
    opened: usize,
    known: BTreeSet<String>,
    /// What happens to the next call.
    fault: Option<Fault>,
    /// Calls that came, faults included.
    calls: usize,
    /// A status that no handshake gets past.
    refuses: Option<(u16, &'static str)>,
}

impl Server {
    async fn start(&self) -> (String, JoinSet<()>) {
        let methods = post(answer).get(events).delete(async || StatusCode::OK);
        let routes = Router::new()
            .route("/mcp", methods)
            .with_state(self.clone());
        let (address, server) = serve(routes).await;
        (format!("http://{address}/mcp"), server)
    }

    fn with<T>(&self, change: impl FnOnce(&mut Sessions) -> T) -> T {
        change(&mut self.state.lock().expect("the sessions"))
    }
}

fn as_json(body: String) -> Response {
    ([("content-type", "application/json")], body).into_response()
}

fn as_events(body: impl Into<Body>) -> Response {
    ([("content-type", "text/event-stream")], body.into()).into_response()
}

/// Resumes only a broken stream, and that fails because the session has ended.
async fn events(headers: HeaderMap) -> Response {
    match headers.contains_key("last-event-id") {
        true => (StatusCode::NOT_FOUND, "no such session").into_response(),
        false => StatusCode::METHOD_NOT_ALLOWED.into_response(),
    }
}

async fn answer(State(server): State<Server>, headers: HeaderMap, body: Bytes) -> Response {
    let message: Value = serde_json::from_slice(&body).expect("JSON");
    let id = &message["id"];
    let result = |result: Value| json!({"jsonrpc": "2.0", "id": id, "result": result}).to_string();
    let session = headers.get("mcp-session-id");
    let session = session.and_then(|it| it.to_str().ok()).unwrap_or_default();
    if message["method"] == "initialize" {
        if let Some((status, body)) = server.with(|it| it.refuses) {
            let status = StatusCode::from_u16(status).expect("a status");
            return (status, body).into_response();
        }
        let session = server.with(|it| {
            it.opened += 1;
            let session = format!("session-{}", it.opened);
            it.known.insert(session.clone());
            session
        });
        let answer = as_json(result(json!({
            "protocolVersion": message["params"]["protocolVersion"],
            "capabilities": {"tools": {"listChanged": true}},
            "serverInfo": {"name": "faulty", "version": "1"},
        })));
        return ([("mcp-session-id", session)], answer).into_response();
    }
    if !server.with(|it| it.known.contains(session)) {
        return (StatusCode::NOT_FOUND, "Session not found").into_response();
    }
    match message["method"].as_str().unwrap_or_default() {
        "tools/list" => as_json(result(json!({"tools": [
            {"name": "change", "inputSchema": {"type": "object"}},
            {"name": "look", "inputSchema": {"type": "object"}, "annotations": {"readOnlyHint": true}},
        ]}))),
        "tools/call" => {
            let fault = server.with(|it| {
                it.calls += 1;
                it.fault.take()
            });
            match fault {
                Some(fault) => misbehave(&server, fault, id).await,
                None => as_json(result(
                    json!({"content": [{"type": "text", "text": "done"}]}),
                )),
            }
        }
        // As a server that hangs: nothing is answered any more.
        "ping" => std::future::pending().await,
        _ => StatusCode::ACCEPTED.into_response(),
    }
}

async fn misbehave(server: &Server, fault: Fault, id: &Value) -> Response {
    let other = json!({"jsonrpc": "2.0", "id": 999, "result": {"content": []}}).to_string();
    let progress = json!({"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "x"}});
    match fault {
        Fault::Restarted => {
            server.with(|it| it.known.clear());
            (StatusCode::NOT_FOUND, "Session not found").into_response()
        }
        Fault::RestartedBadRequest => {
            server.with(|it| it.known.clear());
            let error =
                json!({"code": -32000, "message": "Bad Request: No valid session ID provided"});
            let body = json!({"jsonrpc": "2.0", "error": error, "id": null}).to_string();
            (StatusCode::BAD_REQUEST, as_json(body)).into_response()
        }
        Fault::WrongId => as_json(other),
        Fault::NoId => {
            let error = json!({"code": -32600, "message": "who are you?"});
            as_json(json!({"jsonrpc": "2.0", "error": error, "id": null}).to_string())
        }
        Fault::Accepted => StatusCode::ACCEPTED.into_response(),
        Fault::Empty => as_json(String::new()),
        Fault::Html => ([("content-type", "text/html")], "\n<html>\n<p>hello").into_response(),
        Fault::NoJson => as_json("oops\nmore".to_owned()),
        Fault::OwnMessage => as_json(progress.to_string()),
        Fault::StreamClosed => as_events(format!("data: {progress}\n\n")),
        Fault::StreamBroken => {
            let chunks = unfold(0, move |at| {
                let progress = progress.clone();
                async move {
                    // What was sent is on its way when the rest breaks.
                    tokio::task::yield_now().await;
                    match at {
                        0 => Some((Ok(format!("data: {progress}\n\n")), 1)),
                        _ => Some((Err(std::io::Error::other("broken")), 2)),
                    }
                }
            });
            as_events(Body::from_stream(chunks))
        }
        Fault::StreamWrongId => as_events(format!("data: {other}\n\n")),
        Fault::StreamNoJson => as_events("data: oops\n\n"),
        Fault::StreamNotResumed => as_events(format!("id: 1\ndata: {progress}\n\n")),
        Fault::Broken => {
            let chunks = [Ok("{\"jsonrpc\""), Err(std::io::Error::other("broken"))];
            let body = Body::from_stream(iter(chunks));
            ([("content-type", "application/json")], body).into_response()
        }
        Fault::Status(500) => {
            let error = json!({"code": -32603, "message": "the disk is full"});
            let body = json!({"jsonrpc": "2.0", "error": error, "id": id}).to_string();
            (StatusCode::INTERNAL_SERVER_ERROR, as_json(body)).into_response()
        }
        Fault::Status(status) => {
            let status = StatusCode::from_u16(status).expect("a status");
            (status, "\n  not now \nlater").into_response()
        }
        Fault::Hangs => std::future::pending().await,
    }
}

fn with_web(url: &str, more: &str) -> Setup {
    let agent = format!(
        "[[mcp_servers]]\nname = \"web\"\ntransport = \"streamable-http\"\nurl = \"{url}\"\n{more}\n"
    );
    TestApp::setup().config(UNATTENDED).agent("a", &agent)
}

/// What a tool answers to two calls in one run, which is over long before its deadline.
async fn two_calls(app: &TestApp, tool: &str) -> [(String, bool); 2] {
    let start = Instant::now();
    app.provider.will(
        "a",
        [
            calls([(tool, json!({}))]),
            calls([(tool, json!({}))]),
            says("done"),
        ],
    );
    let run = app.run("a", "go").await;
    assert_eq!(run.status(), "completed", "{}", app.daemon.log());
    assert!(start.elapsed() < AT_ONCE, "{:?}", start.elapsed());
    let last = app.provider.requests_for("a").pop().expect("a request");
    let (results, errors) = (last.tool_results(), last.tool_result_errors());
    [0, 1].map(|at| (results[at].clone(), errors[at]))
}

#[tokio::test]
async fn an_invalid_response_fails_the_call_and_the_next_one_works() {
    let server = Server::default();
    let (url, _server) = server.start().await;
    let app = with_web(&url, "timeout = 15").spawn().await;
    let cases = [
        (Fault::WrongId, "it answered with the id 999 instead of "),
        (Fault::NoId, "it answered with the id null instead of "),
        (
            Fault::Accepted,
            "it gave no answer (HTTP 202 without a body)",
        ),
        (Fault::Empty, "it gave no answer (HTTP 200 without a body)"),
        (
            Fault::Html,
            "it answered with content type text/html instead of JSON or an event stream (HTTP 200: <html>)",
        ),
        (Fault::NoJson, "its answer is not a JSON-RPC message: oops"),
        (
            Fault::OwnMessage,
            "it answered with a message of its own instead of a result",
        ),
        (
            Fault::StreamClosed,
            "it closed the stream before its answer",
        ),
        (Fault::StreamBroken, "the stream broke before its answer: "),
        (
            Fault::StreamWrongId,
            "it answered with the id 999 instead of ",
        ),
        (
            Fault::StreamNoJson,
            "it sent an event that is not a JSON-RPC message: oops",
        ),
        (
            Fault::StreamNotResumed,
            "the connection ended before it answered",
        ),
        (Fault::Broken, ""),
        (Fault::Status(500), "HTTP 500: the disk is full"),
        (Fault::Status(503), "HTTP 503: not now"),
        (Fault::Status(401), "HTTP 401: not now"),
        (Fault::Status(403), "HTTP 403: not now"),
        (Fault::Status(429), "HTTP 429: not now"),
        (Fault::Hangs, "it did not answer within 15 s"),
    ];
    for (fault, why) in cases {
        let before = server.with(|it| {
            it.fault = Some(fault);
            (it.opened, it.calls)
        });
        let [(first, is_error), second] = two_calls(&app, "web__change").await;
        let expected = format!("MCP server \"web\" gave no result for the call: {why}");
        assert!(
            is_error && first.starts_with(&expected),
            "{fault:?}: {first}"
        );
        assert_eq!(second, ("done".to_owned(), false), "{fault:?}");
        let (opened, calls) = server.with(|it| (it.opened, it.calls));
        assert_eq!(calls - before.1, 2, "{fault:?}: a call was repeated");
        assert!(
            opened > before.0,
            "{fault:?}: the session was not made anew"
        );
    }
}

#[tokio::test]
async fn a_lost_session_is_reopened_and_the_call_repeated() {
    let server = Server::default();
    let (url, _server) = server.start().await;
    let app = with_web(&url, "").spawn().await;
    for fault in [Fault::Restarted, Fault::RestartedBadRequest] {
        let before = server.with(|it| {
            it.fault = Some(fault);
            (it.opened, it.calls)
        });
        let results = two_calls(&app, "web__change").await;
        assert_eq!(
            results,
            [0, 1].map(|_| ("done".to_owned(), false)),
            "{fault:?}"
        );
        let (opened, calls) = server.with(|it| (it.opened, it.calls));
        assert_eq!(calls - before.1, 3, "{fault:?}");
        assert!(opened > before.0, "{fault:?}");
    }
    // Restarted between two runs.
    server.with(|it| it.known.clear());
    let results = two_calls(&app, "web__change").await;
    assert_eq!(results, [0, 1].map(|_| ("done".to_owned(), false)));
}

#[tokio::test]
async fn read_only_calls_are_repeated_once() {
    let server = Server::default();
    let (url, _server) = server.start().await;
    let app = with_web(&url, "").spawn().await;
    for fault in [
        Fault::WrongId,
        Fault::Accepted,
        Fault::StreamClosed,
        Fault::Broken,
        Fault::Status(500),
    ] {
        let before = server.with(|it| {
            it.fault = Some(fault);
            it.calls
        });
        let results = two_calls(&app, "web__look").await;
        assert_eq!(
            results,
            [0, 1].map(|_| ("done".to_owned(), false)),
            "{fault:?}"
        );
        assert_eq!(server.with(|it| it.calls) - before, 3, "{fault:?}");
    }
    // Who is refused is refused again.
    server.with(|it| it.fault = Some(Fault::Status(429)));
    let [(first, is_error), _] = two_calls(&app, "web__look").await;
    assert!(is_error && first.contains("HTTP 429: not now"), "{first}");
}

#[tokio::test]
async fn a_refused_http_handshake_is_explained() {
    let server = Server::default();
    server.with(|it| it.refuses = Some((503, "\nin maintenance\n")));
    let (url, _server) = server.start().await;
    let app = with_web(&url, "required = true").spawn().await;
    let run = app.run("a", "go").await;
    let why = "a required MCP server did not start: MCP server \"web\" is not available: HTTP 503: in maintenance";
    assert_eq!(run.failure(), ("config", why));
    // It starts with the run that comes when it is well.
    server.with(|it| it.refuses = None);
    app.provider.will("a", [says("done")]);
    within_timeout("a run with the server", async {
        while app.run("a", "go").await.status() != "completed" {}
    })
    .await;
}

const FAULTY: &str = include_str!("mcp/faulty.py");

fn with_process(mode: &str, more: &str) -> Setup {
    let agent = format!(
        "[[mcp_servers]]\nname = \"s\"\ntransport = \"stdio\"\ncommand = \"python3\"\nargs = [\"faulty.py\", \"{mode}\"]\n\
         env = {{ TOKEN = \"${{STORY_TOKEN}}\" }}\nopen_timeout = 120\n{more}\n"
    );
    let path = process_environment().remove("PATH").expect("a PATH");
    TestApp::setup()
        .config(UNATTENDED)
        .file("faulty.py", FAULTY)
        .agent("a", &agent)
        .environment("PATH", &path)
        .environment("STORY_TOKEN", "s3cret-of-the-story")
}

#[tokio::test]
async fn a_process_that_fails_in_a_call_is_named_and_restarted() {
    let app = with_process("", "timeout = 15").spawn().await;
    let not_json = "its answer is not a JSON-RPC message: {\"jsonrpc\": \"2.0\", \"id\": ";
    let cases = [
        (
            "die",
            "its process ended (exit status: 3); the last lines of its standard error: cannot open the store | with ***",
        ),
        (
            "wrong_id",
            "it answered with the id 999, which no request has",
        ),
        (
            "no_id",
            "it answered with the id null, which no request has: no such thing",
        ),
        ("close", "its process closed its output"),
        ("deep", not_json),
        ("freeze", "it did not answer within 15 s"),
    ];
    let mut pids = BTreeSet::new();
    for (tool, why) in cases {
        let start = Instant::now();
        let calls_ = [tool, "pid"].map(|tool| calls([(format!("s__{tool}"), json!({}))]));
        app.provider
            .will("a", calls_.into_iter().chain([says("done")]));
        let run = app.run("a", "go").await;
        assert_eq!(run.output(), "done");
        assert!(start.elapsed() < AT_ONCE, "{tool}: {:?}", start.elapsed());
        let last = app.provider.requests_for("a").pop().expect("a request");
        let expected = format!("MCP server \"s\" gave no result for the call: {why}");
        let first = last.tool_results().remove(0);
        let is_cut = why == not_json;
        assert!(
            first == expected || (is_cut && first.starts_with(&expected)),
            "{first}"
        );
        assert_eq!(
            last.tool_result_errors(),
            [true, false],
            "{:?}",
            last.tool_results()
        );
        assert!(
            pids.insert(last.tool_results()[1].clone()),
            "{tool}: {pids:?}"
        );
    }
    assert!(!app.daemon.log().contains("s3cret"), "{}", app.daemon.log());
}

#[tokio::test]
async fn a_slow_or_noisy_process_is_kept() {
    let app = with_process("", "timeout = 15").spawn().await;
    let names = ["s__pid", "s__slow", "s__noise"];
    let answers = names.map(|name| calls([(name, json!({}))]));
    app.provider
        .will("a", answers.into_iter().chain([says("done")]));
    let run = app.run("a", "go").await;
    assert_eq!(run.output(), "done");
    let last = app.provider.requests_for("a").pop().expect("a request");
    let results = last.tool_results();
    assert_eq!(
        results[1],
        "MCP server \"s\" gave no result for the call: it did not answer within 15 s"
    );
    assert_eq!(results[0], results[2], "the same process");
}

/// The warnings of a run that its log repeats with the run and its agent.
async fn warnings(app: &TestApp, run: &Run<'_>) -> Vec<String> {
    let events = run.events().await;
    let warned = events.iter().filter(|it| it.kind() == "tools.warning");
    let warned: Vec<String> = warned
        .filter_map(|it| it["message"].as_str().map(str::to_owned))
        .collect();
    for warning in &warned {
        let line = json!(warning).to_string();
        app.daemon.wait_for_log(&line).await;
        let log = app.daemon.log();
        let is_of_run = |line: &Value| {
            line["message"] == **warning && line["run.id"] == run.id() && line["agent"] == "a"
        };
        let mut lines = log.lines().filter_map(|it| serde_json::from_str(it).ok());
        assert!(lines.any(|line| is_of_run(&line)), "{warning}\n{log}");
    }
    warned
}

#[tokio::test]
async fn a_process_that_does_not_start_is_explained() {
    let cases = [
        (
            "exit",
            "its process ended (exit status: 7); the last lines of its standard error: two | three | four | five | no licence: ***",
        ),
        ("close", "its process closed its output"),
        (
            "wrong_id",
            "it answered with the id 12345, which no request has",
        ),
    ];
    for (mode, why) in cases {
        let app = with_process(mode, "").spawn().await;
        app.provider.will("a", [says("done")]);
        let start = Instant::now();
        let run = app.run("a", "go").await;
        assert_eq!(run.output(), "done");
        assert!(start.elapsed() < AT_ONCE, "{mode}: {:?}", start.elapsed());
        let expected = format!(
            "the tools of MCP server \"s\" are missing: MCP server \"s\" is not available: {why}"
        );
        assert_eq!(warnings(&app, &run).await, [expected]);
        assert!(!app.daemon.log().contains("s3cret"), "{}", app.daemon.log());
    }
}

#[tokio::test]
async fn a_run_fails_without_a_required_server() {
    let app = with_process("exit", "required = true")
        .agent("none", "[[mcp_servers]]\nname = \"n\"\ntransport = \"stdio\"\ncommand = \"no-such-program\"\nrequired = true")
        .agent("boss", "sub_agents = [\"a\"]")
        .spawn()
        .await;
    let run = app.run("a", "go").await;
    let (code, why) = run.failure();
    assert_eq!(code, "config");
    assert!(
        why.starts_with("a required MCP server did not start: MCP server \"s\" is not available: its process ended (exit status: 7);")
            && why.ends_with("| no licence: ***"),
        "{why}"
    );
    let run = app.run("none", "go").await;
    let why = "a required MCP server did not start: MCP server \"n\" is not available: its program no-such-program \
               was not found in the PATH of the daemon; install it, or write its full path";
    assert_eq!(run.failure(), ("config", why));
    assert!(app.provider.requests_for("a").is_empty());
    // Its caller continues.
    let task = json!({"agent": "a", "task": "t"});
    app.provider
        .will("boss", [calls([("call_agent", task)]), says("done")]);
    assert_eq!(app.run("boss", "go").await.output(), "done");
    let last = app.provider.requests_for("boss").pop().expect("a request");
    assert!(last.tool_result_errors()[0] && last.tool_results()[0].contains("exit status: 7"));
    let shown = app.get("/agents/none").await.json();
    let server = &shown["mcp_servers"][0];
    assert_eq!(
        (
            &server["required"],
            &server["timeout"],
            &server["open_timeout"]
        ),
        (&json!(true), &json!(60), &json!(10))
    );
}

/// A call that ends the daemon would otherwise end it again after each restart.
#[tokio::test]
async fn a_call_that_may_be_repeated_is_given_up_after_eight_restarts() {
    let server = Server::default();
    let (url, _server) = server.start().await;
    let hangs = || server.with(|it| it.fault = Some(Fault::Hangs));
    let called = async |count: usize| {
        eventually("a call", async || {
            server.with(|it| (it.calls == count).then_some(()))
        })
        .await;
    };
    let mut app = with_web(&url, "").spawn().await;
    let answers = [calls([("web__look", json!({}))]), says("done")];
    app.provider.will("a", answers);
    hangs();
    let id = app.start("a", "go").await.id().to_owned();
    called(1).await;
    for restarts in 1..=8 {
        hangs();
        app.crash_and_restart().await;
        if restarts < 8 {
            called(1 + restarts).await;
        }
    }
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "done");
    let last = app.provider.requests_for("a").pop().expect("a request");
    assert_eq!(
        last.tool_results(),
        ["web__look was given up: the daemon or its store stopped 8 times during the call"]
    );
    assert_eq!(server.with(|it| it.calls), 8);
}
