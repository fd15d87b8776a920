//! Agents that require labels of their node: only nodes with these labels drive their runs.

use serde_json::json;

use crate::support::app::TestApp;
use crate::support::provider::answer::says;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_that_shares_no_database_refuses_runs_for_other_nodes() {
    let app = TestApp::setup()
        .sqlite()
        .config("[cluster]\nlabels = [\"eu\"]")
        .agent("solo", "node = [\"eu\"]")
        .agent("trainer", "node = [\"gpu\", \"eu\"]")
        .agent("planner", "sub_agents = [\"trainer\"]")
        .spawn()
        .await;
    app.provider.always("solo", |_| says("done"));
    assert_eq!(app.run("solo", "x").await.output(), "done");
    for agent in ["trainer", "planner"] {
        let path = format!("/agents/{agent}/runs");
        let refused = app.post(&path, &json!({"input": "x"})).await;
        assert_eq!(refused.json()["code"], "no_node");
        let detail = refused.problem(422);
        assert!(detail.contains("a node with the labels eu, gpu"), "{detail}");
    }
}
