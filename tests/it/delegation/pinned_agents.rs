//! A tree calls agents in the definitions that were current when its root was accepted.

use std::fs;

use serde_json::json;

use crate::support::app::TestApp;
use crate::support::events::assert_complete;
use crate::support::gate::Gate;
use crate::support::provider::answer::{delegates, says};

const PLANNER: &str = "sub_agents = [\"reader\", \"late\"]";
const OLD_READER: &str =
    "system_prompt = \"Old.\"\ndescription = \"Old words.\"\nsub_agents = [\"writer\"]";
const NEW_READER: &str =
    "system_prompt = \"New.\"\ndescription = \"New words.\"\nsub_agents = [\"writer\"]";

/// Of shared texts that are no definition of a run.
const NAMED_BY_NO_RUN: &str =
    "hash NOT IN (SELECT definition FROM runs WHERE definition IS NOT NULL)";

/// A planner that calls a reader, which calls a writer; the planner's agent `late` has no file.
async fn spawn() -> TestApp {
    TestApp::setup()
        .agent("planner", PLANNER)
        .agent("reader", OLD_READER)
        .agent("writer", "system_prompt = \"Old.\"")
        .spawn()
        .await
}

/// The replies of one run of the tree; the planner's first one waits for the gate.
fn script(app: &TestApp, gate: &Gate) {
    app.provider.will(
        "planner",
        [
            delegates([("reader", "x")]).after_gate(gate),
            says("planned"),
        ],
    );
    app.provider
        .will("reader", [delegates([("writer", "x")]), says("read")]);
    app.provider.will("writer", [says("written")]);
}

/// Changes the reader, and removes the writer.
async fn change_files(app: &TestApp) {
    app.write_agent("reader", NEW_READER);
    fs::remove_file(app.path("agents/writer.toml")).expect("removed");
    app.get_until("/agents/reader", |got| got.text.contains("New words."))
        .await;
    app.get_until("/agents/writer", |got| got.status == 404)
        .await;
}

