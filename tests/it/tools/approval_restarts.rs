//! Pending approvals over restarts and drains.

use crate::support::app::send;
use crate::support::events::assert_complete;
use crate::support::gate::Gate;
use crate::support::provider::answer::{delegates, hangs, says};
use crate::tools::approvals::{
    approve, careful, decide, ended_well, find, requests, sent, writes, wrote,
};
use reqwest::Method;
use serde_json::json;
use tokio::task::JoinSet;

#[tokio::test]
async fn a_restarted_daemon_accepts_decisions_at_once() {
    for agent in ["careful", "planner"] {
        // A second run has the only slot: those that wait need none before they are decided.
        let mut app = careful("").config("[runs]\nmax_running = 1").spawn().await;
        app.provider
            .will("planner", [delegates([("careful", "write")]), says("done")]);
        app.provider.will("careful", [writes("a"), says("done")]);
        let (id, request) = sent(&app, agent).await;
        // The pause is recorded after the request.
        let path = format!("/runs/{id}");
        app.get_until(&path, |got| got.json()["status"] == "waiting")
            .await;
        app.crash_and_restart().await;
        assert_eq!(app.find(&id).await.status(), "waiting");
        approve(&app, &request).await;
        let run = app.find(&id).await.wait_for_end().await;
        assert_eq!(run.output(), "done");
        assert!(wrote(&app, "a"));
        let events = run.events().await;
        assert_complete(&events);
        find(&events, "approval.requested");
        find(&events, "approval.decided");
    }
}

#[tokio::test]
async fn time_is_paused_without_a_daemon_too() {
    let mut app = careful("").agent("other", "timeout = 20").spawn().await;
    app.provider.will("careful", [writes("a"), says("done")]);
    let body = json!({"input": "go", "timeout": 20});
    let id = app
        .start_with("careful", body.clone())
        .await
        .id()
        .to_owned();
    let request = requests(&app, &id, 1).await.remove(0);
    app.provider
        .will("other", [says("late").after_gate(&Gate::closed())]);
    assert_eq!(app.run_with("other", body).await.failure().0, "timeout");
    app.crash_and_restart().await;
    approve(&app, &request).await;
    ended_well(&app.find(&id).await, 1).await;
}

#[tokio::test]
async fn a_decision_survives_a_restart() {
    for (decision, calls) in [("approve", 1), ("deny", 0)] {
        let mut app = careful("").config("[runs]\nmax_running = 1").spawn().await;
        app.provider.will("careful", [writes("a"), says("done")]);
        let (id, request) = sent(&app, "careful").await;
        // It is decided, but cannot continue before it has a permit again.
        app.provider
            .will("solo", [says("x").after_gate(&Gate::closed())]);
        let other = app.start("solo", "go").await.id().to_owned();
        app.provider.wait_for_request("solo", 1).await;
        let decided = decide(
            &app,
            &request,
            json!({"decision": decision, "reason": "so"}),
        )
        .await;
        assert_eq!(decided.status, 202, "{}", decided.text);
        app.provider.will("solo", [says("done")]);
        app.crash_and_restart().await;
        decide(&app, &request, json!({"decision": "approve"}))
            .await
            .problem(409);
        assert_eq!(app.find(&other).await.wait_for_end().await.output(), "done");
        ended_well(&app.find(&id).await, calls).await;
        assert_eq!(wrote(&app, "a"), decision == "approve");
    }
}

#[tokio::test]
async fn shutdown_does_not_wait_for_pending_approvals() {
    let mut app = careful("").server("drain_timeout = 600").spawn().await;
    app.provider
        .will("planner", [delegates([("careful", "write")]), says("done")]);
    app.provider.will("careful", [writes("a"), says("written")]);
    let (id, request) = sent(&app, "planner").await;
    app.restart().await;
    assert_eq!(app.find(&id).await.status(), "waiting");
    approve(&app, &request).await;
    assert_eq!(app.find(&id).await.wait_for_end().await.output(), "done");
}

#[tokio::test]
async fn a_cancel_while_the_daemon_drains_is_in_the_record() {
    let mut app = careful("").server("drain_timeout = 600").spawn().await;
    app.provider.will("careful", [writes("a")]);
    app.provider.will("solo", [hangs(), says("done")]);
    let talk = |input: &str| json!({"input": input, "session": "talk"});
    let waits = app.start_with("careful", talk("1")).await.id().to_owned();
    requests(&app, &waits, 1).await;
    let behind = app.start_with("careful", talk("2")).await.id().to_owned();
    let busy = app.start("solo", "go").await.id().to_owned();
    app.provider.wait_for_request("solo", 1).await;
    let mut clients = JoinSet::new();
    for id in [&waits, &behind] {
        let request = app.request(Method::GET, &format!("/runs/{id}?wait=300"));
        clients.spawn(send(request));
    }
    app.daemon.signal("TERM");
    app.daemon
        .wait_for_log(&format!("{behind} stays as last committed"))
        .await;

    for id in [&waits, &behind] {
        let path = format!("/runs/{id}/cancel");
        let cancelled = app.post(&path, &json!({"reason": "no more"})).await;
        assert_eq!(cancelled.status, 202, "{}", cancelled.text);
        assert_eq!(cancelled.json()["status"], "cancelling");
    }

    app.daemon.signal("TERM");
    // They waited on when their runs were put aside.
    for got in clients.join_all().await {
        assert_eq!(got.json()["status"], "cancelling", "{}", got.text);
    }
    app.daemon.wait_for_exit().await;
    app.restart_after_end().await;
    for id in [&waits, &behind] {
        let ended = app.find(id).await.wait_for_end().await;
        assert_eq!(ended.status(), "cancelled");
        assert_eq!(ended["cancel_reason"], "no more");
    }
    assert_eq!(app.find(&busy).await.wait_for_end().await.output(), "done");
    assert!(!wrote(&app, "a"));
}

#[tokio::test]
async fn shutdown_keeps_the_order_behind_a_pending_approval() {
    let mut app = careful("").server("drain_timeout = 600").spawn().await;
    app.provider
        .will("careful", [writes("a"), says("first"), says("second")]);
    let talk = |input: &str| json!({"input": input, "session": "talk"});
    let first = app.start_with("careful", talk("1")).await.id().to_owned();
    let request = requests(&app, &first, 1).await.remove(0);
    let second = app.start_with("careful", talk("2")).await.id().to_owned();
    // Nor does it wait for those behind.
    app.restart().await;
    assert_eq!(app.find(&second).await.status(), "queued");
    approve(&app, &request).await;
    assert_eq!(
        app.find(&first).await.wait_for_end().await.output(),
        "first"
    );
    assert_eq!(
        app.find(&second).await.wait_for_end().await.output(),
        "second"
    );
    let received = app.provider.requests();
    assert_eq!(
        received.last().expect("a request").user_messages(),
        ["1", "2"]
    );
}
