//! Agents that require labels of their node: only nodes with these labels drive their runs.

use serde_json::json;
use tokio::process::Command;

use crate::cluster::{other, spawn};
use crate::forks::fork;
use crate::support::app::TestApp;
use crate::support::daemon::Daemon;
use crate::support::events::assert_complete;
use crate::support::gate::Gate;
use crate::support::provider::answer::{delegates, hangs, says};

/// As [`other`], with the label gpu.
fn labelled(app: &TestApp, url: &str, node: &str) -> Command {
    let mut command = other(app, url, node);
    command.env("AXED_CLUSTER__LABELS", "eu,gpu");
    command
}

/// The name of the node that drives the only tree of this agent.
fn driver(app: &TestApp, agent: &str) -> String {
    app.database().text(&format!(
        "SELECT n.id FROM trees t JOIN nodes n ON n.incarnation = t.node WHERE t.agent = '{agent}'"
    ))
}

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
        assert!(
            detail.contains("a node with the labels eu, gpu"),
            "{detail}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_goes_to_a_node_with_its_labels() {
    let setup = TestApp::setup()
        .agent("trainer", "node = [\"gpu\"]")
        .agent("planner", "sub_agents = [\"trainer\"]");
    let Some((app, url)) = spawn(setup).await else {
        return;
    };
    let _second = Daemon::start(labelled(&app, &url, "second")).await;
    let gate = Gate::closed();
    app.provider
        .will("planner", [delegates([("trainer", "x")]), says("planned")]);
    app.provider
        .will("trainer", [says("trained").after_gate(&gate)]);
    let run = app.start("planner", "x").await;
    app.provider.wait_for_request("trainer", 1).await;
    assert_eq!(driver(&app, "planner"), "second");
    gate.open();
    let run = app.find(run.id()).await.wait_for_end().await;
    assert_eq!(run.output(), "planned");
    assert_eq!(run["attempt"], 1);
    assert_complete(&run.events().await);

    app.provider
        .will("trainer", [says("followed"), says("anew"), hangs()]);
    let source = app.run("trainer", "y").await;
    assert_eq!(source.output(), "followed");
    let forked = fork(&app, source.id(), &json!({"at": {"turn": 1}})).await;
    assert_eq!(forked.output(), "anew");
    let id = app.start("trainer", "z").await.id().to_owned();
    app.provider.wait_for_request("trainer", 4).await;
    let cancelled = app.post(&format!("/runs/{id}/cancel"), &json!({})).await;
    assert!(matches!(cancelled.status, 200 | 202), "{}", cancelled.text);
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.status(), "cancelled");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_runs_of_a_dead_node_go_to_a_node_with_their_labels() {
    let setup = TestApp::setup()
        .agent("trainer", "node = [\"gpu\"]")
        .agent("solo", "");
    let Some((mut app, url)) = spawn(setup).await else {
        return;
    };
    let gate = Gate::closed();
    for agent in ["trainer", "solo"] {
        let door = gate.clone();
        app.provider
            .always(agent, move |_| says("late").after_gate(&door));
    }
    let second = Daemon::start(labelled(&app, &url, "second")).await;
    let first = std::mem::replace(&mut app.daemon, second);
    let labelled_run = app.start("trainer", "x").await.id().to_owned();
    let other_run = app.start("solo", "x").await.id().to_owned();
    app.provider.wait_for_requests(2).await;
    app.daemon.kill().await;
    app.daemon = first;
    // The first node takes the one, and leaves the other.
    app.provider.wait_for_request("solo", 2).await;
    assert_eq!(driver(&app, "solo"), "story");
    let _third = Daemon::start(labelled(&app, &url, "third")).await;
    app.provider.wait_for_request("trainer", 2).await;
    gate.open();
    for id in [labelled_run, other_run] {
        let run = app.find(&id).await.wait_for_end().await;
        assert_eq!(run.output(), "late");
        assert_complete(&run.events().await);
    }
}
