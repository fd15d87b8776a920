//! Stopping a run stops everything below it, hangs up on its providers, and settles only then.

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::app::{TestApp, send};
use crate::support::events::kinds;
use crate::support::provider::answer::{delegates, fails, hangs, says};

#[tokio::test]
async fn a_cancel_reaches_every_descendant_and_closes_the_providers_connections() {
    let app = TestApp::setup()
        .agent("root", "sub_agents = [\"middle\", \"leaf\"]")
        .agent("middle", "sub_agents = [\"leaf\"]")
        .agent("leaf", "stream = true")
        .spawn()
        .await;
    app.provider.will(
        "root",
        [delegates([("middle", "a"), ("leaf", "b")]).with_text("working")],
    );
    app.provider
        .will("middle", [delegates([("leaf", "c"), ("leaf", "d")])]);
    app.provider.always("leaf", |_| hangs());

    let run = app.start("root", "go").await;
    let events = app.events(&run).await;
    app.provider.wait_for_concurrency("leaf", 3).await;
    let cancelled = run.cancel("changed my mind").await;

    assert_eq!(cancelled.status(), "cancelled");
    assert_eq!(cancelled["cancel_reason"], "changed my mind");
    assert_eq!(cancelled["partial_content"], "working");
    assert_eq!(cancelled["content"], json!(null));
    assert_eq!(cancelled["error"], json!(null));
    app.provider.wait_for_disconnects(3).await;
    let mut leaves = 0;
    for child in run.children().await {
        assert_eq!(child.status(), "cancelled", "{child:?}");
        leaves += child.children().await.len();
    }
    assert_eq!(leaves, 2);
    let events = events.rest().await;
    let types = kinds(&events);
    assert!(types.contains(&"run.cancelling"), "{types:?}");
    assert_eq!(types.last(), Some(&"run.cancelled"));
    assert_eq!(
        events.last().map(|event| event["run_id"].clone()),
        Some(run["id"].clone())
    );
    let ended = types
        .iter()
        .filter(|kind| **kind == "run.cancelled")
        .count();
    assert_eq!(ended, 5, "{types:?}");
}

#[tokio::test]
async fn the_status_shows_whether_the_cancel_is_complete() {
    let app = TestApp::setup().agent("slow", "").spawn().await;
    app.provider.will("slow", [hangs()]);
    let run = app.start("slow", "go").await;
    app.provider.wait_for_concurrency("slow", 1).await;

    let got = app
        .post(&format!("/runs/{}/cancel", run.id()), &json!({}))
        .await;

    match got.json()["status"].as_str() {
        Some("cancelling") => assert_eq!(got.status, 202),
        Some("cancelled") => assert_eq!(got.status, 200),
        other => panic!("{other:?}: {}", got.text),
    }
    assert_eq!(run.wait_for_end().await.status(), "cancelled");
}

#[tokio::test]
async fn a_cancel_needs_no_body() {
    let app = TestApp::setup().agent("slow", "").spawn().await;
    app.provider.will("slow", [hangs()]);
    let run = app.start("slow", "go").await;
    app.provider.wait_for_concurrency("slow", 1).await;

    let path = format!("/runs/{}/cancel?wait=180", run.id());
    let got = send(app.request(Method::POST, &path)).await;

    assert_eq!(got.status, 200, "{}", got.text);
    assert_eq!(got.json()["status"], "cancelled");
}

#[tokio::test]
async fn cancelling_an_ended_run_changes_nothing() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.will("solo", [says("done")]);
    let run = app.run("solo", "go").await;

    let again = run.cancel("too late").await;

    assert_eq!(again.output(), "done");
    assert_eq!(again["cancel_reason"], json!(null));
    assert_eq!(again["last_event"], run["last_event"]);
    assert_eq!(again["finished_at"], run["finished_at"]);
}

#[tokio::test]
async fn a_queued_run_is_cancelled_without_a_provider_request() {
    let app = TestApp::setup()
        .config("[runs]\nmax_running = 1")
        .agent("first", "")
        .agent("second", "")
        .spawn()
        .await;
    app.provider.will("first", [hangs()]);
    app.start("first", "go").await;
    app.provider.wait_for_concurrency("first", 1).await;
    let waiting = app.start("second", "go").await;
    assert_eq!(waiting.status(), "queued");

    let cancelled = waiting.cancel("never mind").await;

    assert_eq!(cancelled.status(), "cancelled");
    assert_eq!(cancelled["started_at"], Value::Null);
    assert!(app.provider.requests_for("second").is_empty());
}

#[tokio::test]
async fn queued_children_of_a_cancelled_run_send_no_request() {
    let app = TestApp::setup()
        .agent(
            "planner",
            "sub_agents = [\"slow\"]\n[sub_agents_config]\nmax_concurrent = 1",
        )
        .agent("slow", "")
        .spawn()
        .await;
    app.provider.will(
        "planner",
        [delegates([("slow", "1"), ("slow", "2"), ("slow", "3")])],
    );
    app.provider.always("slow", |_| hangs());

    let run = app.start("planner", "go").await;
    app.provider.wait_for_concurrency("slow", 1).await;
    let cancelled = run.cancel("enough").await;

    assert_eq!(cancelled.status(), "cancelled");
    app.provider.wait_for_disconnects(1).await;
    assert_eq!(app.provider.requests_for("slow").len(), 1);
}

#[tokio::test]
async fn cancelling_an_unknown_run_is_404() {
    let app = TestApp::spawn().await;
    for id in ["run_00000000-0000-7000-8000-000000000000", "nonsense"] {
        app.post(&format!("/runs/{id}/cancel"), &json!({}))
            .await
            .problem(404);
    }
}

#[tokio::test]
async fn a_run_that_waits_for_a_retry_can_be_cancelled() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.will(
        "solo",
        [fails(429, "slow down").header("retry-after", "60")],
    );
    let run = app.start("solo", "go").await;
    app.events(&run).await.until("retry.scheduled").await;

    assert_eq!(run.cancel("no time").await.status(), "cancelled");
    assert_eq!(app.provider.requests().len(), 1);
}

#[tokio::test]
async fn a_cancel_that_races_with_the_end_leaves_one_terminal_event() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .spawn()
        .await;
    app.provider
        .always("planner", |seen| match seen.tool_results().len() {
            0 => delegates([("reader", "x")]),
            _ => says("done"),
        });
    app.provider.always("reader", |_| says("read"));

    for asked_first in 0..40 {
        let run = app.start("planner", "go").await;
        // Each time the cancel comes a little later in the run's life.
        app.provider
            .wait_for_request("planner", asked_first * 2 / 3 + 1)
            .await;
        let ended = run.cancel("race").await;
        assert!(
            ["completed", "cancelled"].contains(&ended.status()),
            "{ended:?}"
        );
        assert_eq!(ended.reload().await.status(), ended.status());
        let events = run.events().await;
        let own = events.iter().filter(|event| event["run_id"] == run["id"]);
        let endings: Vec<_> = own
            .map(|event| event.kind())
            .filter(|kind| ["run.completed", "run.failed", "run.cancelled"].contains(kind))
            .collect();
        assert_eq!(endings, [format!("run.{}", ended.status())]);
        assert_eq!(
            kinds(&events).last(),
            endings.last(),
            "nothing happens after the end"
        );
        for child in run.children().await {
            assert!(
                ["completed", "cancelled"].contains(&child.status()),
                "{child:?}"
            );
        }
    }
}
