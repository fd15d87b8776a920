//! Clients of every protocol at a daemon that cannot drive their runs: the same text and end as at the one that does.

use reqwest::RequestBuilder;
use serde_json::{Value, json};

use crate::cluster::following::{live_text, read_text, stream_at, without_live};
use crate::cluster::{other, spawn};
use crate::support::app::TestApp;
use crate::support::daemon::Daemon;
use crate::support::events::{Events, assert_complete};
use crate::support::gate::Gate;
use crate::support::provider::answer::says;
use crate::support::within_timeout;

const TEXT: &str = "one two three four five six";

/// A daemon that drives the runs of the agent solo, and one that only has clients.
async fn driver_and_front() -> Option<(TestApp, Daemon)> {
    let setup = TestApp::setup()
        .agent("solo", "node = [\"gpu\"]\nstream = true")
        .environment("AXED_CLUSTER__LABELS", "gpu");
    let (app, url) = spawn(setup).await?;
    let front = Daemon::start(other(&app, &url, "front")).await;
    Some((app, front))
}

/// A streamed request of each protocol, with whether the run ends if the client goes away.
fn requests(app: &TestApp, front: &Daemon) -> [(&'static str, RequestBuilder, bool); 6] {
    let post = |path: &str, body: Value| {
        let request = app.client.post(format!("{}{path}", front.url)).json(&body);
        request.header("accept", "application/json, text/event-stream")
    };
    let user = json!({"id": "1", "role": "user", "content": "x"});
    let chat =
        json!({"model": "solo", "stream": true, "messages": [{"role": "user", "content": "x"}]});
    let responses = json!({"model": "solo", "stream": true, "input": "x"});
    let ag_ui = json!({"threadId": "t", "runId": "r", "messages": [user], "tools": [], "context": [], "state": {}, "forwardedProps": {}});
    let message = json!({"role": "ROLE_USER", "parts": [{"text": "x"}], "messageId": "m"});
    let call =
        json!({"name": "solo", "arguments": {"input": "x"}, "_meta": {"progressToken": "p"}});
    let rpc = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call});
    [
        ("chat", post("/v1/chat/completions", chat), false),
        ("responses", post("/v1/responses", responses), false),
        (
            "events",
            post("/agents/solo/runs", json!({"input": "x"})),
            false,
        ),
        (
            "a2a",
            post("/a2a/solo/message:stream", json!({"message": message}))
                .header("a2a-version", "1.0"),
            false,
        ),
        ("ag-ui", post("/agents/solo/ag-ui", ag_ui), true),
        (
            "mcp",
            post("/mcp", rpc).header("mcp-protocol-version", "2025-06-18"),
            true,
        ),
    ]
}

