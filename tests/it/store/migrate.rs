//! `axed data migrate`: a store is copied from SQLite to PostgreSQL and back, and nothing is missing.

use std::fs;
use std::process::Output;

use serde_json::{Value, json};

use crate::cluster::{other, spawn};
use crate::support::app::{ApiResponse, TestApp};
use crate::support::attachments::{PNG, picture_part};
use crate::support::daemon::{Daemon, axed_command};
use crate::support::events::assert_complete;
use crate::support::gate::Gate;
use crate::support::postgres::{DATABASE_URL, Postgres};
use crate::support::provider::answer::{delegates, fails, says};
use crate::support::webhook_receiver::WebhookReceiver;
use crate::tools::approvals::{approve, careful, requests, writes};
use crate::webhooks::messages::SECRET;

/// Copies the store of the app's directory to the database, or back.
async fn migrate(app: &TestApp, url: &str, to: &str) -> Output {
    let arguments = [
        "data",
        "migrate",
        "--to",
        to,
        "--config",
        "config/axed.toml",
    ];
    let mut command = axed_command(&app.path("."), &arguments);
    command.args(["--data", "data"]).env(DATABASE_URL, url);
    command.output().await.expect("a command")
}

fn stdout(output: &Output) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn refusal(output: &Output) -> String {
    assert!(!output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

const MEMORY: &str = "## 2026-01-01T00:00:00Z\n**Task:** old\n**Result:** ok\n\n\
    ## 2026-01-02T00:00:00Z\n**Task:** new\n**Result:** ok\nand well\n\n";

/// Everything that the API shows of these runs.
async fn shown(app: &TestApp, runs: &[String]) -> Vec<(String, Value)> {
    let mut shown = Vec::new();
    for path in [
        "/sessions",
        "/usage?by=agent,model,label.team",
        "/runs?all=true&label.team=x",
        "/agents/noter/memory",
    ] {
        let got = app.get(path).await;
        assert_eq!(got.status, 200, "{path}: {}", got.text);
        shown.push((path.to_owned(), got.json()));
    }
    for run in runs {
        for path in [
            "",
            "/events?after=0",
            "/turns",
            "/turns/1",
            "/tree",
            "/messages",
            "/deliveries",
        ] {
            let path = format!("/runs/{run}{path}");
            let got = app.get(&path).await;
            shown.push((
                path,
                serde_json::from_str(&got.text).unwrap_or(json!(got.text)),
            ));
        }
    }
    shown
}

/// Ended runs with all that a run can have; returns their ids.
async fn end_some_runs(app: &TestApp, receiver: &WebhookReceiver) -> Vec<String> {
    app.provider
        .will("planner", [delegates([("solo", "read")]), says("planned")]);
    app.provider
        .will("solo", [says("read"), says("looked"), fails(400, "no")]);
    let long = "a long input with a \u{0} ".repeat(200);
    let hook = json!({"url": receiver.url("/hook"), "events": ["run.completed"]});
    let bodies = [
        (
            "planner",
            json!({"input": long, "labels": {"team": "x"}, "session": "talk", "webhook": hook}),
        ),
        (
            "solo",
            json!({"input": [{"type": "text", "text": "what?"}, picture_part(PNG)]}),
        ),
        ("solo", json!({"input": "fails"})),
    ];
    let mut ended = Vec::new();
    for (agent, body) in bodies {
        ended.push(app.run_with(agent, body).await.id().to_owned());
    }
    let deliveries = format!("/runs/{}/deliveries", ended[0]);
    let is_delivered = |got: &ApiResponse| got.json()["data"][0]["status"] == "delivered";
    app.get_until(&deliveries, is_delivered).await;
    ended
}

#[tokio::test]
async fn a_store_is_copied_to_postgres_and_back() {
    let Some(postgres) = Postgres::create() else {
        return;
    };
    let url = postgres.url.clone();
    let receiver = WebhookReceiver::start().await;
    let mut app = careful("approve_timeout = 600")
        .config("[webhooks]\nallow_hosts = [\"127.0.0.1\"]\nsecret_env = \"HOOK_SECRET\"")
        .environment("HOOK_SECRET", SECRET)
        .agent("noter", "[memory]\nenabled = true")
        .file("data/memory/noter.md", MEMORY)
        .sqlite()
        .spawn()
        .await;
    let mut ended = end_some_runs(&app, &receiver).await;
    app.provider.will("careful", [writes("a"), says("written")]);
    let waiting = app.start("careful", "go").await.id().to_owned();
    let request = requests(&app, &waiting, 1).await.remove(0);
    let path = format!("/runs/{waiting}");
    app.get_until(&path, |got| got.json()["status"] == "waiting")
        .await;
    let gate = Gate::closed();
    let door = gate.clone();
    app.provider
        .always("solo", move |_| says("resumed").after_gate(&door));
    let active = app.start("solo", "active").await.id().to_owned();
    app.provider.wait_for_request("solo", 4).await;
    let in_use = refusal(&migrate(&app, &url, "postgres").await);
    assert!(in_use.contains("is in use by"), "{in_use}");
    let before = shown(&app, &ended).await;

    app.daemon.kill().await;
    let copied = stdout(&migrate(&app, &url, "postgres").await);
    assert!(copied.contains(" 6 runs\n"), "{copied}");
    assert!(copied.contains(" 2 memory\n"), "{copied}");
    let again = refusal(&migrate(&app, &url, "postgres").await);
    assert!(again.contains("is not empty"), "{again}");
    app.use_database(Some(postgres));
    app.restart_after_end().await;
    assert_eq!(shown(&app, &ended).await, before);
    approve(&app, &request).await;
    let written = app.find(&waiting).await.wait_for_end().await;
    assert_eq!(written.output(), "written");
    app.provider.wait_for_request("solo", 5).await;
    ended.push(waiting);
    let before = shown(&app, &ended).await;

    app.daemon.kill().await;
    let again = refusal(&migrate(&app, &url, "sqlite").await);
    assert!(again.contains("is not empty"), "{again}");
    fs::remove_file(app.path("data/axed.db")).expect("removed");
    let _ = fs::remove_file(app.path("data/axed.db-wal"));
    let memory = app.path("data/memory/noter.md");
    let written = fs::read_to_string(&memory).expect("a memory");
    fs::write(&memory, format!("{written}- more\n")).expect("written");
    let again = refusal(&migrate(&app, &url, "sqlite").await);
    assert!(again.contains("its table memory has rows"), "{again}");
    // What a copy has left that was killed before its commit.
    fs::write(&memory, written).expect("written");
    let copied = stdout(&migrate(&app, &url, "sqlite").await);
    assert!(copied.contains(" 6 runs\n"), "{copied}");
    app.use_database(None);
    app.restart_after_end().await;
    assert_eq!(shown(&app, &ended).await, before);
    app.provider.wait_for_request("solo", 6).await;
    gate.open();
    let resumed = app.find(&active).await.wait_for_end().await;
    assert_eq!(resumed.output(), "resumed");
    assert_complete(&resumed.events().await);
}

/// A run that is in the memory of its agent, and has no end in the record.
async fn remember_without_end(app: &mut TestApp) -> String {
    let db = app.database();
    db.refuse_entries(&db.contains("new.entries", "run.completed"));
    let id = app.start("noter", "go").await.id().to_owned();
    let suspended = format!("{id} is suspended until");
    app.daemon.wait_for_log(&suspended).await;
    app.daemon.kill().await;
    db.accept_entries();
    id
}

/// Checks that the run ends with the reply in its record, and that so many runs are in the memory.
async fn ends_with_entries(app: &TestApp, id: &str, count: usize) {
    assert_eq!(app.find(id).await.wait_for_end().await.output(), "noted");
    let memory = app.get("/agents/noter/memory").await.json();
    let entries = memory["data"].as_array().expect("entries");
    assert_eq!(entries.len(), count, "{entries:?}");
}

#[tokio::test]
async fn a_copied_run_is_added_to_the_memory_once() {
    let Some(postgres) = Postgres::create() else {
        return;
    };
    let url = postgres.url.clone();
    let mut app = TestApp::setup()
        .agent("noter", "[memory]\nenabled = true")
        .sqlite()
        .spawn()
        .await;
    app.provider.always("noter", |_| says("noted"));
    let id = remember_without_end(&mut app).await;
    stdout(&migrate(&app, &url, "postgres").await);
    app.use_database(Some(postgres));
    app.restart_after_end().await;
    ends_with_entries(&app, &id, 1).await;

    let id = remember_without_end(&mut app).await;
    fs::remove_file(app.path("data/axed.db")).expect("removed");
    let _ = fs::remove_file(app.path("data/axed.db-wal"));
    fs::remove_dir_all(app.path("data/memory")).expect("removed");
    stdout(&migrate(&app, &url, "sqlite").await);
    app.use_database(None);
    app.restart_after_end().await;
    ends_with_entries(&app, &id, 2).await;
    assert_eq!(app.provider.requests_for("noter").len(), 2);
}

#[tokio::test]
async fn copied_runs_need_nodes_with_their_labels() {
    let Some(postgres) = Postgres::create() else {
        return;
    };
    let url = postgres.url.clone();
    let mut app = TestApp::setup()
        .environment("AXED_CLUSTER__LABELS", "gpu")
        .agent("planner", "sub_agents = [\"trainer\"]")
        .agent("trainer", "node = [\"gpu\"]")
        .agent("solo", "")
        .sqlite()
        .spawn()
        .await;
    let gate = Gate::closed();
    for agent in ["planner", "solo"] {
        let door = gate.clone();
        app.provider
            .always(agent, move |_| says("late").after_gate(&door));
    }
    let labelled = app.start("planner", "x").await.id().to_owned();
    let other_run = app.start("solo", "x").await.id().to_owned();
    app.provider.wait_for_requests(2).await;
    app.daemon.kill().await;
    stdout(&migrate(&app, &url, "postgres").await);
    app.use_database(Some(postgres));
    app.daemon = Daemon::start(other(&app, &url, "plain")).await;
    let is_warned = |got: &ApiResponse| got.json()["warnings"][0]["code"] == "no_node";
    app.get_until(&format!("/runs/{labelled}"), is_warned).await;
    app.provider.wait_for_request("solo", 2).await;
    assert_eq!(app.provider.requests_for("planner").len(), 1);

    let mut command = other(&app, &url, "labelled");
    command.env("AXED_CLUSTER__LABELS", "gpu");
    let _labelled = Daemon::start(command).await;
    gate.open();
    for id in [labelled, other_run] {
        let run = app.find(&id).await.wait_for_end().await;
        assert_eq!(run.output(), "late");
        assert_complete(&run.events().await);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copied_runs_call_the_agents_that_they_were_accepted_with() {
    let Some(postgres) = Postgres::create() else {
        return;
    };
    let url = postgres.url.clone();
    let mut app = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "system_prompt = \"Old.\"")
        .sqlite()
        .spawn()
        .await;
    let gate = Gate::closed();
    app.provider.will(
        "planner",
        [
            says("lost").after_gate(&gate),
            delegates([("reader", "x")]),
            says("planned"),
        ],
    );
    app.provider.will("reader", [says("read")]);
    let id = app.start("planner", "x").await.id().to_owned();
    app.provider.wait_for_request("planner", 1).await;
    app.daemon.kill().await;
    app.write_agent("reader", "system_prompt = \"New.\"");
    stdout(&migrate(&app, &url, "postgres").await);
    app.use_database(Some(postgres));
    app.daemon = Daemon::start(other(&app, &url, "node")).await;
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "planned");
    assert_eq!(app.provider.requests_for("reader")[0].system(), "Old.");
}

/// A cancel that is committed with the run that replaces another one is performed by the node that drives the other one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_with_a_committed_cancel_is_copied_once_a_node_has_performed_it() {
    let Some((mut app, url)) = spawn(TestApp::setup().agent("solo", "")).await else {
        return;
    };
    let gate = Gate::closed();
    let door = gate.clone();
    app.provider
        .always("solo", move |_| says("late").after_gate(&door));
    let id = app.start("solo", "x").await.id().to_owned();
    app.provider.wait_for_request("solo", 1).await;
    app.daemon.kill().await;
    let run = app.database().id(&id);
    app.database().execute(&format!(
        "INSERT INTO requests (id, root, run, asker, kind, body, blobs) VALUES (gen_random_uuid(), {run}, {run}, \
         gen_random_uuid(), 'cancel', convert_to('{{\"cancel\": {{\"reason\": \"replaced\"}}}}', 'UTF8'), '{{}}')"
    ));
    let refused = refusal(&migrate(&app, &url, "sqlite").await);
    assert!(refused.contains(&id), "{refused}");
    assert!(refused.contains("start a node"), "{refused}");

    app.restart_after_end().await;
    let cancelled = app.find(&id).await.wait_for_end().await;
    assert_eq!(cancelled.status(), "cancelled");
    assert_eq!(cancelled["cancel_reason"], "replaced");
    app.daemon.signal("TERM");
    assert!(app.daemon.wait_for_exit().await.success());
    let copied = stdout(&migrate(&app, &url, "sqlite").await);
    assert!(copied.contains(" 1 runs\n"), "{copied}");
}
