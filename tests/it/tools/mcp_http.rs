//! MCP servers over streamable HTTP.

use crate::support::app::{Setup, TestApp};
use crate::support::http_server::serve;
use crate::support::provider::answer::{calls, says};
use crate::support::refusing_address;
use crate::tools::mcp::result_of;
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};
use tokio::task::JoinSet;

/// An MCP server over HTTP.
#[derive(Clone, Default)]
struct Web {
    heads: Arc<Mutex<Vec<(String, HeaderMap)>>>,
    redirect: Option<String>,
    /// Speaks only the protocol without a handshake.
    is_modern: bool,
}

impl Web {
    async fn start(self) -> (String, JoinSet<()>) {
        let routes = Router::new().route("/mcp", post(speak)).with_state(self);
        let (address, server) = serve(routes).await;
        (format!("http://{address}/mcp?key=s3cret-in-url"), server)
    }
}

async fn speak(State(web): State<Web>, headers: HeaderMap, body: Bytes) -> Response {
    let message: Value = serde_json::from_slice(&body).expect("JSON");
    let method = message["method"].as_str().unwrap_or_default().to_owned();
    web.heads
        .lock()
        .expect("heads")
        .push((method.clone(), headers.clone()));
    if let Some(url) = &web.redirect {
        return (StatusCode::TEMPORARY_REDIRECT, [("location", url.clone())]).into_response();
    }
    if headers.get("authorization").and_then(|it| it.to_str().ok())
        != Some("Bearer s3cret-of-the-story")
    {
        return (StatusCode::UNAUTHORIZED, "no").into_response();
    }
    let result = match method.as_str() {
        "initialize" if web.is_modern => {
            let error = json!({"code": -32601, "message": "no handshake here"});
            let answer = json!({"jsonrpc": "2.0", "id": message["id"], "error": error});
            return ([("content-type", "application/json")], answer.to_string()).into_response();
        }
        "server/discover" => json!({
            "resultType": "complete",
            "supportedVersions": ["2026-07-28"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "web", "version": "1"},
            "ttlMs": 0,
            "cacheScope": "private",
        }),
        "initialize" => json!({
            "protocolVersion": message["params"]["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "web", "version": "1"},
        }),
        "tools/list" => json!({"tools": [
            {"name": "plain", "inputSchema": {"type": "object"}},
            {"name": "stream", "inputSchema": {"type": "object"}},
            {"name": "broken", "inputSchema": {"type": "object"}},
        ]}),
        "tools/call" => match message["params"]["name"].as_str() {
            Some("broken") => return (StatusCode::SERVICE_UNAVAILABLE, "down").into_response(),
            name => json!({"content": [{"type": "text", "text": name}]}),
        },
        _ => return StatusCode::ACCEPTED.into_response(),
    };
    let answer = json!({"jsonrpc": "2.0", "id": message["id"], "result": result}).to_string();
    match message["params"]["name"].as_str() {
        Some("stream") => {
            let news = json!({"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "on the way"}});
            let stream = format!(": hello\n\ndata: {news}\n\ndata: {answer}\n\n");
            ([("content-type", "text/event-stream")], stream).into_response()
        }
        _ => (
            [
                ("content-type", "application/json"),
                ("mcp-session-id", "story"),
            ],
            answer,
        )
            .into_response(),
    }
}

fn with_web(url: &str) -> Setup {
    let agent = format!(
        "sub_agents = [\"b\"]\n[[mcp_servers]]\nname = \"web\"\ntransport = \"streamable-http\"\nurl = \"{url}\"\n\
         headers = {{ Authorization = \"Bearer ${{STORY_TOKEN}}\" }}\n"
    );
    TestApp::setup()
        .agent("a", &agent)
        .environment("STORY_TOKEN", "s3cret-of-the-story")
}

#[tokio::test]
async fn an_http_server_may_respond_whole_or_streamed() {
    let web = Web::default();
    let (url, _server) = web.clone().start().await;
    let app = with_web(&url).spawn().await;
    assert_eq!(
        result_of(&app, "web__plain", json!({})).await,
        ("plain".to_owned(), false)
    );
    assert_eq!(
        result_of(&app, "web__stream", json!({})).await,
        ("stream".to_owned(), false)
    );
    let (why, is_error) = result_of(&app, "web__broken", json!({})).await;
    assert_eq!(
        why,
        "MCP server \"web\" gave no result for the call: HTTP 503: down"
    );
    assert!(is_error);
    let heads = web.heads.lock().expect("heads").clone();
    let many = |method: &str| heads.iter().filter(|(it, _)| it == method).count();
    assert_eq!(many("initialize"), 1);
    let shown = app.get("/agents/a").await.json();
    assert_eq!(
        shown["mcp_servers"][0]["url"].as_str(),
        url.split('?').next()
    );
    assert!(!app.daemon.log().contains("s3cret"), "{}", app.daemon.log());
}

#[tokio::test]
async fn a_server_without_a_handshake_works() {
    let web = Web {
        is_modern: true,
        ..Web::default()
    };
    let (url, _server) = web.clone().start().await;
    let app = with_web(&url).spawn().await;
    let answer = result_of(&app, "web__plain", json!({})).await;
    assert_eq!(answer, ("plain".to_owned(), false));
}

#[tokio::test]
async fn a_redirect_does_not_leak_the_headers() {
    let other = Web::default();
    let (elsewhere, _other) = other.clone().start().await;
    let web = Web {
        redirect: Some(elsewhere),
        ..Web::default()
    };
    let (url, _server) = web.clone().start().await;
    let app = with_web(&url).spawn().await;
    app.provider
        .will("a", [calls([("web__plain", json!({}))]), says("done")]);
    assert_eq!(app.run("a", "go").await.output(), "done");
    let (why, is_error) = {
        let last = app.provider.requests_for("a").pop().expect("a request");
        (last.tool_results().remove(0), last.tool_result_errors()[0])
    };
    assert!(
        is_error && why.starts_with("MCP server \"web\" is not available:"),
        "{why}"
    );
    assert!(other.heads.lock().expect("heads").is_empty());
    assert!(
        !why.contains("s3cret") && !app.daemon.log().contains("s3cret"),
        "{why}\n{}",
        app.daemon.log()
    );
}

#[tokio::test]
async fn an_http_server_that_is_down_is_named_with_the_reason() {
    let (_socket, address) = refusing_address();
    let app = with_web(&format!("http://{address}/mcp?key=s3cret-in-url"))
        .spawn()
        .await;
    let (why, is_error) = {
        app.provider
            .will("a", [calls([("web__plain", json!({}))]), says("done")]);
        app.run("a", "go").await;
        let last = app.provider.requests_for("a").pop().expect("a request");
        (last.tool_results().remove(0), last.tool_result_errors()[0])
    };
    assert!(is_error && why.contains("Connection refused"), "{why}");
    assert!(!why.contains("s3cret"), "{why}");
}