fn last_system(app: &TestApp, model: &str) -> String {
    let requests = app.provider.requests_for(model);
    requests.last().expect("a request").system()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tree_keeps_the_agents_that_it_was_accepted_with() {
    let app = spawn().await;
    let gate = Gate::closed();
    script(&app, &gate);
    let run = app.start("planner", "go").await;
    app.provider.wait_for_request("planner", 1).await;
    let old_version = app.get("/agents/reader").await.json()["version"].clone();
    change_files(&app).await;
    gate.open();

    let run = run.wait_for_end().await;
    assert_eq!(run.output(), "planned");
    assert_eq!(last_system(&app, "reader"), "Old.");
    assert_eq!(last_system(&app, "writer"), "Old.");
    let children = run.children().await;
    assert_eq!(children[0]["agent_version"], old_version);

    // A new root has those of today.
    app.provider.will(
        "planner",
        [delegates([("reader", "x")]), says("planned again")],
    );
    app.provider
        .will("reader", [delegates([("writer", "x")]), says("read again")]);
    let run = app.run("planner", "go").await;
    assert_eq!(run.output(), "planned again");
    let reader = app.provider.requests_for("reader");
    assert_eq!(reader[2].system(), "New.");
    let results = reader[3].tool_results();
    assert!(
        results[0].contains("agent config not found: writer"),
        "{results:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tree_keeps_its_agents_after_a_crash() {
    let mut app = spawn().await;
    let gate = Gate::closed();
    app.provider
        .will("planner", [says("lost").after_gate(&gate)]);
    let id = app.start("planner", "go").await.id().to_owned();
    let first = app.provider.wait_for_request("planner", 1).await;
    app.daemon.kill().await;
    app.write_agent("reader", NEW_READER);
    fs::remove_file(app.path("agents/writer.toml")).expect("removed");
    let open = Gate::closed();
    open.open();
    script(&app, &open);
    app.restart_after_end().await;

    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "planned");
    assert_eq!(last_system(&app, "reader"), "Old.");
    assert_eq!(last_system(&app, "writer"), "Old.");
    let again = &app.provider.requests_for("planner")[1];
    assert_eq!(again.tools(), first.tools(), "the same descriptions");
    assert_complete(&run.events().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_without_a_definition_at_acceptance_has_the_current_one() {
    let app = spawn().await;
    let gate = Gate::closed();
    app.provider.will(
        "planner",
        [
            delegates([("late", "x")]).after_gate(&gate),
            says("planned"),
        ],
    );
    app.provider.will("late", [says("at last")]);
    let run = app.start("planner", "go").await;
    app.provider.wait_for_request("planner", 1).await;
    app.write_agent("late", "");
    app.get_until("/agents/late", |got| got.status == 200).await;
    gate.open();
    let run = run.wait_for_end().await;
    assert_eq!(run.children().await[0].output(), "at last");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn definitions_that_are_lost_are_replaced_by_the_current_ones() {
    let mut app = spawn().await;
    let gate = Gate::closed();
    app.provider
        .will("planner", [says("lost").after_gate(&gate)]);
    let id = app.start("planner", "go").await.id().to_owned();
    app.provider.wait_for_request("planner", 1).await;
    app.daemon.kill().await;
    app.write_agent("reader", NEW_READER);
    app.database()
        .execute(&format!("DELETE FROM definitions WHERE {NAMED_BY_NO_RUN}"));
    let open = Gate::closed();
    open.open();
    script(&app, &open);
    app.restart_after_end().await;
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "planned");
    assert_eq!(last_system(&app, "reader"), "New.");
    app.daemon
        .wait_for_log("calls other agents in cannot be read")
        .await;
}

/// What runs of the same agents are pinned to is stored once, and runs that can call no agent store nothing of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pinned_definitions_are_stored_once_and_deleted_with_their_tree() {
    let app = spawn().await;
    app.provider.always("writer", |_| says("written"));
    app.provider.always("planner", |_| says("planned"));
    let count = || {
        let sql = format!("SELECT count(*) FROM definitions WHERE {NAMED_BY_NO_RUN}");
        app.database().number(&sql)
    };
    app.run("writer", "x").await;
    assert_eq!(count(), Some(0));
    let run = app.run("planner", "x").await;
    // Those of the tree, and the tools in the planner's requests.
    assert_eq!(count(), Some(2));
    let deleted = app.delete(&format!("/runs/{}", run.id())).await;
    assert_eq!(deleted.status, 204, "{}", deleted.text);
    assert_eq!(count(), Some(0));
    for max_tokens in [300, 400, 500] {
        let body = json!({"input": "x", "params": {"max_tokens": max_tokens}});
        app.run_with("planner", body).await;
    }
    assert_eq!(count(), Some(2));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fork_calls_the_agents_of_its_source_or_current_ones() {
    let app = spawn().await;
    let open = Gate::closed();
    open.open();
    script(&app, &open);
    let source = app.run("planner", "go").await.id().to_owned();
    app.write_agent("reader", NEW_READER);
    app.get_until("/agents/reader", |got| got.text.contains("New words."))
        .await;
    for (choice, system) in [("recorded", "Old."), ("current", "New.")] {
        script(&app, &open);
        let body = json!({"at": {"turn": 0}, "definition": choice});
        let forked = app.post(&format!("/runs/{source}/fork"), &body).await;
        assert_eq!(forked.status, 202, "{}", forked.text);
        let id = forked.json()["id"].as_str().expect("an id").to_owned();
        let forked = app.find(&id).await.wait_for_end().await;
        assert_eq!(forked.output(), "planned");
        assert_eq!(last_system(&app, "reader"), system, "{choice}");
    }
    // What a fork calls outlives its source.
    let gate = Gate::closed();
    app.provider
        .will("planner", [says("lost").after_gate(&gate)]);
    let body = json!({"at": {"turn": 0}});
    let forked = app.post(&format!("/runs/{source}/fork"), &body).await;
    let id = forked.json()["id"].as_str().expect("an id").to_owned();
    app.provider.wait_for_request("planner", 7).await;
    assert_eq!(app.delete(&format!("/runs/{source}")).await.status, 204);
    let mut app = app;
    app.daemon.kill().await;
    script(&app, &open);
    app.restart_after_end().await;
    let forked = app.find(&id).await.wait_for_end().await;
    assert_eq!(forked.output(), "planned");
    assert_eq!(last_system(&app, "reader"), "Old.");
}
