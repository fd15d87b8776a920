//! Definitions of agents: what nodes know of rows that others may delete, and which ones trees have that move.

use crate::cluster::{other, other_with_agents, spawn};
use crate::support::app::TestApp;
use crate::support::daemon::Daemon;
use crate::support::gate::Gate;
use crate::support::provider::answer::{delegates, says};

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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tree_that_moves_calls_the_agents_that_it_was_accepted_with() {
    let agent = |name: &str, toml: &str| {
        format!("name = \"{name}\"\nmodel = \"anthropic/{name}\"\n{toml}\n")
    };
    let setup = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\", \"writer\"]")
        .agent("reader", "system_prompt = \"Old.\"")
        .agent("writer", "system_prompt = \"Old.\"")
        .file(
            "others/planner.toml",
            &agent("planner", "sub_agents = [\"reader\"]"),
        )
        .file(
            "others/reader.toml",
            &agent("reader", "system_prompt = \"New.\""),
        );
    let Some((mut app, url)) = spawn(setup).await else {
        return;
    };
    let second = Daemon::start(other_with_agents(&app, &url, "second", "others")).await;
    let gate = Gate::closed();
    let both = || delegates([("reader", "x"), ("writer", "x")]);
    app.provider.will(
        "planner",
        [
            both().after_gate(&gate),
            both(),
            says("planned"),
            delegates([("reader", "x")]),
            says("planned anew"),
        ],
    );
    for name in ["reader", "writer"] {
        app.provider.always(name, |_| says("done"));
    }
    let id = app.start("planner", "x").await.id().to_owned();
    app.provider.wait_for_request("planner", 1).await;
    app.daemon.kill().await;
    app.daemon = second;
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "planned");
    for name in ["reader", "writer"] {
        assert_eq!(
            app.provider.requests_for(name)[0].system(),
            "Old.",
            "{name}"
        );
    }
    assert_eq!(app.run("planner", "x").await.output(), "planned anew");
    assert_eq!(app.provider.requests_for("reader")[1].system(), "New.");
}
