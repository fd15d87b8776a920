//! A daemon that ends, and the one that comes after it. What it leaves unfinished is in `drain` and `after_kill`.

use serde_json::json;

use crate::recovery::drain::stops;
use crate::support::app::TestApp;
use crate::support::daemon::axed_command;
use crate::support::gate::Gate;
use crate::support::provider::answer::{delegates, says};
use crate::support::within_timeout;

#[tokio::test]
async fn a_finished_run_can_be_read_after_a_restart() {
    let mut app = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .spawn()
        .await;
    app.provider
        .will("planner", [delegates([("reader", "x")]), says("done")]);
    app.provider.will("reader", [says("read")]);
    let run = app.run("planner", "go").await;
    let id = run.id().to_owned();
    let before = (
        app.get(&format!("/runs/{id}")).await.text,
        run.events().await,
        run.messages().await,
        run.tree().await,
    );

    app.restart().await;

    let run = app.find(&id).await;
    let after = (
        app.get(&format!("/runs/{id}")).await.text,
        run.events().await,
        run.messages().await,
        run.tree().await,
    );
    assert_eq!(before, after);
    assert_eq!(run.children().await.len(), 1);
    assert_eq!(app.events(&run).await.rest().await, after.1);
}

#[tokio::test]
async fn shutdown_waits_for_running_runs() {
    let mut app = TestApp::setup().agent("solo", "").spawn().await;
    let gate = Gate::closed();
    app.provider.will("solo", [says("done").after_gate(&gate)]);
    let id = app.start("solo", "go").await.id().to_owned();
    app.provider.wait_for_concurrency("solo", 1).await;
    app.get_until("/readyz", |got| got.status == 200).await;

    app.daemon.signal("TERM");
    stops(&app).await;
    let refused = app.post("/agents/solo/runs", &json!({})).await;
    refused.problem(503);
    assert!(
        refused
            .header("retry-after")
            .parse::<u64>()
            .is_ok_and(|wait| wait >= 1)
    );
    assert_eq!(app.get("/livez").await.status, 200);
    gate.open();

    let status = app.daemon.wait_for_exit().await;
    assert_eq!(status.code(), Some(0), "{}", app.daemon.log());
    app.restart_after_end().await;
    assert_eq!(app.find(&id).await.output(), "done");
}

#[tokio::test]
async fn a_second_daemon_on_the_same_data_is_refused_and_names_the_first() {
    let app = TestApp::setup().sqlite().spawn().await;
    let home = app.path(".");

    let second = within_timeout(
        "the second daemon's end",
        axed_command(
            &home,
            &["serve", "--data", "data", "--listen", "127.0.0.1:0"],
        )
        .output(),
    )
    .await
    .expect("run axed");

    assert!(!second.status.success());
    let said = String::from_utf8_lossy(&second.stderr);
    assert!(said.contains(&app.daemon.pid().to_string()), "{said}");
    assert!(said.contains("data"), "{said}");
    assert_eq!(app.get("/livez").await.status, 200);
}
