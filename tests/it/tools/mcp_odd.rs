//! MCP servers whose messages differ from the protocol: what is odd costs itself, not the server.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axed::config::environment::process_environment;
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use serde_json::{Value, json};

use crate::support::app::{Setup, TestApp};
use crate::support::http_server::serve;
use crate::support::provider::answer::says;
use crate::support::run::Run;
use crate::support::within_timeout;
use crate::tools::mcp::{UNATTENDED, result_of};

/// Far below the timeout of a call, far above what a loaded machine needs.
const AT_ONCE: Duration = Duration::from_secs(55);

fn with_server(mode: &str, more: &str) -> Setup {
    let open_timeout = match more.contains("open_timeout") {
        true => "",
        false => "open_timeout = 120",
    };
    let agent = format!(
        "[[mcp_servers]]\nname = \"s\"\ntransport = \"stdio\"\ncommand = \"python3\"\nargs = [\"odd.py\", \"{mode}\"]\n{open_timeout}\n{more}\n"
    );
    let path = process_environment().remove("PATH").expect("a PATH");
    TestApp::setup()
        .config(UNATTENDED)
        .file("odd.py", include_str!("mcp/odd.py"))
        .agent("a", &agent)
        .environment("PATH", &path)
}

/// One run without calls: the tools that it offers, and its warnings.
async fn offered(app: &TestApp) -> (Vec<Value>, Vec<String>) {
    app.provider.will("a", [says("done")]);
    let run = app.run("a", "go").await;
    assert_eq!(run.status(), "completed", "{}", app.daemon.log());
    let sent = app.provider.requests_for("a").pop().expect("a request");
    (sent.tools(), warnings(&run))
}

fn warnings(run: &Run<'_>) -> Vec<String> {
    let warnings = run["warnings"].as_array().expect("warnings");
    let messages = warnings.iter().map(|it| it["message"].as_str());
    messages.map(|it| it.expect("a text").to_owned()).collect()
}

