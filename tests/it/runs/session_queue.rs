//! Runs of a busy session: queued, rejected, or cancelling the ones before.

use crate::runs::sessions::{busy, counts, sent_request, solo, talk};
use crate::support::app::{TestApp, send};
use crate::support::gate::Gate;
use crate::support::provider::answer::{hangs, says};
use futures_util::future::join_all;
use reqwest::Method;
use serde_json::json;

#[tokio::test]
async fn runs_of_a_busy_session_wait_in_order_without_a_permit() {
    let app = TestApp::setup()
        .config("[runs]\nmax_running = 2\nmax_queued = 3")
        .agent("solo", "")
        .agent("free", "")
        .spawn()
        .await;
    let gate = Gate::closed();
    app.provider.always("solo", counts(&gate));
    app.provider.always("free", |_| says("passed"));
    let mut runs = Vec::new();
    for input in ["1", "2", "3", "4"] {
        runs.push(app.start_with("solo", talk(input)).await);
    }
    app.provider.wait_for_concurrency("solo", 1).await;
    for waiting in &runs[1..] {
        assert_eq!(waiting.reload().await.status(), "queued");
    }
    // They count as waiting, and the second slot is free.
    let refused = app.post("/agents/solo/runs", &talk("5")).await;
    refused.problem(429);
    assert_eq!(refused.json()["queued"], 3);
    assert_eq!(app.run("free", "go").await.output(), "passed");
    let other = app
        .start_with("solo", json!({"input": "other", "session": "other"}))
        .await;
    app.provider.wait_for_concurrency("solo", 2).await;
    gate.open();

    assert_eq!(other.wait_for_end().await.output(), "got 1");
    for (run, received) in runs.iter().zip(1..) {
        assert_eq!(run.wait_for_end().await.output(), format!("got {received}"));
    }
    let order: Vec<_> = sent_request(&app)
        .into_iter()
        .filter(|said| said.len() == 1)
        .collect();
    assert_eq!(order, ["1", "2", "3", "4"]);
    let all = runs[3].messages().await;
    assert_eq!(all["data"].as_array().map(Vec::len), Some(8));
}

#[tokio::test]
async fn cancelling_a_queued_run_keeps_the_sessions_order() {
    let app = solo().await;
    let gate = Gate::closed();
    app.provider.always("solo", counts(&gate));
    let first = app.start_with("solo", talk("1")).await;
    let second = app.start_with("solo", talk("2")).await;
    let third = app.start_with("solo", talk("3")).await;
    app.provider.wait_for_concurrency("solo", 1).await;

    assert_eq!(second.cancel("never mind").await.status(), "cancelled");
    assert_eq!(third.reload().await.status(), "queued");
    gate.open();

    assert_eq!(first.wait_for_end().await.output(), "got 1");
    assert_eq!(third.wait_for_end().await.output(), "got 2");
    assert_eq!(sent_request(&app), ["1", "3"]);
}

#[tokio::test]
async fn a_busy_session_accepts_repeated_idempotent_requests() {
    let app = solo().await;
    app.provider.always("solo", |_| says("done"));
    for number in 0..30 {
        let body = json!({"input": "1", "session": format!("s{number}"), "on_busy": "reject"});
        let posts = (0..8).map(|_| {
            let request = app.request(Method::POST, "/agents/solo/runs");
            let key = format!("k{number}");
            send(request.header("idempotency-key", key).json(&body))
        });
        let got = join_all(posts).await;
        for post in &got {
            assert!(post.status < 300, "{}", post.text);
            assert_eq!(post.json()["id"], got[0].json()["id"]);
        }
    }
}

#[tokio::test]
async fn a_busy_session_can_reject() {
    let app = solo().await;
    let gate = Gate::closed();
    app.provider.always("solo", counts(&gate));
    let first = app.start_with("solo", talk("1")).await;

    let refused = app.post("/agents/solo/runs", &busy("2", "reject")).await;

    let detail = refused.problem(409);
    assert!(detail.contains(first.id()), "{detail}");
    assert_eq!(refused.json()["code"], "session_busy");
    gate.open();
    first.wait_for_end().await;
    // Who knows of the end finds the session free, however often.
    for received in 2..30 {
        let next = app.run_with("solo", busy("x", "reject")).await;
        assert_eq!(next.output(), format!("got {received}"));
    }
}

