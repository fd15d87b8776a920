//! A daemon that shuts down: active runs end or stay unfinished, waiting clients get a response, and the next daemon resumes.

use reqwest::Method;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::support::app::{ApiResponse, TestApp, send};
use crate::support::events::{Events, assert_complete, count, kinds};
use crate::support::gate::Gate;
use crate::support::provider::answer::{delegates, hangs, says};
use crate::support::within_timeout;

const PLANNER: &str = "sub_agents = [\"reader\"]";
/// Longer than any story: only a signal or the last run's end is left to stop the daemon.
const LONG: &str = "drain_timeout = 3600";

/// Signals the daemon to stop and waits until it logs that it does.
async fn told_to_stop(app: &TestApp) {
    app.get_until("/readyz", |got| got.status == 200).await;
    app.daemon.signal("TERM");
    stops(app).await;
}

/// Waits until the daemon takes no new runs.
pub async fn stops(app: &TestApp) {
    let stops = |got: &ApiResponse| got.json()["checks"]["accepting"]["ok"] == false;
    let got = app.get_until("/readyz", stops).await;
    assert_eq!(got.status, 503, "{}", got.text);
}

/// Waits for the daemon's end, which is a good one.
async fn stopped(app: &mut TestApp) {
    let status = app.daemon.wait_for_exit().await;
    assert_eq!(status.code(), Some(0), "{}", app.daemon.log());
}

async fn refuses_new_runs(app: &TestApp, agent: &str) {
    let refused = app.post(&format!("/agents/{agent}/runs"), &json!({})).await;
    refused.problem(503);
    let wait = refused.header("retry-after").parse::<u64>();
    assert!(wait.is_ok_and(|wait| wait >= 1), "{:?}", refused.headers);
}

/// Clients that each start a run and wait for its end.
fn waiting(app: &TestApp, agent: &str, clients: usize) -> JoinSet<ApiResponse> {
    let path = format!("/agents/{agent}/runs?wait=180");
    let mut waiting = JoinSet::new();
    for _ in 0..clients {
        let request = app.request(Method::POST, &path);
        waiting.spawn(send(request.json(&json!({"input": "go"}))));
    }
    waiting
}

#[tokio::test]
async fn runs_end_or_are_resumed_after_a_drain_under_load() {
    let mut app = TestApp::setup()
        .server(LONG)
        .agent("quick", "")
        .agent("slow", "")
        .spawn()
        .await;
    let gate = Gate::closed();
    let door = gate.clone();
    app.provider
        .always("quick", move |_| says("quick").after_gate(&door));
    app.provider.always("slow", |_| hangs());
    let quick_waiting = waiting(&app, "quick", 20);
    let slow_waiting = waiting(&app, "slow", 10);
    let mut detached = Vec::new();
    for agent in ["quick", "slow"] {
        for _ in 0..20 {
            let run = app.start(agent, "go").await;
            detached.push((agent, run.id().to_owned()));
        }
    }
    let (mut quick_streams, mut slow_streams) = (Vec::new(), Vec::new());
    for (agent, id) in &detached {
        let streams = match *agent {
            "quick" => &mut quick_streams,
            _ => &mut slow_streams,
        };
        streams.push(app.events(&app.find(id).await).await);
    }
    app.provider.wait_for_request("quick", 40).await;
    app.provider.wait_for_request("slow", 30).await;

    told_to_stop(&app).await;
    refuses_new_runs(&app, "quick").await;
    assert_eq!(app.get("/livez").await.status, 200);
    gate.open();

    for got in quick_waiting.join_all().await {
        assert_eq!(got.status, 200, "{}", got.text);
        assert_eq!(got.json()["content"], "quick");
    }
    for stream in quick_streams {
        assert_eq!(kinds(&stream.rest().await).last(), Some(&"run.completed"));
    }
    app.daemon.signal("TERM");
    // A client that waits for an unfinished run gets its state, and a subscriber sees the stream's end.
    let mut parked = Vec::new();
    for got in slow_waiting.join_all().await {
        assert_eq!(got.status, 202, "{}", got.text);
        assert_eq!(got.json()["status"], "running");
        parked.push(got.json()["id"].as_str().expect("an id").to_owned());
    }
    for stream in slow_streams {
        let events = stream.rest().await;
        assert_eq!(kinds(&events).last(), Some(&"turn.started"));
    }
    stopped(&mut app).await;
    assert_eq!(app.provider.requests_for("slow").len(), 30);

    app.provider.always("slow", |_| says("slow"));
    app.restart_after_end().await;
    let slow = detached.iter().filter(|run| run.0 == "slow");
    parked.extend(slow.map(|run| run.1.clone()));
    for id in &parked {
        let run = app.find(id).await.wait_for_end().await;
        assert_eq!(run.output(), "slow");
        assert_eq!(run["attempt"], 2);
        assert_complete(&run.events().await);
    }
    for (_, id) in detached.iter().filter(|run| run.0 == "quick") {
        let run = app.find(id).await;
        assert_eq!(run.output(), "quick");
        assert_eq!(run["attempt"], 1);
    }
    assert_eq!(app.provider.requests_for("quick").len(), 40);
    let page = app.get("/runs?limit=200").await.json();
    assert_eq!(page["data"].as_array().map(Vec::len), Some(70));
}