/// The text of a stream, put together from its pieces.
fn text_of(stream: &str) -> String {
    let data = stream
        .lines()
        .filter_map(|line| line.strip_prefix("data: "));
    let values = data.filter_map(|data| serde_json::from_str::<Value>(data).ok());
    let piece = |value: Value| {
        let pieces = [
            &value["choices"][0]["delta"]["content"],
            &value["artifactUpdate"]["artifact"]["parts"][0]["text"],
            &value["result"]["content"][0]["text"],
        ];
        let is_delta = ["response.output_text.delta", "TEXT_MESSAGE_CONTENT"]
            .contains(&value["type"].as_str().unwrap_or_default());
        let delta = if is_delta {
            &value["delta"]
        } else {
            &Value::Null
        };
        let content = match value["type"].as_str() {
            Some("run.completed") => &value["content"],
            _ => &Value::Null,
        };
        let mut found = pieces.into_iter().chain([delta, content]);
        let found = found.find_map(Value::as_str).unwrap_or_default();
        found.to_owned()
    };
    values.map(piece).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_of_every_protocol_get_the_text_and_the_end() {
    let Some((app, front)) = driver_and_front().await else {
        return;
    };
    for (protocol, request, _) in requests(&app, &front) {
        app.provider.will("solo", [says(TEXT)]);
        let got = within_timeout(protocol, async {
            let response = request.send().await.expect("a response");
            assert_eq!(response.status(), 200, "{protocol}");
            response.text().await.expect("a body")
        })
        .await;
        assert_eq!(text_of(&got), TEXT, "{protocol}: {got}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_goes_away_ends_its_run_only_where_the_protocol_says_so() {
    let Some((app, front)) = driver_and_front().await else {
        return;
    };
    for (number, (protocol, request, is_cancelled)) in (1..).zip(requests(&app, &front)) {
        let gate = Gate::closed();
        app.provider.will("solo", [says(TEXT).after_gate(&gate)]);
        let response = async {
            let response = request.send().await.expect("a response");
            response.text().await
        };
        tokio::select! {
            got = response => panic!("{protocol} has ended: {got:?}"),
            _ = app.provider.wait_for_request("solo", number) => {}
        }
        let runs = app.get("/runs?limit=1").await.json();
        let run = app
            .find(runs["data"][0]["id"].as_str().expect("an id"))
            .await;
        let status = match is_cancelled {
            true => "cancelled",
            false => {
                gate.open();
                "completed"
            }
        };
        assert_eq!(run.wait_for_end().await.status(), status, "{protocol}");
        assert_complete(&run.events().await);
    }
}

/// The deltas of a run come from the node that takes it, which the follower's node learns after it has answered: often when the
/// first are written.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn followers_get_each_delta_of_runs_that_another_daemon_takes() {
    const RUNS: usize = 12;
    let Some((app, front)) = driver_and_front().await else {
        return;
    };
    for _ in 0..RUNS {
        let [gate, last_gate] = [(); 2].map(|()| Gate::closed());
        let answer = says(TEXT).pausing_at(&gate).ending_at(&last_gate);
        app.provider.will("solo", [answer]);
        let url = format!("{}/agents/solo/runs", front.url);
        let request = app.client.post(url).json(&json!({"input": "x"}));
        let response = request.header("accept", "text/event-stream").send().await;
        let mut stream = Events::new(response.expect("a response"));
        let mut events = stream.until("text.delta").await;
        gate.open();
        read_text(&mut stream, &mut events, TEXT).await;
        last_gate.open();
        events.extend(stream.rest().await);
        assert_eq!(live_text(&events), TEXT);
        assert_complete(&without_live(events));
    }
}

/// The follower's node learns whom to ask when the first text is written already.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_gets_what_was_written_before_its_daemon_knew_the_owner() {
    let Some((app, front)) = driver_and_front().await else {
        return;
    };
    let [first_gate, gate, last_gate] = [(); 3].map(|()| Gate::closed());
    let answer = says(TEXT).after_gate(&first_gate).pausing_at(&gate);
    app.provider.will("solo", [answer.ending_at(&last_gate)]);
    app.daemon.signal("STOP");
    let url = format!("{}/agents/solo/runs", front.url);
    let request = app.client.post(url).json(&json!({"input": "x"}));
    let request = request.header("accept", "text/event-stream").send();
    let response = within_timeout("the stream's head", request).await;
    let response = response.expect("a response");
    let location = response.headers()["location"].to_str().expect("a URL");
    let id = location.rsplit('/').next().expect("an id").to_owned();
    front.signal("STOP");
    app.daemon.signal("CONT");
    app.provider.wait_for_request("solo", 1).await;
    let mut driven = stream_at(&app.daemon, &id, 0).await;
    driven.until("turn.started").await;
    first_gate.open();
    driven.until("text.delta").await;
    front.signal("CONT");
    let mut stream = Events::new(response);
    let mut events = stream.until("text.delta").await;
    gate.open();
    read_text(&mut stream, &mut events, TEXT).await;
    last_gate.open();
    events.extend(stream.rest().await);
    assert_eq!(live_text(&events), TEXT);
    assert_complete(&without_live(events));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_response_whose_run_another_node_deletes_ends() {
    let Some((app, front)) = driver_and_front().await else {
        return;
    };
    let gate = Gate::closed();
    let held = gate.clone();
    app.provider
        .always("solo", move |_| says(TEXT).after_gate(&held));
    let body = json!({"model": "solo", "stream": true, "input": "x", "store": false});
    let open = async |url: &str| {
        let request = app.client.post(format!("{url}/v1/responses"));
        let request = request.header("Idempotency-Key", "k").json(&body);
        request.send().await.expect("a response")
    };
    let responses = [open(&app.daemon.url).await, open(&front.url).await];
    gate.open();
    for response in responses {
        let text = within_timeout("the end of a response", response.text());
        let text = text.await.expect("a stream");
        let has_end = text.contains("response.completed") || text.contains("run_not_found");
        assert!(has_end, "{text}");
    }
}
