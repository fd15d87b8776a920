//! Several daemons on one database: each drives its own runs, others take over those of a dead one, and none that was replaced
//! writes anything.
//! These stories need a PostgreSQL server: `tests/postgres.sh cluster::`.

mod definitions;
mod duties;
mod following;
mod labels;
mod limits;
mod other_agents;
mod outages;
mod pooler;
mod protocols;
mod requests;
mod sessions;
mod tls;
mod waiting;
mod workdirs;

use std::process::Stdio;

use futures_util::future::join_all;

use crate::support::app::{ApiResponse, Setup, TestApp};
use crate::support::daemon::{Daemon, axed_command};
use crate::support::database::Database;
use crate::support::events::{assert_complete, count};
use crate::support::eventually;
use crate::support::gate::Gate;
use crate::support::postgres;
use crate::support::provider::answer::{delegates, hangs, says};
use crate::support::within_timeout;
use tokio::process::Command;

/// A daemon on PostgreSQL, with its URL; `None` without a server.
pub async fn spawn(setup: Setup) -> Option<(TestApp, String)> {
    if postgres::server().is_none() {
        eprintln!("skipped: AXED_TEST_POSTGRES names no server");
        return None;
    }
    let app = setup.spawn().await;
    match app.database() {
        Database::Postgres(url) => Some((app, url)),
        Database::Sqlite(_) => None,
    }
}

/// Another process on the same database, with a data directory of its own.
pub fn other(app: &TestApp, url: &str, node: &str) -> Command {
    other_with_agents(app, url, node, "agents")
}

/// As [`other`], with the agents of this directory.
pub fn other_with_agents(app: &TestApp, url: &str, node: &str, agents: &str) -> Command {
    let mut command = axed_command(
        &app.path("."),
        &[
            "serve",
            "--config=config/axed.toml",
            &format!("--agents={agents}"),
            &format!("--data=data-{node}"),
            "--listen=127.0.0.1:0",
        ],
    );
    command
        .env("AXED_DATA__URL", url)
        .env("AXED_CLUSTER__NODE", node)
        .env("AXED_CLUSTER__UNIQUE_NAMES", "true");
    command
}

