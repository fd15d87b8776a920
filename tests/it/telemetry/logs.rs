//! The log's lines: a daemon whose stderr nobody reads works on.

use futures_util::future::join_all;

use crate::support::app::TestApp;
use crate::support::provider::answer::says;

/// Runs until lines are dropped.
async fn run_until_lines_are_dropped(app: &TestApp) {
    let mut runs = 0;
    while app
        .get("/metrics")
        .await
        .text
        .contains("\naxed_log_lines_dropped_total 0\n")
    {
        assert!(runs < 50_000, "no line was dropped");
        let ended = join_all((0..100).map(|_| app.run("solo", "go"))).await;
        assert!(ended.iter().all(|run| run.output() == "done"));
        runs += ended.len();
    }
}

async fn chatty() -> TestApp {
    let setup = TestApp::setup().config("[telemetry]\nlog = \"axed=debug,info\"");
    let app = setup.agent("solo", "").spawn().await;
    app.provider.always("solo", |_| says("done"));
    app
}

#[tokio::test]
async fn a_log_that_nobody_reads_stops_nothing() {
    let mut app = chatty().await;
    app.daemon.leave_log_unread(true);
    run_until_lines_are_dropped(&app).await;
    assert_eq!(app.get("/livez").await.status, 200);
    assert_eq!(app.run("solo", "go").await.output(), "done");
    app.daemon.signal("TERM");
    assert!(app.daemon.wait_for_exit().await.success());
}

#[tokio::test]
async fn dropped_lines_are_counted_in_the_next_line() {
    let mut app = chatty().await;
    app.daemon.leave_log_unread(true);
    run_until_lines_are_dropped(&app).await;
    app.daemon.leave_log_unread(false);
    // There is space again once the first lines are read.
    while !app.daemon.log().contains("Log lines were dropped") {
        assert_eq!(app.run("solo", "go").await.output(), "done");
    }
    app.daemon.signal("TERM");
    assert!(app.daemon.wait_for_exit().await.success());
    app.daemon
        .wait_for_log("Stopping after every run has ended")
        .await;
}