#[tokio::test]
async fn an_odd_tool_costs_only_itself() {
    let app = with_server("odd", "").spawn().await;
    let (tools, warnings) = offered(&app).await;
    let names: Vec<&Value> = tools.iter().map(|tool| &tool["name"]).collect();
    assert_eq!(
        names,
        ["s__plain", "s__bare", "s__list", "s__either", "s__hinted"]
    );
    let none = json!({"type": "object", "properties": {}});
    let either =
        json!({"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]});
    assert_eq!(tools[1]["parameters"], none);
    assert_eq!(tools[2]["parameters"], none);
    assert_eq!(tools[3]["parameters"], either);
    let left_out = |what: &str| {
        let mut found = warnings.iter().filter(|it| it.starts_with(what));
        assert!(found.next().is_some(), "{what}: {warnings:?}");
    };
    left_out("tool \"items\" of MCP server \"s\" is left out: its schema has the type \"array\"");
    left_out("tool \"task\" of MCP server \"s\" is left out: it runs only as a task");
    left_out("a tool of MCP server \"s\" is left out: it has no name");
    left_out("a tool of MCP server \"s\" is left out: it is described by null");
}

#[tokio::test]
async fn a_cursor_that_does_not_advance_ends_the_list() {
    for mode in ["cursor_empty", "cursor_same", "cursor_new", "cursor_false"] {
        let app = with_server(mode, "").spawn().await;
        let (tools, warnings) = offered(&app).await;
        assert_eq!((tools.len(), warnings), (1, Vec::new()), "{mode}");
    }
}

#[tokio::test]
async fn what_can_be_read_of_a_result_is_kept() {
    let app = with_server("", "").spawn().await;
    for (tool, expected) in [
        ("link", "forty-two\n[resource: file:///a]"),
        (
            "block",
            "forty-two\n[image: unknown type, without data]\n[resource: without a URI, without data]",
        ),
        ("text", "forty-two"),
        ("own", "forty-two"),
        // Its bytes are those of another type than the server says.
        ("picture", "[image: image/gif, 7 bytes]"),
        ("half", "cut here \u{fffd}"),
        ("nan", "forty-two"),
        ("noise", "forty-two"),
        ("prefix", "forty-two"),
        ("batch", "forty-two"),
    ] {
        let result = result_of(&app, &format!("s__{tool}"), json!({})).await;
        assert_eq!(result, (expected.to_owned(), false), "{tool}");
    }
    let sent = app.provider.requests_for("a");
    let is_sent = |request: &Value| request.to_string().contains("image/gif");
    assert!(sent.iter().any(|request| is_sent(&request.body)));
}

#[tokio::test]
async fn an_answer_that_matches_no_request_ends_the_call() {
    let app = with_server("", "timeout = 60").spawn().await;
    for (tool, why) in [
        ("wrong_type", "it answered with the id {\"is\":"),
        (
            "without_id",
            "it answered with the id null, which no request has",
        ),
        ("error_text", "out of paper"),
    ] {
        let start = Instant::now();
        let (text, is_error) = result_of(&app, &format!("s__{tool}"), json!({})).await;
        let expected = format!("MCP server \"s\" gave no result for the call: {why}");
        assert!(is_error && text.starts_with(&expected), "{text}");
        assert!(start.elapsed() < AT_ONCE, "{tool}: {:?}", start.elapsed());
    }
}

#[tokio::test]
async fn a_slow_server_goes_on_starting() {
    let app = with_server("slow", "open_timeout = 1").spawn().await;
    let (tools, warned) = offered(&app).await;
    assert_eq!(tools.len(), 0);
    let expected =
        "MCP server \"s\" is not available: it did not answer within 1s; it is still starting";
    assert!(warned[0].contains(expected), "{warned:?}");
    let shown = app.get("/agents/a").await.json();
    assert_eq!(shown["mcp_servers"][0]["open_timeout"], 1);
    app.write("start", "");
    within_timeout("the started server", async {
        while offered(&app).await.0.is_empty() {}
    })
    .await;
}

/// Answers with what the story wants, as JSON or as a stream of events.
async fn answer(State(as_events): State<Arc<bool>>, body: Bytes) -> Response {
    let message: Value = serde_json::from_slice(&body).expect("JSON");
    let result = match message["method"].as_str().unwrap_or_default() {
        "initialize" => {
            json!({"protocolVersion": "2025-06-18", "capabilities": {"tools": []}, "serverInfo": {}})
        }
        "tools/list" => json!({"tools": [{"name": "find"}, 7], "nextCursor": ""}),
        "tools/call" => json!({"content": [
            {"type": "text", "text": "forty-two", "annotations": "none"}, {"type": "resource_link"},
        ]}),
        _ => return StatusCode::ACCEPTED.into_response(),
    };
    let id = message["id"].to_string();
    let answer = json!({"jsonrpc": "2.0", "id": id, "result": result, "error": null});
    match *as_events {
        true => {
            let events = format!(": hello\n\nevent: message\ndata: {answer}\n\n");
            ([("content-type", "text/event-stream")], events).into_response()
        }
        false => (
            [("content-type", "text/plain")],
            format!("\u{feff}{answer}"),
        )
            .into_response(),
    }
}

#[tokio::test]
async fn odd_messages_are_read_over_http_too() {
    for as_events in [false, true] {
        let routes = Router::new()
            .route("/mcp", post(answer))
            .with_state(Arc::new(as_events));
        let (address, _server) = serve(routes).await;
        let agent = format!(
            "[[mcp_servers]]\nname = \"s\"\ntransport = \"streamable-http\"\nurl = \"http://{address}/mcp\"\n"
        );
        let app = TestApp::setup().agent("a", &agent).spawn().await;
        let result = result_of(&app, "s__find", json!({})).await;
        let expected = "forty-two\n[resource: without a URI]";
        assert_eq!(result, (expected.to_owned(), false), "{as_events}");
        let (tools, warned) = offered(&app).await;
        assert_eq!((tools.len(), warned.len()), (1, 1), "{warned:?}");
    }
}
