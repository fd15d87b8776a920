//! Daemons behind a PgBouncer in transaction mode, with the database's own address for messages (`data.listen_url`). An old PgBouncer
//! can only be used in session mode.

use std::process::Stdio;

use futures_util::future::join_all;
use serde_json::json;
use tokio::process::Command;

use crate::cluster::following::{live_text, read_text, stream_at, wait_at, without_live};
use crate::cluster::{other, spawn};
use crate::support::app::TestApp;
use crate::support::daemon::{Daemon, axed_command};
use crate::support::events::assert_complete;
use crate::support::gate::Gate;
use crate::support::hanging_server::HangingServer;
use crate::support::postgres;
use crate::support::provider::answer::{hangs, says};
use crate::support::within_timeout;

/// As [`other`], through a pooler; `None` if there is none.
fn pooled(app: &TestApp, url: &str, variable: &str, node: &str) -> Option<Command> {
    let Some(pooler) = postgres::pooler_url(url, variable) else {
        eprintln!("skipped: {variable} names no pooler");
        return None;
    };
    let mut command = other(app, &pooler, node);
    command.env("AXED_DATA__LISTEN_URL", url);
    Some(command)
}

/// Whether a daemon that ends has succeeded, and what it has said.
async fn output(command: &mut Command) -> (bool, String) {
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = within_timeout("an end", command.output()).await;
    let output = output.expect("an exit");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.success(), text)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_says_that_no_messages_arrive() {
    let Some((app, url)) = spawn(TestApp::setup().agent("solo", "")).await else {
        return;
    };
    let mut elsewhere = other(&app, &url, "second");
    let another_database = postgres::server().expect("a server");
    elsewhere.env("AXED_DATA__LISTEN_URL", another_database);
    let second = Daemon::start(elsewhere).await;
    second
        .wait_for_log("set data.listen_url to the database's own address")
        .await;
    assert!(!app.daemon.log().contains("no messages arrive"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn daemons_work_behind_a_pooler() {
    let setup = TestApp::setup()
        .agent("solo", "stream = true")
        .agent("quick", "");
    let Some((mut app, url)) = spawn(setup).await else {
        return;
    };
    let behind = |node| pooled(&app, &url, "AXED_TEST_POOLER", node);
    let (Some(first), Some(second)) = (behind("first"), behind("second")) else {
        return;
    };
    let (first, second) = (Daemon::start(first).await, Daemon::start(second).await);
    app.daemon.kill().await;
    app.daemon = first;
    app.daemon
        .wait_for_log("drops the time limits of sessions")
        .await;

    let [gate, last_gate] = [(); 2].map(|()| Gate::closed());
    let answer = says("one two three four")
        .pausing_at(&gate)
        .ending_at(&last_gate);
    app.provider.will("solo", [answer, hangs(), hangs()]);
    let id = app.start("solo", "x").await.id().to_owned();
    app.provider.wait_for_request("solo", 1).await;
    let mut there = stream_at(&second, &id, 0).await;
    let mut events = there.until("text.delta").await;
    gate.open();
    read_text(&mut there, &mut events, "one two three four").await;
    last_gate.open();
    events.extend(there.rest().await);
    assert_eq!(live_text(&events), "one two three four");
    assert_eq!(
        without_live(events),
        app.find(&id).await.events().await,
        "other events at the other daemon"
    );

    let cancelled = app.start("solo", "x").await.id().to_owned();
    app.provider.wait_for_request("solo", 2).await;
    let first = std::mem::replace(&mut app.daemon, second);
    app.find(&cancelled).await.cancel("not needed").await;
    assert_eq!(wait_at(&first, &cancelled).await["status"], "cancelled");
    let second = std::mem::replace(&mut app.daemon, first);

    app.provider.always("quick", |_| says("quick"));
    let bodies = [json!({"input": "x", "session": "s"}), json!({"input": "x"})];
    let runs = (0..40).map(|number| {
        let daemon = if number % 2 == 0 {
            &app.daemon
        } else {
            &second
        };
        let request = app
            .client
            .post(format!("{}/agents/quick/runs?wait=180", daemon.url));
        crate::support::app::send(request.json(&bodies[usize::from(number > 9)]))
    });
    for got in within_timeout("all runs", join_all(runs)).await {
        assert_eq!(got.json()["status"], "completed", "{}", got.text);
    }

    let id = app.start("solo", "x").await.id().to_owned();
    app.provider.wait_for_request("solo", 3).await;
    app.provider.will("solo", [says("taken over")]);
    app.daemon.kill().await;
    app.daemon = second;
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "taken over");
    assert_complete(&run.events().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pooler_that_loses_prepared_statements_is_refused() {
    let Some((app, url)) = spawn(TestApp::setup().agent("solo", "")).await else {
        return;
    };
    let Some(mut command) = pooled(&app, &url, "AXED_TEST_LOSSY_POOLER", "second") else {
        return;
    };
    let (succeeds, text) = output(&mut command).await;
    assert!(!succeeds);
    assert!(text.contains("max_prepared_statements"), "{text}");
}

/// As a pooler does that has no connection to the database left.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_that_does_not_answer_is_an_error() {
    let server = HangingServer::start().await;
    let url = server.url("user@127.0.0.1").replace("http:", "postgres:");
    let home = tempfile::tempdir().expect("a directory");
    let mut command = axed_command(home.path(), &["serve", "--listen=127.0.0.1:0"]);
    let (succeeds, text) = output(command.env("AXED_DATA__URL", url + "axed")).await;
    assert!(!succeeds);
    assert!(text.contains("did not answer within 15 s"), "{text}");
}
