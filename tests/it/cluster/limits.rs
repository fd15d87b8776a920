//! Limits and the order of sessions hold for all daemons together.

use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use reqwest::Method;
use serde_json::json;
use tokio::task::JoinSet;

use crate::cluster::{other, pair, spawn};
use crate::providers::rate_limits::{HELD_LIMIT, HOLDING, holding};
use crate::support::app::{TestApp, send};
use crate::support::daemon::Daemon;
use crate::support::events::assert_complete;
use crate::support::gate::Gate;
use crate::support::provider::answer::says;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_hold_over_all_daemons() {
    let setup = TestApp::setup()
        .config("[runs]\nmax_running = 3\n[runs.per_agent]\nplanner = 1")
        .agent("planner", "")
        .agent("solo", "");
    let Some((mut app, url)) = spawn(setup).await else {
        return;
    };
    let gate = Gate::closed();
    for agent in ["planner", "solo"] {
        let door = gate.clone();
        app.provider
            .always(agent, move |_| says("done").after_gate(&door));
    }
    let mut second = Daemon::start(other(&app, &url, "second")).await;
    let mut ids = Vec::new();
    for number in 0..12 {
        let agent = ["planner", "solo"][number / 2 % 2];
        ids.push(app.start(agent, "x").await.id().to_owned());
        std::mem::swap(&mut app.daemon, &mut second);
    }
    app.provider.wait_for_requests(3).await;
    gate.open();
    for id in &ids {
        assert_eq!(app.find(id).await.wait_for_end().await.output(), "done");
    }
    assert_eq!(app.provider.max_concurrency("planner"), 1);
    assert!(app.provider.max_concurrency("solo") <= 3);
}

/// More than the daemons may start together arrives at all of them at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_burst_at_all_daemons_stays_within_the_limit() {
    let setup = TestApp::setup()
        .config("[runs]\nmax_running = 40")
        .agent("solo", "");
    let Some((app, second, url)) = pair(setup).await else {
        return;
    };
    let third = Daemon::start(other(&app, &url, "third")).await;
    let gate = Gate::closed();
    let door = gate.clone();
    app.provider
        .always("solo", move |_| says("done").after_gate(&door));
    let daemons = [&app.daemon, &second, &third];
    let starts = daemons.iter().flat_map(|daemon| {
        let path = format!("{}/agents/solo/runs", daemon.url);
        std::iter::repeat_n(path, 40).map(|path| {
            let request = app.client.post(path).json(&json!({"input": "x"}));
            async { request.send().await.expect("an answer").status() }
        })
    });
    let statuses = join_all(starts).await;
    assert!(statuses.iter().all(|status| *status == 202), "{statuses:?}");
    app.provider.wait_for_requests(40).await;
    gate.open();
    app.provider.wait_for_requests(120).await;
    assert!(app.provider.max_concurrency("solo") <= 40);
}

