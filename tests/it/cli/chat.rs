//! `axed chat` on a pipe: each line of stdin is a message.

use std::process::Stdio;

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::Command;

use crate::cli::home::{ECHO, Ended, Home, leftovers, signal};
use crate::support::app::TestApp;
use crate::support::daemon::axed_command;
use crate::support::gate::Gate;
use crate::support::provider::answer::{calls, fails, says};
use crate::support::relay::Relay;
use crate::support::within_timeout;
use serde_json::json;

/// Runs a chat with these lines on stdin to its end.
async fn chat(mut command: Command, lines: &str) -> Ended {
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().expect("start axed");
    let mut stdin = child.stdin.take().expect("stdin");
    stdin.write_all(lines.as_bytes()).await.expect("write");
    drop(stdin);
    let output = within_timeout("the end of the chat", child.wait_with_output()).await;
    Ended::from(output.expect("wait"))
}

#[tokio::test]
async fn messages_of_a_chat_are_runs_of_one_session() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.will("solo", [says("hello"), says("again")]);
    let arguments = [
        "chat",
        "solo",
        "--session",
        "s1",
        "--server",
        &app.daemon.url,
    ];
    let ended = chat(axed_command(&app.path("."), &arguments), "hi\n\nmore\n").await;
    assert_eq!(ended.with(0), "hello\nagain\n");
    let session = app.get("/sessions/s1").await.json();
    assert_eq!(session["messages"], 4, "{session}");
    let runs = session["data"].as_array().expect("runs");
    assert_eq!(runs.len(), 2, "{session}");
}

#[tokio::test]
async fn a_chat_in_process_keeps_nothing_unless_it_has_a_directory() {
    let home = Home::new();
    home.agent("echo", "", ECHO);
    let ended = chat(home.command(&["chat", "echo"]), "one\ntwo").await;
    assert_eq!(ended.with(0), "got: one\ngot: two\n");
    assert_eq!(ended.err, "");
    assert_eq!(leftovers(&home), [".keep"]);
    assert!(!home.path().join("data").exists());
    let kept = ["chat", "echo", "--data", "data", "--session", "s1"];
    for message in ["one", "two"] {
        chat(home.command(&kept), message).await.with(0);
    }
    let unknown = chat(home.command(&["chat", "nobody"]), "hi\n").await;
    assert_eq!(unknown.with(2), "");
    assert!(
        unknown.err.contains("agent config not found: nobody"),
        "{}",
        unknown.err
    );
}

#[tokio::test]
async fn a_chat_shows_tool_calls_and_continues_after_a_failure() {
    let app = TestApp::setup()
        .agent("solo", "sub_agents = [\"solo\"]")
        .spawn()
        .await;
    let call = json!({"agent": "nobody", "task": "look"});
    app.provider.will(
        "solo",
        [
            calls([("call_agent", call)]),
            says("well"),
            fails(400, "no"),
            says("later"),
        ],
    );
    let arguments = ["chat", "solo", "--server", &app.daemon.url];
    let ended = chat(axed_command(&app.path("."), &arguments), "a\nb\nc\n").await;
    // The exit code is that of the run that failed.
    assert_eq!(ended.with(1), "well\nlater\n");
    for text in [
        "solo: → call_agent",
        "solo: ✗ call_agent failed after ",
        " failed: ",
    ] {
        assert!(
            ended.err.contains(text),
            "{text:?} is missing in {}",
            ended.err
        );
    }
}

#[tokio::test]
async fn an_interrupt_cancels_the_run_and_not_the_chat() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    let gate = Gate::closed();
    app.provider
        .will("solo", [says("late").after_gate(&gate), says("second")]);
    let arguments = ["chat", "solo", "--server", &app.daemon.url];
    let mut command = axed_command(&app.path("."), &arguments);
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().expect("start axed");
    let mut stdin = child.stdin.take().expect("stdin");
    let mut lines = BufReader::new(child.stderr.take().expect("stderr")).lines();
    stdin.write_all(b"first\n").await.expect("write");
    app.provider.wait_for_concurrency("solo", 1).await;
    signal(&child, "INT");
    let cancelled = async {
        while let Some(line) = lines.next_line().await.expect("read") {
            if line.contains("cancelled: interrupted in axed chat") {
                return;
            }
        }
        panic!("the chat ended without the message");
    };
    within_timeout("the cancelled run", cancelled).await;
    stdin.write_all(b"next\n").await.expect("write");
    drop(stdin);
    let output = within_timeout("the end of the chat", child.wait_with_output()).await;
    let output = output.expect("wait");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "second\n");
    assert_eq!(output.status.code(), Some(1));
}

#[tokio::test]
async fn a_chat_goes_on_at_the_daemon_that_is_started_next() {
    let mut app = TestApp::setup().agent("solo", "").spawn().await;
    let relay = Relay::start(&app.daemon.url).await;
    let gate = Gate::closed();
    let late = || says("late").after_gate(&gate);
    app.provider.will("solo", [late(), late(), says("second")]);
    let arguments = ["chat", "solo", "--server", &relay.url];
    let command = axed_command(&app.path("."), &arguments);
    let restart = async {
        app.provider.wait_for_concurrency("solo", 1).await;
        relay.wait_for("run.started").await;
        app.daemon.kill().await;
        app.restart_after_end().await;
        relay.set_daemon(&app.daemon.url);
        relay.wait_for("run.resumed").await;
        gate.open();
    };
    let (ended, ()) = tokio::join!(chat(command, "first\nnext\n"), restart);
    assert_eq!(ended.with(0), "late\nsecond\n");
    for line in ["; connecting again", "solo: resumed"] {
        assert_eq!(ended.err.matches(line).count(), 1, "{line}: {}", ended.err);
    }
}