#[tokio::test]
async fn a_second_signal_stops_at_once() {
    for (first, second) in [("TERM", "TERM"), ("INT", "INT"), ("TERM", "INT")] {
        let mut app = TestApp::setup()
            .server(LONG)
            .agent("slow", "")
            .spawn()
            .await;
        app.provider.will("slow", [hangs(), says("done")]);
        let id = app.start("slow", "go").await.id().to_owned();
        app.provider.wait_for_request("slow", 1).await;

        app.daemon.signal(first);
        stops(&app).await;
        app.daemon.signal(second);

        stopped(&mut app).await;
        app.provider.wait_for_disconnects(1).await;
        app.restart_after_end().await;
        let run = app.find(&id).await.wait_for_end().await;
        assert_eq!(run.output(), "done");
        assert_eq!(run["attempt"], 2);
        assert_eq!(app.provider.requests().len(), 2);
    }
}

#[tokio::test]
async fn a_run_may_still_delegate_while_the_daemon_waits_for_it() {
    let mut app = TestApp::setup()
        .server(LONG)
        .agent("planner", PLANNER)
        .agent("reader", "")
        .spawn()
        .await;
    let gate = Gate::closed();
    app.provider.will(
        "planner",
        [
            delegates([("reader", "x")]).after_gate(&gate),
            says("planned"),
        ],
    );
    app.provider.will("reader", [says("read")]);
    let mut client = waiting(&app, "planner", 1);
    app.provider.wait_for_request("planner", 1).await;

    told_to_stop(&app).await;
    gate.open();

    let got = client
        .join_next()
        .await
        .expect("a client")
        .expect("no panic");
    assert_eq!(got.status, 200, "{}", got.text);
    assert_eq!(got.json()["content"], "planned");
    stopped(&mut app).await;
    app.restart_after_end().await;
    let id = got.json()["id"].as_str().expect("an id").to_owned();
    assert_eq!(app.find(&id).await.tree_runs().await.len(), 2);
    assert_eq!(app.provider.requests().len(), 3);
}

#[tokio::test]
async fn the_daemon_exits_after_the_last_cancel() {
    let mut app = TestApp::setup()
        .server(LONG)
        .agent("planner", PLANNER)
        .agent("reader", "")
        .spawn()
        .await;
    app.provider.will("planner", [delegates([("reader", "x")])]);
    app.provider.will("reader", [hangs()]);
    let run = app.start("planner", "go").await;
    app.provider.wait_for_request("reader", 1).await;

    told_to_stop(&app).await;
    let cancelled = run.cancel("no time").await;

    assert_eq!(cancelled.status(), "cancelled");
    let id = cancelled.id().to_owned();
    stopped(&mut app).await;
    app.restart_after_end().await;
    let family = app.find(&id).await.tree_runs().await;
    let statuses: Vec<_> = family.iter().map(|run| run["status"].clone()).collect();
    assert_eq!(statuses, ["cancelled", "cancelled"]);
    assert_eq!(app.provider.requests().len(), 2);
}

