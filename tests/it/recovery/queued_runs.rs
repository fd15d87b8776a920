//! Queued runs over kills.

use crate::recovery::after_kill::{begun, started};
use crate::support::app::TestApp;
use crate::support::events::{assert_complete, count};
use crate::support::provider::answer::{hangs, says};
use serde_json::json;

#[tokio::test]
async fn queued_runs_survive_in_order() {
    let mut app = TestApp::setup()
        .config("[runs]\nmax_running = 1")
        .agent("solo", "")
        .spawn()
        .await;
    app.provider.will("solo", [hangs()]);
    app.provider.always("solo", |seen| {
        says(format!("did {}", seen.user_messages()[0]))
    });
    let mut ids = Vec::new();
    for input in ["1", "2", "3", "4", "5"] {
        ids.push(app.start("solo", input).await.id().to_owned());
    }
    app.provider.wait_for_request("solo", 1).await;
    begun(&app, &ids[0], 1).await;

    app.crash_and_restart().await;

    for (at, id) in ids.iter().enumerate() {
        let run = app.find(id).await.wait_for_end().await;
        assert_eq!(run.output(), format!("did {}", at + 1));
        let events = run.events().await;
        assert_complete(&events);
        assert_eq!(count(&events, "run.queued"), 1);
        assert_eq!(count(&events, "run.started"), 1);
    }
    let order: Vec<_> = app
        .provider
        .requests()
        .iter()
        .map(|seen| seen.user_messages()[0].clone())
        .collect();
    assert_eq!(order, ["1", "1", "2", "3", "4", "5"]);
    assert_eq!(app.provider.max_concurrency("solo"), 1);
}

#[tokio::test]
async fn a_queued_run_keeps_its_request() {
    let mut app = TestApp::setup()
        .config("[runs]\nmax_running = 1")
        .agent("slow", "")
        .agent("solo", "system_prompt = \"Work.\"")
        .spawn()
        .await;
    app.provider.will("slow", [hangs(), says("done")]);
    app.provider.will("solo", [hangs(), says("done")]);
    let slow = started(&app, "slow", 1).await;
    app.provider.wait_for_request("slow", 1).await;
    let body = json!({"input": "go", "context": "by noon", "params": {"temperature": 0.25}});
    let id = app.start_with("solo", body).await.id().to_owned();

    app.crash_and_restart().await;
    assert_eq!(app.find(&slow).await.wait_for_end().await.output(), "done");
    let sent = app.provider.wait_for_request("solo", 1).await;
    assert_eq!(sent.user_messages(), ["go\n\nContext:\nby noon"]);
    assert_eq!(sent.system(), "Work.");
    assert_eq!(sent.body["temperature"], 0.25);
    begun(&app, &id, 1).await;
    // Its first life ends here.
    app.crash_and_restart().await;

    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "done");
    assert_eq!(
        app.provider.wait_for_request("solo", 2).await.body,
        sent.body
    );
    let events = run.events().await;
    assert_complete(&events);
    assert_eq!(count(&events, "run.started"), 1);
    let said = run.messages().await;
    assert_eq!(said["data"].as_array().map(Vec::len), Some(2), "{said}");
}

#[tokio::test]
async fn a_queued_run_that_was_killed_can_be_cancelled() {
    let mut app = TestApp::setup()
        .config("[runs]\nmax_running = 1")
        .agent("slow", "")
        .agent("late", "")
        .spawn()
        .await;
    app.provider.always("slow", |_| hangs());
    let slow = started(&app, "slow", 1).await;
    app.provider.wait_for_request("slow", 1).await;
    let late = app.start("late", "go").await.id().to_owned();

    app.crash_and_restart().await;

    let cancelled = app.find(&late).await.cancel("never mind").await;
    assert_eq!(cancelled.status(), "cancelled");
    assert!(app.provider.requests_for("late").is_empty());
    // The one before it, too, is like any other.
    app.provider.wait_for_request("slow", 2).await;
    let cancelled = app.find(&slow).await.cancel("nor this").await;
    assert_eq!(cancelled.status(), "cancelled");
    app.provider.wait_for_disconnects(2).await;
}
