//! MCP servers over HTTP that send more than anybody can use: requests, images, tools, ends of event streams. What the
//! daemon does with it is bounded.

use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use futures_util::stream::unfold;
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio::task::JoinSet;

use crate::support::app::TestApp;
use crate::support::http_server::serve;
use crate::support::provider::answer::{calls, says};
use crate::tools::mcp::UNATTENDED;

/// What the server sends too much of.
#[derive(Clone, Copy, Debug)]
enum Flood {
    /// Pings during the first call. It reads no answer to them.
    Pings,
    Images,
    /// Pages of one large tool.
    Tools,
    /// Event streams that end at once and are to be reopened at once, while no call is answered.
    Streams,
}

/// An MCP server over HTTP with sessions.
#[derive(Clone)]
struct Server {
    flood: Flood,
    seen: Arc<Mutex<Seen>>,
    called: Arc<Notify>,
}

/// How many requests came.
#[derive(Default)]
struct Seen {
    sessions: usize,
    streams: usize,
    lists: usize,
}

impl Server {
    fn new(flood: Flood) -> Self {
        Self {
            flood,
            seen: Arc::default(),
            called: Arc::default(),
        }
    }

    /// A daemon with an agent `a` that uses this server, which is stopped with the set of tasks.
    async fn app(&self) -> (TestApp, JoinSet<()>) {
        let methods = post(answer).get(events).delete(async || StatusCode::OK);
        let routes = Router::new()
            .route("/mcp", methods)
            .with_state(self.clone());
        let (address, server) = serve(routes).await;
        let url = format!("http://{address}/mcp");
        let timeout = match self.flood {
            Flood::Streams => 2,
            Flood::Pings | Flood::Images | Flood::Tools => 30,
        };
        let agent = format!(
            "[[mcp_servers]]\nname = \"web\"\ntransport = \"streamable-http\"\nurl = \"{url}\"\ntimeout = {timeout}"
        );
        let app = TestApp::setup()
            .config(UNATTENDED)
            .agent("a", &agent)
            .spawn()
            .await;
        (app, server)
    }

    fn with<T>(&self, change: impl FnOnce(&mut Seen) -> T) -> T {
        change(&mut self.seen.lock().expect("what was seen"))
    }
}

async fn events(State(server): State<Server>) -> Response {
    let streams = server.with(|it| {
        it.streams += 1;
        it.streams
    });
    let body = match server.flood {
        Flood::Streams => Body::from("retry: 0\n\n"),
        Flood::Pings if streams == 1 => {
            server.called.notified().await;
            let pings = unfold(0, |id| async move {
                tokio::task::yield_now().await;
                let ping = json!({"jsonrpc": "2.0", "id": id, "method": "ping"});
                Some((Ok::<_, std::io::Error>(format!("data: {ping}\n\n")), id + 1))
            });
            Body::from_stream(pings)
        }
        _ => return StatusCode::METHOD_NOT_ALLOWED.into_response(),
    };
    ([("content-type", "text/event-stream")], body).into_response()
}

async fn answer(State(server): State<Server>, body: Bytes) -> Response {
    let message: Value = serde_json::from_slice(&body).expect("JSON");
    let Some(method) = message["method"].as_str() else {
        // The answer to a ping.
        return std::future::pending().await;
    };
    let result = match method {
        "initialize" => {
            server.with(|it| it.sessions += 1);
            json!({
                "protocolVersion": message["params"]["protocolVersion"],
                "capabilities": {"tools": {"listChanged": true}},
                "serverInfo": {"name": "flood", "version": "1"},
            })
        }
        "tools/list" => {
            let page = server.with(|it| {
                it.lists += 1;
                it.lists
            });
            match server.flood {
                Flood::Tools => json!({
                    "tools": [{"name": format!("tool{page}"), "description": "x".repeat(1_000_000), "inputSchema": {}}],
                    "nextCursor": page.to_string(),
                }),
                _ => json!({"tools": [{"name": "change", "inputSchema": {}}]}),
            }
        }
        "tools/call" => match server.flood {
            Flood::Pings if server.with(|it| it.sessions == 1) => {
                server.called.notify_one();
                return std::future::pending().await;
            }
            Flood::Streams => return std::future::pending().await,
            Flood::Images => {
                let image =
                    json!({"type": "image", "mimeType": "image/gif", "data": "R0lGODlhIQ=="});
                json!({"content": vec![image; 10_000]})
            }
            Flood::Pings | Flood::Tools => json!({"content": [{"type": "text", "text": "done"}]}),
        },
        "ping" => json!({}),
        _ => return StatusCode::ACCEPTED.into_response(),
    };
    let answer = json!({"jsonrpc": "2.0", "id": message["id"], "result": result}).to_string();
    let headers = [
        ("content-type", "application/json"),
        ("mcp-session-id", "story"),
    ];
    (headers, answer).into_response()
}

/// The results of so many calls of the server's tool, one after another.
async fn results(app: &TestApp, count: usize) -> Vec<String> {
    for _ in 0..count {
        app.provider
            .will("a", [calls([("web__change", json!({}))])]);
    }
    app.provider.will("a", [says("done")]);
    assert_eq!(app.run("a", "go").await.output(), "done");
    let last = app.provider.requests_for("a").pop().expect("a request");
    last.tool_results()
}

#[tokio::test]
async fn a_server_that_reads_no_answers_to_its_requests_is_disconnected() {
    let server = Server::new(Flood::Pings);
    let (app, _server) = server.app().await;
    assert_eq!(
        results(&app, 2).await,
        [
            "MCP server \"web\" gave no result for the call: it does not read what it is sent",
            "done"
        ]
    );
    assert_eq!(server.with(|it| it.sessions), 2);
}

#[tokio::test]
async fn a_result_with_many_images_stays_within_the_size_of_a_result() {
    let (app, _server) = Server::new(Flood::Images).app().await;
    let result = results(&app, 1).await.remove(0);
    let line = "\n[image: image/gif, 7 bytes and 9979 more, left out: a result has at most 20]";
    assert!(result.contains(line), "{}", &result[result.len() - 300..]);
    assert!(result.len() <= (256 << 10) + 1024, "{}", result.len());
}

#[tokio::test]
async fn no_more_tools_are_listed_than_an_agent_can_use() {
    let server = Server::new(Flood::Tools);
    let (app, _server) = server.app().await;
    app.provider.will("a", [says("done")]);
    let run = app.run("a", "go").await;
    assert_eq!(run.output(), "done");
    // 8 MiB are listed, of which only the beginnings of the descriptions are offered.
    assert_eq!(server.with(|it| it.lists), 9);
    let seen = app.provider.wait_for_request("a", 1).await;
    assert_eq!(seen.tool_names().len(), 9);
}

#[tokio::test]
async fn an_event_stream_is_not_reopened_without_a_pause() {
    let server = Server::new(Flood::Streams);
    let (app, _server) = server.app().await;
    assert_eq!(
        results(&app, 1).await,
        ["MCP server \"web\" gave no result for the call: it did not answer within 2 s"]
    );
    let streams = server.with(|it| it.streams);
    assert!((2..50).contains(&streams), "{streams}");
}