#[tokio::test]
async fn a_stopped_tree_resumes_and_its_stream_misses_no_event() {
    let mut app = TestApp::setup()
        .server("drain_timeout = 1")
        .agent("planner", PLANNER)
        .agent("reader", "")
        .spawn()
        .await;
    let tasks = [("reader", "1"), ("reader", "2")];
    app.provider
        .will("planner", [delegates(tasks), says("done")]);
    app.provider
        .will("reader", [says("read"), hangs(), says("read")]);
    let run = app.start("planner", "go").await;
    let id = run.id().to_owned();
    let mut stream = app.events(&run).await;
    let mut received = stream
        .until_matches(|events| {
            count(events, "tool.completed") == 1 && count(events, "turn.started") == 3
        })
        .await;
    app.provider.wait_for_request("reader", 2).await;
    let ids =
        |family: &[Value]| -> Vec<Value> { family.iter().map(|run| run["id"].clone()).collect() };
    let before = ids(&run.tree_runs().await);

    app.daemon.signal("TERM");
    received.extend(stream.rest().await);
    stopped(&mut app).await;
    // Both processes say what they did.
    app.daemon.wait_for_log(&id).await;
    app.restart_after_end().await;

    let last = received.last().expect("events").seq();
    let request = app
        .request(Method::GET, &format!("/runs/{id}/events"))
        .header("accept", "text/event-stream")
        .header("last-event-id", last.to_string());
    let response = within_timeout("the stream's head", request.send()).await;
    received.extend(Events::new(response.expect("listen")).rest().await);
    assert_complete(&received);
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "done");
    assert_eq!(run["attempt"], 2);
    assert_eq!(received, run.events().await);
    assert_eq!(count(&received, "run.queued"), 3);
    assert_eq!(count(&received, "tool.completed"), 2);
    assert_eq!(ids(&run.tree_runs().await), before);
    let attempts: u64 = run
        .children()
        .await
        .iter()
        .filter_map(|child| child["attempt"].as_u64())
        .sum();
    assert_eq!(attempts, 3, "one child had ended, one was parked");
    assert_eq!(app.provider.requests_for("planner").len(), 2);
    assert_eq!(app.provider.requests_for("reader").len(), 3);
    let (input, output, _) = run.tree_usage();
    let ledger = app.provider.ledger();
    assert_eq!((input, output), (ledger.input, ledger.output));
    app.daemon.wait_for_log(&id).await;
}

#[tokio::test]
async fn a_queued_run_survives_shutdown() {
    let mut app = TestApp::setup()
        .server(LONG)
        .config("[runs]\nmax_running = 1")
        .agent("solo", "")
        .spawn()
        .await;
    app.provider.will("solo", [hangs()]);
    app.provider.always("solo", |seen| {
        says(format!("did {}", seen.user_messages()[0]))
    });
    let mut ids = Vec::new();
    for input in ["1", "2", "3"] {
        ids.push(app.start("solo", input).await.id().to_owned());
    }
    app.provider.wait_for_request("solo", 1).await;

    told_to_stop(&app).await;
    app.daemon.signal("TERM");
    stopped(&mut app).await;
    app.restart_after_end().await;

    for (at, id) in ids.iter().enumerate() {
        let run = app.find(id).await.wait_for_end().await;
        assert_eq!(run.output(), format!("did {}", at + 1));
        let events = run.events().await;
        assert_complete(&events);
        assert_eq!(count(&events, "run.queued"), 1);
    }
    assert_eq!(app.provider.requests().len(), 4);
}

#[tokio::test]
async fn shutdown_during_a_streamed_reply_records_no_partial_reply() {
    let mut app = TestApp::setup()
        .server(LONG)
        .agent("solo", "stream = true")
        .spawn()
        .await;
    let never = Gate::closed();
    app.provider.will(
        "solo",
        [says("half a thought").pausing_at(&never), says("all of it")],
    );
    let run = app.start("solo", "go").await;
    let id = run.id().to_owned();
    let stream = app.events(&run).await;
    app.provider.wait_for_request("solo", 1).await;

    told_to_stop(&app).await;
    app.daemon.signal("TERM");
    stream.rest().await;
    stopped(&mut app).await;
    app.restart_after_end().await;

    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "all of it");
    let sent = app.provider.requests();
    assert_eq!(sent[0].body, sent[1].body);
    assert!(sent[1].wants_stream());
}

#[tokio::test]
async fn an_idle_daemon_stops_at_once() {
    let mut app = TestApp::setup()
        .server(LONG)
        .agent("solo", "")
        .spawn()
        .await;
    app.provider.will("solo", [says("done")]);
    app.run("solo", "go").await;

    app.daemon.signal("TERM");

    stopped(&mut app).await;
}
