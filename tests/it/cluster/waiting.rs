//! Many clients wait at a daemon for runs that another one drives.

use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::cluster::{other, spawn};
use crate::support::app::TestApp;
use crate::support::daemon::Daemon;
use crate::support::events::count;
use crate::support::gate::Gate;
use crate::support::postgres;
use crate::support::provider::answer::says;
use crate::support::{TEST_TIMEOUT, eventually};

const WAITERS: usize = 300;
const TRANSACTIONS: &str =
    "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()";
/// Of all nodes. It was one for each waiter.
const MAX_PER_SECOND: i64 = 150;

const DEAD: &str = "has shown no sign of life";

/// Waits until the nodes execute few transactions. The database counts them a few seconds late.
async fn wait_for_quiet(url: &str) {
    eventually("a database with little to do", async || {
        let used: i64 = postgres::with_client(url, async |client| {
            let before: i64 = client.query_one(TRANSACTIONS, &[]).await?.try_get(0)?;
            client.execute("SELECT pg_sleep(2)", &[]).await?;
            let after: i64 = client.query_one(TRANSACTIONS, &[]).await?.try_get(0)?;
            Ok(after - before)
        });
        (used < 2 * MAX_PER_SECOND).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_waiters_need_few_transactions_and_get_their_answers_when_the_runs_move() {
    let setup = TestApp::setup()
        .agent("solo", "node = [\"gpu\"]")
        .environment("AXED_CLUSTER__LABELS", "gpu");
    let Some((mut app, url)) = spawn(setup).await else {
        return;
    };
    let waiting = Daemon::start(other(&app, &url, "waiting")).await;
    let mut successor = other(&app, &url, "successor");
    successor.env("AXED_CLUSTER__LABELS", "gpu");
    let gate = Gate::closed();
    let door = gate.clone();
    app.provider
        .always("solo", move |_| says("done").after_gate(&door));
    let answers = (0..WAITERS).map(|_| {
        let url = format!("{}/agents/solo/runs?wait=300", waiting.url);
        let request = app.client.post(url).json(&json!({"input": "x"}));
        async {
            let response = request.send().await.expect("an answer");
            assert_eq!(response.status(), 200);
            let run: Value = response.json().await.expect("a run");
            run
        }
    });
    let story = async {
        app.provider.wait_for_requests(WAITERS).await;
        let successor = Daemon::start(successor).await;
        wait_for_quiet(&url).await;
        app.daemon.kill().await;
        tokio::select! {
            () = waiting.wait_for_log(DEAD) => {}
            () = successor.wait_for_log(DEAD) => {}
        }
        gate.open();
        successor
    };
    // Much follows on each other here.
    let story = async { tokio::join!(join_all(answers), story) };
    let all = tokio::time::timeout(3 * TEST_TIMEOUT, story).await;
    let (runs, successor) = all.expect("all answers");
    for run in &runs {
        assert_eq!(run["content"], "done", "{run}");
    }
    app.daemon = successor;
    let id = runs[0]["id"].as_str().expect("an id").to_owned();
    assert_eq!(
        count(&app.find(&id).await.events().await, "run.completed"),
        1
    );
}
