//! What nodes know of rows that others may delete.

use crate::cluster::{other, spawn};
use crate::support::app::TestApp;
use crate::support::daemon::Daemon;
use crate::support::gate::Gate;
use crate::support::provider::answer::says;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_definition_that_another_daemon_knows_is_not_deleted() {
    let Some((mut app, url)) = spawn(TestApp::setup().agent("solo", "")).await else {
        return;
    };
    app.provider.will("solo", [says("1"), says("2")]);
    let mut ids = Vec::new();
    for _ in 0..2 {
        ids.push(app.run("solo", "x").await.id().to_owned());
    }
    let second = Daemon::start(other(&app, &url, "second")).await;
    let first = std::mem::replace(&mut app.daemon, second);
    for id in ids {
        let deleted = app.delete(&format!("/runs/{id}")).await;
        assert_eq!(deleted.status, 204, "{}", deleted.text);
    }
    app.daemon.signal("TERM");
    app.daemon.wait_for_exit().await;
    // It deletes what no run uses when it starts.
    let second = Daemon::start(other(&app, &url, "second")).await;
    app.daemon = first;
    let gate = Gate::closed();
    app.provider
        .will("solo", [says("late").after_gate(&gate), says("resumed")]);
    let id = app.start("solo", "x").await.id().to_owned();
    app.provider.wait_for_request("solo", 3).await;
    app.daemon.kill().await;
    app.daemon = second;
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "resumed");
}
