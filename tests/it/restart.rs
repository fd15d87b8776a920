//! A daemon that ends, well or badly, and the one that comes after it.

use serde_json::json;

use crate::support::app::TestApp;
use crate::support::daemon::axed;
use crate::support::events::kinds;
use crate::support::gate::Gate;
use crate::support::provider::answer::{asks, hangs, says};
use crate::support::soon;

#[tokio::test]
async fn a_finished_run_is_there_after_a_restart() {
    let mut app = TestApp::with()
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .spawn()
        .await;
    app.provider
        .will("planner", [asks([("reader", "x")]), says("done")]);
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
async fn a_crash_leaves_no_run_unfinished() {
    let mut app = TestApp::with()
        .config("[runs]\nmax_running = 2")
        .agent("planner", "sub_agents = [\"slow\"]")
        .agent("slow", "")
        .agent("solo", "")
        .agent("late", "")
        .spawn()
        .await;
    app.provider.will("solo", [says("done")]);
    let finished = app.run("solo", "go").await.id().to_owned();
    app.provider.will(
        "planner",
        [asks([("slow", "x")]).saying("so far").using(30, 3)],
    );
    app.provider.always("slow", |_| hangs());
    let planner = app.start("planner", "go").await.id().to_owned();
    let slow = app.start("slow", "go").await.id().to_owned();
    let queued = app.start("late", "go").await.id().to_owned();
    app.provider.busy("slow", 2).await;
    let child = app.find(&planner).await.children().await[0].id().to_owned();
    let told = app.find(&planner).await.events().await.len();

    app.crash_and_restart().await;

    for id in [&planner, &slow, &queued, &child] {
        let run = app.find(id).await;
        assert_eq!(run.failure().0, "interrupted", "{run:?}");
        assert!(run["finished_at"].is_string(), "{run:?}");
    }
    assert_eq!(app.find(&finished).await.output(), "done");
    let run = app.find(&planner).await;
    assert_eq!(run.tree_usage().0, 30);
    let events = run.events().await;
    assert!(events.len() > told);
    let numbers: Vec<_> = events.iter().map(|event| event.seq()).collect();
    assert_eq!(numbers, (1..=events.len() as u64).collect::<Vec<_>>());
    assert_eq!(kinds(&events).last(), Some(&"run.failed"));
    for status in ["queued", "running", "cancelling"] {
        let page = app.get(&format!("/runs?all=true&status={status}")).await;
        assert_eq!(page.json()["data"], json!([]), "{status}");
    }
    // The daemon is as good as new.
    app.provider.will("solo", [says("again")]);
    assert_eq!(app.run("solo", "go").await.output(), "again");
}

#[tokio::test]
async fn a_stop_lets_running_runs_end() {
    let mut app = TestApp::with().agent("solo", "").spawn().await;
    let gate = Gate::shut();
    app.provider.will("solo", [says("done").after(&gate)]);
    let id = app.start("solo", "go").await.id().to_owned();
    app.provider.busy("solo", 1).await;
    assert_eq!(app.get("/readyz").await.status, 200);

    app.daemon.signal("TERM");
    app.get_until("/readyz", |got| got.status == 503).await;
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

    let status = app.daemon.ended().await;
    assert_eq!(status.code(), Some(0), "{}", app.daemon.log());
    app.restart_after_end().await;
    assert_eq!(app.find(&id).await.output(), "done");
}

#[tokio::test]
async fn a_stop_does_not_wait_for_ever() {
    let mut app = TestApp::with()
        .server("drain_timeout = 1")
        .agent("slow", "")
        .spawn()
        .await;
    app.provider.always("slow", |_| hangs());
    let run = app.start("slow", "go").await;
    let id = run.id().to_owned();
    let mut stream = app.events(&run).await;
    app.provider.busy("slow", 1).await;
    stream.until("run.queued").await;

    app.restart().await;

    assert_eq!(app.find(&id).await.failure().0, "interrupted");
}

#[tokio::test]
async fn a_second_signal_stops_at_once() {
    let mut app = TestApp::with().agent("slow", "").spawn().await;
    app.provider.always("slow", |_| hangs());
    app.start("slow", "go").await;
    app.provider.busy("slow", 1).await;

    app.daemon.signal("INT");
    app.get_until("/readyz", |got| got.status == 503).await;
    app.daemon.signal("INT");

    app.daemon.ended().await;
}

#[tokio::test]
async fn a_second_daemon_on_the_same_data_is_refused_by_name_of_the_first() {
    let app = TestApp::spawn().await;
    let home = app.path(".");

    let second = soon(
        "the second daemon's end",
        axed(
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
