//! A daemon full of runs: none starves, none is lost, and refused clients get a `Retry-After`.

use serde_json::json;

use crate::support::app::TestApp;
use crate::support::provider::answer::{delegates, says};

#[tokio::test]
async fn a_thousand_parents_do_not_starve_their_children() {
    let app = TestApp::setup()
        .config(
            "[providers.small]\nkind = \"anthropic\"\nbase_url = \"{provider}\"\napi_key = \"k\"\n\
             max_concurrent = 8",
        )
        .agent(
            "parent",
            "model = \"small/model\"\nsub_agents = [\"child\"]",
        )
        .agent("child", "model = \"small/model\"")
        .spawn()
        .await;
    app.provider.always("model", |seen| {
        if seen.tools().is_empty() {
            says("read")
        } else if seen.tool_results().is_empty() {
            delegates([("child", "read")])
        } else {
            says("done")
        }
    });

    let mut runs = Vec::new();
    for _ in 0..1000 {
        runs.push(app.start("parent", "go").await);
    }

    for run in runs {
        let run = run.wait_for_end().await;
        assert_eq!(run.output(), "done");
        assert_eq!(run["tree"]["runs"], 2);
    }
    assert!(app.provider.max_concurrency("model") <= 8);
    assert_eq!(app.provider.ledger().replies, 3000);
}

#[tokio::test]
async fn children_need_no_permit() {
    let app = TestApp::setup()
        .config("[runs]\nmax_running = 1\nmax_queued = 1")
        .agent("parent", "sub_agents = [\"child\"]")
        .agent("child", "")
        .spawn()
        .await;
    let tasks = ["1", "2", "3", "4"].map(|task| ("child", task));
    app.provider
        .will("parent", [delegates(tasks), says("done")]);
    app.provider.always("child", |_| says("read"));

    assert_eq!(app.run("parent", "go").await.output(), "done");
}

#[tokio::test]
async fn a_full_queue_refuses_and_empties_in_order() {
    let app = TestApp::setup()
        .config("[runs]\nmax_running = 1\nmax_queued = 3")
        .agent("solo", "")
        .spawn()
        .await;
    let gate = app.provider.always_later("solo", "done");

    let mut runs = Vec::new();
    for input in ["1", "2", "3", "4"] {
        runs.push(app.start("solo", input).await);
    }
    app.provider.wait_for_concurrency("solo", 1).await;
    let refused = app.post("/agents/solo/runs", &json!({})).await;
    refused.problem(429);
    let wait = refused.header("retry-after").parse::<u64>();
    assert!(wait.is_ok_and(|wait| wait >= 1), "{:?}", refused.headers);
    assert_eq!(runs[3].reload().await.status(), "queued");
    gate.open();

    for run in &runs {
        assert_eq!(run.wait_for_end().await.output(), "done");
    }
    let order: Vec<_> = app
        .provider
        .requests()
        .iter()
        .map(|seen| seen.user_messages()[0].clone())
        .collect();
    assert_eq!(order, ["1", "2", "3", "4"]);
    assert_eq!(app.provider.max_concurrency("solo"), 1);
    app.run("solo", "5").await;
}
