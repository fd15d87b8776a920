//! Agents that require labels of their node: only nodes with these labels drive their runs.

use serde_json::json;
use tokio::process::Command;

use crate::cluster::{other, spawn};
use crate::forks::fork;
use crate::support::app::{ApiResponse, TestApp};
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
            detail.contains("a node with label eu, label gpu"),
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_that_no_node_can_drive_waits_with_a_warning() {
    let setup = TestApp::setup().agent("trainer", "node = [\"gpu\"]");
    let Some((app, url)) = spawn(setup).await else {
        return;
    };
    app.provider.always("trainer", |_| says("done"));
    let waiting = app.start("trainer", "x").await.id().to_owned();
    let cancelled = app.start("trainer", "y").await.id().to_owned();
    for id in [&waiting, &cancelled] {
        let is_warned = |got: &ApiResponse| got.json()["warnings"][0]["code"] == "no_node";
        let got = app.get_until(&format!("/runs/{id}"), is_warned).await;
        assert_eq!(got.json()["status"], "queued");
    }
    let message = app
        .post(
            &format!("/runs/{waiting}/messages"),
            &json!({"content": "more"}),
        )
        .await;
    assert_eq!(message.status, 202, "{}", message.text);
    app.post(&format!("/runs/{cancelled}/cancel"), &json!({}))
        .await;
    let run = app.find(&cancelled).await.wait_for_end().await;
    assert_eq!(run.status(), "cancelled");
    assert_complete(&run.events().await);

    let _second = Daemon::start(labelled(&app, &url, "second")).await;
    let run = app.find(&waiting).await.wait_for_end().await;
    assert_eq!(run.output(), "done");
    assert_eq!(run["warnings"].as_array().map(Vec::len), Some(1));
    assert_complete(&run.events().await);
    assert_eq!(app.provider.requests_for("trainer").len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_that_no_node_can_drive_fails_in_the_end() {
    let setup = TestApp::setup()
        .config("[runs]\nunserved = 1")
        .agent("trainer", "node = [\"gpu\"]")
        .agent("planner", "sub_agents = [\"trainer\"]");
    let Some((app, url)) = spawn(setup).await else {
        return;
    };
    let mut second = Daemon::start(labelled(&app, &url, "second")).await;
    app.provider
        .will("planner", [delegates([("trainer", "x")])]);
    app.provider.always("trainer", |_| hangs());
    let started = app.start("planner", "x").await.id().to_owned();
    app.provider.wait_for_request("trainer", 1).await;
    second.kill().await;
    let queued = app.start("trainer", "y").await.id().to_owned();
    for id in [queued, started] {
        let run = app.find(&id).await.wait_for_end().await;
        assert_eq!(run["error"]["code"], "no_node", "{run:?}");
        assert_eq!(run["error"]["message"], "no node had label gpu in time");
        for child in run.children().await {
            assert_eq!(child["error"]["code"], "no_node", "{child:?}");
        }
        assert_complete(&run.events().await);
    }
}

/// A provider whose key only some nodes have, and a daemon without the key.
async fn without_key() -> Option<(TestApp, String)> {
    let provider = "[providers.rare]\nkind = \"anthropic\"\nbase_url = \"{provider}\"";
    let setup = TestApp::setup()
        .config(provider)
        .agent("solo", "model = \"rare/solo\"")
        .agent("planner", "sub_agents = [\"solo\"]");
    spawn(setup).await
}

async fn with_key(app: &TestApp, url: &str, node: &str) -> Daemon {
    let mut command = other(app, url, node);
    command.env("RARE_API_KEY", "key-of-rare");
    Daemon::start(command).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_goes_to_a_node_that_has_the_key_of_its_provider() {
    let Some((app, url)) = without_key().await else {
        return;
    };
    let refused = app.post("/agents/solo/runs", &json!({"input": "x"})).await;
    let detail = refused.problem(422);
    assert!(detail.contains("set RARE_API_KEY"), "{detail}");
    let second = with_key(&app, &url, "second").await;
    let differs = |got: &ApiResponse| got.json()["checks"]["catalog"]["differing_nodes"] == 1;
    app.get_until("/readyz", differs).await;
    let page = app.get("/ui/system").await;
    assert!(
        page.text.contains("second (with provider rare)"),
        "{}",
        page.text
    );
    let gate = Gate::closed();
    app.provider
        .will("planner", [delegates([("solo", "x")]), says("planned")]);
    let door = gate.clone();
    app.provider
        .always("solo", move |_| says("late").after_gate(&door));
    let ids = [
        app.start("solo", "x").await.id().to_owned(),
        app.start("planner", "x").await.id().to_owned(),
    ];
    app.provider.wait_for_request("solo", 2).await;
    for agent in ["solo", "planner"] {
        assert_eq!(driver(&app, agent), "second");
    }
    // The first node takes what it can serve, and leaves the rest to the third: runs keep their definitions.
    app.write(
        "agents/solo.toml",
        "name = \"solo\"\nmodel = \"anthropic/solo\"\n",
    );
    let is_changed = |got: &ApiResponse| got.json()["model"] == "anthropic/solo";
    app.get_until("/agents/solo", is_changed).await;
    drop(second);
    let _third = with_key(&app, &url, "third").await;
    app.provider.wait_for_request("solo", 4).await;
    for agent in ["solo", "planner"] {
        assert_eq!(driver(&app, agent), "third");
    }
    gate.open();
    for id in ids {
        let run = app.find(&id).await.wait_for_end().await;
        assert!(["late", "planned"].contains(&run.output()), "{run:?}");
        assert_complete(&run.events().await);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_waits_for_a_node_that_has_the_key_of_its_provider() {
    let Some((app, url)) = without_key().await else {
        return;
    };
    let second = with_key(&app, &url, "second").await;
    app.provider.will("solo", [hangs(), says("at last")]);
    let serves = |got: &ApiResponse| got.json()["checks"]["catalog"]["differing_nodes"] == 1;
    app.get_until("/readyz", serves).await;
    let id = app.start("solo", "x").await.id().to_owned();
    app.provider.wait_for_request("solo", 1).await;
    drop(second);
    let is_warned = |got: &ApiResponse| got.json()["warnings"][0]["code"] == "no_node";
    let got = app.get_until(&format!("/runs/{id}"), is_warned).await;
    assert!(got.text.contains("provider rare"), "{}", got.text);
    let _third = with_key(&app, &url, "third").await;
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "at last");
    assert_complete(&run.events().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_in_a_directory_of_a_root_goes_to_a_node_with_that_root() {
    let setup = TestApp::setup().agent("solo", "tools = [\"write_file\"]");
    let Some((mut app, url)) = spawn(setup.file("shared/notes/a.txt", "x")).await else {
        return;
    };
    let root = app.path("shared").to_string_lossy().into_owned();
    let with_root = async |node: &str| {
        let mut command = other(&app, &url, node);
        command.env("AXED_TOOLS__ROOTS", &root);
        Daemon::start(command).await
    };
    let second = with_root("second").await;
    let third = with_root("third").await;
    let first = std::mem::replace(&mut app.daemon, second);
    app.provider.will("solo", [hangs(), says("at last")]);
    let body = json!({"input": "x", "workdir": format!("{root}/notes")});
    let started = app.post("/agents/solo/runs", &body).await;
    assert_eq!(started.status, 202, "{}", started.text);
    app.provider.wait_for_request("solo", 1).await;
    app.daemon.kill().await;
    app.daemon = first;
    app.provider.wait_for_request("solo", 2).await;
    let id = started.json()["id"].as_str().unwrap_or_default().to_owned();
    assert_eq!(app.find(&id).await.wait_for_end().await.output(), "at last");
    drop(third);
}