#[tokio::test]
async fn unfinished_runs_before_can_be_cancelled() {
    let app = solo().await;
    app.provider.will("solo", [says("zero"), hangs()]);
    app.provider.always("solo", |seen| {
        says(format!("got {}", seen.user_messages().len()))
    });
    app.run_with("solo", talk("0")).await;
    let first = app.start_with("solo", talk("1")).await;
    let second = app.start_with("solo", talk("2")).await;
    app.provider.wait_for_request("solo", 2).await;

    let third = app.run_with("solo", busy("3", "cancel_previous")).await;

    assert_eq!(third.output(), "got 2");
    for run in [&first, &second] {
        let ended = run.wait_for_end().await;
        assert_eq!(ended.status(), "cancelled");
        let reason = ended["cancel_reason"]
            .as_str()
            .expect("a reason")
            .to_owned();
        assert_eq!(
            reason,
            format!("{} takes its place in the session", third.id())
        );
    }
    assert_eq!(sent_request(&app), ["0", "1", "3"]);
    // A free session has no run to cancel.
    let fourth = app.run_with("solo", busy("4", "cancel_previous")).await;
    assert_eq!(fourth.output(), "got 3");
}

#[tokio::test]
async fn a_run_that_cannot_cancel_earlier_runs_is_not_accepted() {
    let app = solo().await;
    let gate = Gate::closed();
    app.provider.will("solo", [says("first").after_gate(&gate)]);
    let first = app.start_with("solo", talk("1")).await;
    app.provider.wait_for_request("solo", 1).await;
    let db = app.database();
    db.refuse_entries(&db.contains("new.entries", "run.cancelling"));

    // Both are in one transaction: a daemon that dies between the two cannot lose one of them.
    let path = "/agents/solo/runs";
    let refused = app.post(path, &busy("2", "cancel_previous")).await;

    refused.problem(503);
    gate.open();
    assert_eq!(first.wait_for_end().await.output(), "first");
}

#[tokio::test]
async fn the_order_of_a_session_survives_a_crash() {
    let mut app = solo().await;
    app.provider.will("solo", [says("zero"), hangs()]);
    app.provider.always("solo", |seen| {
        says(format!("got {}", seen.user_messages().len()))
    });
    app.run_with("solo", talk("0")).await;
    let mut runs = Vec::new();
    for input in ["1", "2", "3"] {
        let run = app.start_with("solo", talk(input)).await;
        runs.push(run.id().to_owned());
    }
    app.provider.wait_for_request("solo", 2).await;

    app.crash_and_restart().await;

    for (id, received) in runs.iter().zip(2..) {
        let ended = app.find(id).await.wait_for_end().await;
        assert_eq!(ended.output(), format!("got {received}"));
    }
    assert_eq!(sent_request(&app), ["0", "1", "1", "2", "3"]);
    assert_eq!(app.provider.max_concurrency("solo"), 1);
    assert_eq!(app.get("/sessions/talk").await.json()["messages"], 8);
}

#[tokio::test]
async fn shutdown_keeps_the_order_of_a_session() {
    let mut app = TestApp::setup()
        .server("drain_timeout = 0")
        .agent("solo", "")
        .spawn()
        .await;
    app.provider.will("solo", [hangs()]);
    app.provider.always("solo", |seen| {
        says(format!("got {}", seen.user_messages().len()))
    });
    let mut runs = Vec::new();
    for input in ["1", "2", "3"] {
        let run = app.start_with("solo", talk(input)).await;
        runs.push(run.id().to_owned());
    }
    app.provider.wait_for_request("solo", 1).await;

    app.restart().await;

    for (id, received) in runs.iter().zip(1..) {
        let ended = app.find(id).await.wait_for_end().await;
        assert_eq!(ended.output(), format!("got {received}"));
    }
    assert_eq!(sent_request(&app), ["1", "1", "2", "3"]);
}