/// What one daemon uses of a provider's limit, the others do not have.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn daemons_share_the_rate_limit_of_a_provider() {
    let setup = TestApp::setup()
        .config(HELD_LIMIT)
        .agent("holding", HOLDING)
        .agent("solo", "");
    let Some((mut app, mut second, _)) = pair(setup).await else {
        return;
    };
    let gate = holding(&app);
    app.provider.always("solo", |_| says("done"));
    let id = app.start("holding", "x").await.id().to_owned();
    app.provider.wait_for_requests(1).await;
    std::mem::swap(&mut app.daemon, &mut second);
    // The second one knows the limit because the first one has reported what it used of it.
    let is_known = |text: &str| text.contains("axed_rate_limit_limit{provider=\"anthropic\"");
    app.get_until("/metrics", |got| is_known(&got.text)).await;
    let run = app.start("solo", "x").await;
    app.events(&run).await.until("turn.delayed").await;
    // What the first one gives back is reported too.
    gate.open();
    assert_eq!(run.wait_for_end().await.output(), "done");
    assert_eq!(app.find(&id).await.wait_for_end().await.output(), "done");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queued_runs_of_a_daemon_that_stops_start_at_others() {
    let setup = TestApp::setup()
        .server("drain_timeout = 3600")
        .config("[runs]\nmax_running = 2")
        .agent("solo", "")
        .agent("planner", "")
        .agent("queued", "");
    let Some((mut app, second, _)) = pair(setup).await else {
        return;
    };
    let (gate, other_gate) = (Gate::closed(), Gate::closed());
    app.provider.will("solo", [says("done").after_gate(&gate)]);
    app.provider
        .will("planner", [says("planned").after_gate(&other_gate)]);
    app.provider.always("queued", |_| says("at last"));
    let running = app.start("solo", "x").await.id().to_owned();
    app.provider.wait_for_request("solo", 1).await;
    let first = std::mem::replace(&mut app.daemon, second);
    app.start("planner", "x").await;
    app.provider.wait_for_request("planner", 1).await;
    let second = std::mem::replace(&mut app.daemon, first);
    let mut ids = Vec::new();
    for _ in 0..20 {
        ids.push(app.start("queued", "x").await.id().to_owned());
    }
    app.daemon.signal("TERM");
    app.daemon.wait_for_log("Stopping: ").await;
    let mut clients = JoinSet::new();
    for id in &ids {
        let request = app.request(Method::GET, &format!("/runs/{id}?wait=300"));
        clients.spawn(send(request));
    }
    let mut first = std::mem::replace(&mut app.daemon, second);
    other_gate.open();
    for got in clients.join_all().await {
        assert_eq!(got.json()["content"], "at last", "{}", got.text);
    }
    for id in &ids {
        let run = app.find(id).await.wait_for_end().await;
        assert_eq!(run.output(), "at last");
        assert_complete(&run.events().await);
    }
    gate.open();
    assert!(first.wait_for_exit().await.success());
    assert_eq!(app.find(&running).await.output(), "done");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_not_committed_counts() {
    let setup = TestApp::setup()
        .config("[runs]\nmax_running = 1\nmax_queued = 0")
        .agent("solo", "");
    let Some((app, _)) = spawn(setup).await else {
        return;
    };
    app.provider.always("solo", |_| says("done"));
    let source = app.run("solo", "x").await;
    let fork = format!("/runs/{}/fork", source.id());
    let start = "/agents/solo/runs".to_owned();
    for (ended, path, body) in [
        (1, fork, json!({"at": {"turn": 1}})),
        (2, start, json!({"input": "x"})),
    ] {
        app.get_until("/runs?status=completed", |got| {
            let runs = got.json()["data"].as_array().map(Vec::len);
            runs == Some(ended)
        })
        .await;
        let lock = app.database().lock();
        let requests = std::iter::repeat_with(|| app.post(&path, &body)).take(6);
        let mut answers: FuturesUnordered<_> = requests.collect();
        for _ in 1..6 {
            let refused = answers.next().await.expect("an answer");
            assert_eq!(refused.status, 429, "{}", refused.text);
        }
        // The client of the one that was accepted disconnects.
        drop(answers);
        for _ in 0..5 {
            let refused = app.post(&path, &body).await;
            assert_eq!(refused.status, 429, "{}", refused.text);
        }
        lock.release();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_runs_of_a_session_wait_for_each_other_on_all_daemons() {
    let Some((mut app, url)) = spawn(TestApp::setup().agent("solo", "")).await else {
        return;
    };
    let gate = Gate::closed();
    let door = gate.clone();
    app.provider
        .always("solo", move |_| says("done").after_gate(&door));
    let mut second = Daemon::start(other(&app, &url, "second")).await;
    let mut ids = Vec::new();
    for number in 0..8 {
        let body = json!({"input": format!("{number}"), "session": "talk"});
        ids.push(app.start_with("solo", body).await.id().to_owned());
        std::mem::swap(&mut app.daemon, &mut second);
    }
    let taken = json!({"input": "x", "session": "talk", "on_busy": "reject"});
    let refused = app.post("/agents/solo/runs", &taken).await;
    assert_eq!(refused.status, 409, "{}", refused.text);
    app.provider.wait_for_requests(1).await;
    gate.open();
    for id in &ids {
        assert_eq!(app.find(id).await.wait_for_end().await.output(), "done");
    }
    assert_eq!(app.provider.max_concurrency("solo"), 1);
    assert!(ids.is_sorted());
    // Each has those before it in its conversation.
    let requests = app.provider.requests_for("solo");
    let lengths = requests
        .iter()
        .map(|request| request.body["messages"].as_array().map_or(0, Vec::len));
    assert!(lengths.is_sorted(), "{requests:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_is_deleted_leaves_no_row() {
    let Some((app, _)) = spawn(TestApp::setup().agent("solo", "")).await else {
        return;
    };
    app.provider.always("solo", |_| says("done"));
    let in_session = json!({"input": "x", "session": "talk"});
    for _ in 0..2 {
        let first = app.run_with("solo", in_session.clone()).await;
        let last = app.run_with("solo", in_session.clone()).await;
        assert_eq!(app.database().count("sessions"), 1);
        app.delete(&format!("/runs/{}", first.id())).await;
        assert_eq!(app.database().count("sessions"), 1);
        app.delete(&format!("/runs/{}", last.id())).await;
        assert_eq!(app.database().count("sessions"), 0);
    }
    app.run_with("solo", in_session).await;
    assert_eq!(app.delete("/sessions/talk").await.status, 204);
    assert_eq!(app.database().count("sessions"), 0);
}
