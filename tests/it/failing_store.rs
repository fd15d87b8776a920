//! A store that fails in the middle of a run: nobody waits in vain, and nothing goes on without its record.

use std::time::Duration;

use rusqlite::Connection;
use serde_json::json;

use crate::support::app::TestApp;
use crate::support::gate::Gate;
use crate::support::provider::answer::{asks, hangs, says};

/// From now on no tool's result can be written.
fn refuse_results(app: &TestApp) {
    let db = Connection::open(app.path("data/axed.db")).expect("the store");
    db.busy_timeout(Duration::from_secs(10)).expect("a timeout");
    db.execute_batch(
        "CREATE TRIGGER full BEFORE INSERT ON entries WHEN new.steps LIKE '[{\"result\"%' \
         BEGIN SELECT RAISE(ABORT, 'the disk is full'); END",
    )
    .expect("a trigger");
}

#[tokio::test]
async fn a_run_that_cannot_be_recorded_stops_its_children_and_answers_who_waits() {
    let app = TestApp::with()
        .agent("planner", "sub_agents = [\"fast\", \"slow\"]")
        .agent("fast", "")
        .agent("slow", "")
        .spawn()
        .await;
    let gate = Gate::shut();
    app.provider
        .will("planner", [asks([("fast", "a"), ("slow", "b")])]);
    app.provider.will("fast", [says("done").after(&gate)]);
    app.provider.will("slow", [hangs()]);

    let go = json!({"input": "go"});
    let (got, ()) = tokio::join!(app.post("/agents/planner/runs?wait=60", &go), async {
        app.provider.busy("fast", 1).await;
        app.provider.busy("slow", 1).await;
        refuse_results(&app);
        gate.open();
    });

    // Its record cannot tell how it ended, but the answer comes long before the minute is over.
    assert_eq!(got.status, 202, "{}", got.text);
    app.provider.hung_up(1).await;
    let run = app.find(got.json()["id"].as_str().expect("an id")).await;
    let children = run.children().await;
    assert_eq!(children[0].status(), "completed");
    assert_eq!(children[1].status(), "cancelled", "{:?}", children[1]);
}