/// Two daemons; the first one drives the runs that start now.
pub async fn pair(setup: Setup) -> Option<(TestApp, Daemon, String)> {
    let (app, url) = spawn(setup).await?;
    let second = Daemon::start(other(&app, &url, "second")).await;
    Some((app, second, url))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn daemons_that_start_at_once_on_an_empty_database_all_serve() {
    let Some((mut app, url)) = spawn(TestApp::setup().agent("solo", "")).await else {
        return;
    };
    app.provider.always("solo", |_| says("done"));
    app.daemon.kill().await;
    let empty = "DROP SCHEMA public CASCADE; CREATE SCHEMA public";
    postgres::with_client(&url, async |client| client.batch_execute(empty).await);
    let nodes = ["one", "two", "three", "four"];
    let starts = nodes.map(|node| Daemon::start(other(&app, &url, node)));
    for mut daemon in join_all(starts).await {
        std::mem::swap(&mut app.daemon, &mut daemon);
        assert_eq!(app.run("solo", "x").await.output(), "done");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_daemons_work_side_by_side() {
    let Some((mut app, url)) = spawn(TestApp::setup().agent("solo", "")).await else {
        return;
    };
    let gate = Gate::closed();
    app.provider.will(
        "solo",
        [
            says("of the first").after_gate(&gate),
            says("of the second"),
        ],
    );
    let id = app.start("solo", "x").await.id().to_owned();
    app.provider.wait_for_request("solo", 1).await;
    let second = Daemon::start(other(&app, &url, "second")).await;
    let first = std::mem::replace(&mut app.daemon, second);
    assert_eq!(app.run("solo", "y").await.output(), "of the second");
    assert_eq!(app.find(&id).await.status(), "running");
    gate.open();
    app.daemon = first;
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "of the first");
    assert_eq!(run["attempt"], 1);
    assert_complete(&run.events().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_runs_of_a_killed_daemon_go_on_at_the_others() {
    let Some((mut app, url)) = spawn(TestApp::setup().agent("solo", "")).await else {
        return;
    };
    let gate = Gate::closed();
    app.provider
        .always("solo", move |_| says("done").after_gate(&gate));
    let second = Daemon::start(other(&app, &url, "second")).await;
    let third = Daemon::start(other(&app, &url, "third")).await;
    let mut ids = Vec::new();
    for _ in 0..100 {
        ids.push(app.start("solo", "x").await.id().to_owned());
    }
    app.provider.wait_for_requests(100).await;
    app.provider.always("solo", |_| says("resumed"));
    app.daemon.kill().await;
    app.daemon = second;
    for id in ids {
        let run = app.find(&id).await.wait_for_end().await;
        assert_eq!(run.output(), "resumed");
        assert_complete(&run.events().await);
    }
    let others = [&app.daemon, &third];
    let takeovers = others.map(|daemon| daemon.log().matches("Taking over").count());
    assert!(takeovers.iter().all(|count| *count > 0), "{takeovers:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_paused_daemon_loses_its_runs_and_joins_again() {
    let Some((mut app, url)) = spawn(TestApp::setup().agent("solo", "")).await else {
        return;
    };
    let gate = Gate::closed();
    app.provider
        .will("solo", [says("late").after_gate(&gate), says("taken over")]);
    let id = app.start("solo", "x").await.id().to_owned();
    app.provider.wait_for_request("solo", 1).await;
    let second = Daemon::start(other(&app, &url, "second")).await;
    app.daemon.signal("STOP");
    let first = std::mem::replace(&mut app.daemon, second);
    assert_eq!(
        app.find(&id).await.wait_for_end().await.output(),
        "taken over"
    );
    first.signal("CONT");
    gate.open();
    first.wait_for_log("This node has joined again").await;
    app.daemon = first;
    app.get_until("/readyz", |got| got.status == 200).await;
    let run = app.find(&id).await;
    let events = run.events().await;
    assert_eq!(run.output(), "taken over");
    assert_eq!(count(&events, "run.completed"), 1);
    assert_complete(&events);
    app.provider.will("solo", [says("back")]);
    assert_eq!(app.run("solo", "x").await.output(), "back");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_takes_over_at_once_from_one_of_its_own_name() {
    let Some((mut app, url)) = spawn(TestApp::setup().agent("solo", "")).await else {
        return;
    };
    let gate = Gate::closed();
    app.provider
        .will("solo", [says("late").after_gate(&gate), says("taken over")]);
    let id = app.start("solo", "x").await.id().to_owned();
    app.provider.wait_for_request("solo", 1).await;
    app.daemon.kill().await;
    // Names are unique, so the process of this name is gone.
    app.daemon = Daemon::start(other(&app, &url, "story")).await;
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "taken over");
    assert_complete(&run.events().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_about_the_database_do_not_contain_its_password() {
    let home = tempfile::tempdir().expect("a directory");
    let url = "postgres://user:open-sesame@127.0.0.1:1/stories";
    for arguments in [&["serve", "--listen=127.0.0.1:0"][..], &["config", "show"]] {
        let output = axed_command(home.path(), arguments)
            .env("AXED_DATA__URL", url)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .output();
        let output = within_timeout("an end", output).await.expect("an exit");
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text);
        assert!(!text.contains("open-sesame"), "{text}");
        let expected = match arguments[0] {
            "serve" => "the database stories at 127.0.0.1:1",
            _ => "***",
        };
        assert!(text.contains(expected), "{text}");
    }
}

/// An older version ended a root before the children that it had not reached, and may have died between.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn runs_whose_tree_has_ended_without_them_fail() {
    let setup = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "");
    let Some((mut app, _)) = spawn(setup).await else {
        return;
    };
    app.provider
        .will("planner", [delegates([("reader", "x")]), says("planned")]);
    app.provider.will("reader", [hangs()]);
    let id = app.start("planner", "go").await.id().to_owned();
    app.provider.wait_for_request("reader", 1).await;
    let is_recorded = |got: &ApiResponse| got.json()["data"][0].is_object();
    app.get_until(&format!("/runs/{id}/children"), is_recorded)
        .await;
    app.daemon.kill().await;
    let db = app.database();
    db.execute(&format!(
        "UPDATE runs SET status = 'failed', finished_at = 0 WHERE id = {}; DELETE FROM trees",
        db.id(&id)
    ));
    app.restart_after_end().await;
    let child = app.find(&id).await.children().await.remove(0);
    let child = child.wait_for_end().await;
    assert_eq!(child.failure().0, "interrupted");
    // What stood for the tree while that was written goes away.
    let is_gone = async || (db.number("SELECT count(*) FROM trees") == Some(0)).then_some(());
    eventually("no tree is left", is_gone).await;
}
