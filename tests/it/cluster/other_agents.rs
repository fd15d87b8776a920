//! Daemons whose agents differ say so.

use serde_json::Value;

use crate::cluster::{other, spawn};
use crate::support::app::{ApiResponse, TestApp};
use crate::support::daemon::Daemon;

/// Waits until this daemon counts so many others with other agents.
async fn differs_from(app: &TestApp, count: usize) {
    let counts = |got: &ApiResponse| {
        got.status == 200 && got.json()["checks"]["catalog"]["differing_nodes"] == count
    };
    app.get_until("/readyz", counts).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn daemons_count_those_with_other_agents() {
    let setup = TestApp::setup().agent("solo", "");
    let extra = "name = \"extra\"\nmodel = \"anthropic/extra\"\n";
    let Some((mut app, url)) = spawn(setup.file("more/extra.toml", extra)).await else {
        return;
    };
    differs_from(&app, 0).await;
    let mut command = other(&app, &url, "second");
    command.arg("--agents=more");
    let mut second = Daemon::start(command).await;
    differs_from(&app, 1).await;
    std::mem::swap(&mut app.daemon, &mut second);
    differs_from(&app, 1).await;
    // Its figures are those of one node.
    let page = app.get("/ui/system").await.text;
    assert!(page.contains("This node</dt><dd>second<"), "{page}");
    std::mem::swap(&mut app.daemon, &mut second);
    let page = app.get("/ui/system").await.text;
    assert!(page.contains("second (other agents)"), "{page}");
    app.write("agents/extra.toml", extra);
    for _ in 0..2 {
        differs_from(&app, 0).await;
        std::mem::swap(&mut app.daemon, &mut second);
    }
}

#[tokio::test]
async fn a_daemon_that_shares_no_database_counts_none() {
    let app = TestApp::setup().sqlite().spawn().await;
    let catalog = app.get("/readyz").await.json()["checks"]["catalog"].clone();
    assert_eq!(catalog["ok"], true, "{catalog}");
    assert_eq!(catalog["differing_nodes"], Value::Null, "{catalog}");
}
