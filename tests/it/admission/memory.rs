//! Memory is bounded by bytes: bodies that are being read, and what queued and waiting runs keep.

use reqwest::Method;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::app::{Setup, TestApp, send};
use crate::support::eventually;
use crate::support::gate::Gate;
use crate::support::provider::answer::{calls, says};

/// The value of a metric without labels.
async fn metric(app: &TestApp, name: &str) -> u64 {
    let text = app.get("/metrics").await.text;
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let value = line.and_then(|value| value.trim().parse().ok());
    value.unwrap_or_else(|| panic!("{name} in {text}"))
}

async fn metric_is(app: &TestApp, name: &str, expected: impl Fn(u64) -> bool) {
    eventually(name, async || {
        expected(metric(app, name).await).then_some(())
    })
    .await;
}

/// Bodies of at most 1.2 MiB; one reader may have that many bytes at once.
fn small_bodies() -> Setup {
    TestApp::setup()
        .server("max_body = \"300 KiB\"\nbody_memory = \"2 MiB\"")
        .config("[limits]\nattachment_bytes = \"128 KiB\"\nconversation_bytes = \"256 KiB\"")
        .agent("solo", "")
}

/// A request that stalls after most of its body.
async fn stalled(app: &TestApp) -> TcpStream {
    let address = app.daemon.url.trim_start_matches("http://").to_owned();
    let mut stream = TcpStream::connect(address).await.expect("a connection");
    let head = "POST /agents/solo/runs:batch HTTP/1.1\r\nhost: localhost\r\n\
         content-type: application/x-ndjson\r\ncontent-length: 1100000\r\n\r\n";
    stream.write_all(head.as_bytes()).await.expect("sent");
    // A connection that is refused at once may be closed meanwhile.
    let _ = stream.write_all(&vec![b' '; 900_000]).await;
    stream
}

#[tokio::test]
async fn stalled_bodies_do_not_fill_the_memory() {
    const BYTES: &str = "axed_request_body_bytes ";
    let app = small_bodies().spawn().await;
    app.provider.always("solo", |_| says("done"));
    let first = stalled(&app).await;
    metric_is(&app, BYTES, |bytes| bytes > 800_000).await;

    let mut refused = stalled(&app).await;
    let mut response = vec![0; 4096];
    let length = refused.read(&mut response).await.expect("a response");
    let response = String::from_utf8_lossy(&response[..length]).into_owned();
    assert!(response.starts_with("HTTP/1.1 429"), "{response}");
    assert!(response.contains("retry-after: 1"), "{response}");
    assert!(response.contains("bodies_busy"), "{response}");
    // Small bodies are read all the same.
    assert_eq!(app.run("solo", "go").await.output(), "done");

    drop(first);
    metric_is(&app, BYTES, |bytes| bytes == 0).await;
    let second = stalled(&app).await;
    metric_is(&app, BYTES, |bytes| bytes > 800_000).await;
    drop(second);
}

#[tokio::test]
async fn events_of_triggers_are_small() {
    let trigger = "[[triggers]]\nname = \"t\"\nkind = \"github\"\nsecret_env = \"SECRET\"";
    let app = TestApp::setup()
        .server("max_trigger_body = \"1 KiB\"")
        .environment("SECRET", "secret")
        .agent("solo", trigger)
        .spawn()
        .await;
    let request = app.request(Method::POST, "/triggers/solo/t");
    let request = request
        .header("x-hub-signature-256", format!("sha256={}", "0".repeat(64)))
        .header("x-github-delivery", "d1");
    let got = send(request.json(&json!({ "text": "x".repeat(2000) }))).await;
    got.problem(413);
}

#[tokio::test]
async fn the_queue_is_bounded_by_bytes() {
    const BYTES: &str = "axed_runs_queued_bytes ";
    let app = TestApp::setup()
        .config("[runs]\nmax_running = 1\nmax_queued_bytes = \"1 MiB\"")
        .agent("solo", "")
        .spawn()
        .await;
    let gate = app.provider.always_later("solo", "done");
    let long = "long ".repeat(70_000);
    let running = app.start("solo", &long).await;
    app.provider.wait_for_concurrency("solo", 1).await;
    assert_eq!(metric(&app, BYTES).await, 0);

    let queued = app.start("solo", &long).await;
    assert_eq!(metric(&app, BYTES).await, 700_000);
    let refused = app
        .post("/agents/solo/runs", &json!({ "input": long }))
        .await;
    refused.problem(429);
    assert_eq!(refused.json()["code"], "queue_full");
    assert_eq!(refused.header("retry-after"), "1");
    let small = app.start("solo", "short").await;

    gate.open();
    for run in [&running, &queued, &small] {
        assert_eq!(run.wait_for_end().await.output(), "done");
    }
    assert_eq!(metric(&app, BYTES).await, 0);
}

#[tokio::test]
async fn what_waiting_runs_keep_counts_for_the_queue() {
    const BYTES: &str = "axed_runs_queued_bytes ";
    // Nodes that share a database learn a moment later that the permit of the waiting run is free.
    let app = TestApp::setup()
        .sqlite()
        .config("[runs]\nmax_running = 1\nmax_queued_bytes = \"300 KB\"")
        .agent("held", "tools = [\"read_file\"]\nworkdir = \"work\"")
        .agent("solo", "")
        .file("work/here.txt", "here")
        .spawn()
        .await;
    let gate = Gate::closed();
    let reads = calls([("read_file", json!({"path": "here.txt"}))]);
    app.provider
        .will("held", [reads.after_gate(&gate), says("done")]);
    let waiting = app.start("held", &"long ".repeat(60_000)).await;
    app.provider.wait_for_request("held", 1).await;
    let path = format!("/runs/{}", waiting.id());
    app.post(&format!("{path}/pause"), &json!({})).await;
    gate.open();
    app.get_until(&path, |got| got.json()["status"] == "waiting")
        .await;
    metric_is(&app, BYTES, |bytes| bytes >= 300_000).await;

    let gate = app.provider.always_later("solo", "done");
    let running = app.start("solo", "go").await;
    let refused = app
        .post("/agents/solo/runs", &json!({ "input": "go" }))
        .await;
    refused.problem(429);
    assert_eq!(refused.json()["code"], "queue_full");
    gate.open();
    assert_eq!(running.wait_for_end().await.output(), "done");

    let resumed = app.post(&format!("{path}/resume"), &json!({})).await;
    assert_eq!(resumed.status, 202);
    assert_eq!(waiting.wait_for_end().await.output(), "done");
    assert_eq!(metric(&app, BYTES).await, 0);
}
