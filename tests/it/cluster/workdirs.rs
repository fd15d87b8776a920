//! Files of runs that another daemon goes on with. The device of the directory's record is changed: each machine that mounts shared
//! storage numbers its device itself.

use std::fs;

use serde_json::json;

use crate::cluster::pair;
use crate::support::app::TestApp;
use crate::support::events::assert_complete;
use crate::support::gate::Gate;
use crate::support::provider::answer::{calls, says};

const DEVICES: &str = "UPDATE runs SET workdir_device = workdir_device + 1";

/// Two runs, of which one is queued, that the second daemon takes over. Then that one is the app's.
async fn taken_over(between: impl FnOnce(&TestApp)) -> Option<(TestApp, Vec<String>)> {
    let setup = TestApp::setup()
        .config("[runs]\nmax_running = 1")
        .agent("solo", "workdir = \"work\"\ntools = [\"read_file\"]")
        .file("work/a", "alpha");
    let (mut app, second, _) = pair(setup).await?;
    let reads = || calls([("read_file", json!({"path": "a"}))]);
    app.provider.will(
        "solo",
        [
            reads(),
            says("late").after_gate(&Gate::closed()),
            says("done"),
            reads(),
            says("done"),
        ],
    );
    let mut ids = Vec::new();
    for _ in 0..2 {
        ids.push(app.start("solo", "x").await.id().to_owned());
    }
    app.provider.wait_for_request("solo", 2).await;
    app.daemon.kill().await;
    app.database().execute(DEVICES);
    between(&app);
    app.daemon = second;
    Some((app, ids))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_keeps_its_directory_on_a_machine_with_other_device_numbers() {
    let Some((app, ids)) = taken_over(|_| {}).await else {
        return;
    };
    for id in &ids {
        let run = app.find(id).await.wait_for_end().await;
        assert_eq!(run.output(), "done");
        assert_complete(&run.events().await);
    }
    let seen = app.provider.wait_for_request("solo", 5).await;
    assert!(json!(seen.messages()).to_string().contains("alpha"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_that_was_taken_over_refuses_a_directory_that_was_replaced() {
    let replace = |app: &TestApp| {
        fs::rename(app.path("work"), app.path("moved")).expect("a move");
        fs::create_dir(app.path("work")).expect("another directory");
    };
    let Some((app, ids)) = taken_over(replace).await else {
        return;
    };
    for id in &ids {
        let run = app.find(id).await.wait_for_end().await;
        let (code, message) = run.failure();
        assert_eq!(code, "config");
        assert!(message.contains("is not the directory"), "{message}");
    }
}
