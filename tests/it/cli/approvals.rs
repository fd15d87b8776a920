//! Deciding and answering at the command line: `axed approvals`, `axed runs approve` and `deny`, and what `axed run` says on a pipe.

use std::process::Stdio;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::ChildStderr;

use crate::cli::home::{Ended, Home, ended};
use crate::support::app::{ApiResponse, TestApp};
use crate::support::daemon::axed_command;
use crate::support::provider::answer::{calls, delegates, says};
use crate::support::within_timeout;
use crate::tools::approvals::{careful, requests, sent, writes, wrote};
use crate::tools::ask_person::{asks, curious, waiting};

async fn axed(app: &TestApp, arguments: &[&str]) -> Ended {
    let arguments = [arguments, &["--server", &app.daemon.url]].concat();
    ended(axed_command(&app.path("."), &arguments)).await
}

/// Waits for a line of stderr with this text, and returns it.
async fn line_with(lines: &mut Lines<BufReader<ChildStderr>>, text: &str) -> String {
    within_timeout(text, async {
        while let Some(line) = lines.next_line().await.expect("UTF-8") {
            if line.contains(text) {
                return line;
            }
        }
        panic!("stderr ended without {text}");
    })
    .await
}

#[tokio::test]
async fn a_run_on_a_pipe_prints_the_command_that_decides_its_call() {
    let home = Home::new();
    let script = "[[replies]]\n[[replies.tool_calls]]\nname = \"write_file\"\n\
        arguments = { path = \"note.md\", content = \"found\" }\n[[replies]]\ntext = \"On it: {{result.1}}\"\n";
    let agent = "workdir = \"work\"\ntools = [\"write_file\"]\napprove = [\"write_file\"]";
    home.write("work/.keep", "");
    home.agent("fixer", agent, script);
    let mut command = home.command(&["run", "fixer", "go"]);
    command
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .stdout(Stdio::piped());
    let mut child = command.kill_on_drop(true).spawn().expect("run axed");
    let mut lines = BufReader::new(child.stderr.take().expect("stderr")).lines();

    let waiting = line_with(&mut lines, "waits for approval").await;
    assert!(
        waiting.contains(
            "fixer waits for approval of write_file {\"content\":\"found\",\"path\":\"note.md\"}"
        ),
        "{waiting}"
    );
    let hint = line_with(&mut lines, "to decide").await;
    let (_, decision) = hint.split_once("axed runs approve ").expect("a command");
    let (decision, _) = decision.split_once("   (or deny").expect("an alternative");
    let arguments: Vec<&str> = ["runs", "approve"]
        .into_iter()
        .chain(decision.split(' '))
        .collect();
    let decided = home.axed(&arguments).await;
    assert!(decided.with(0).contains(" approved"), "{}", decided.out);

    let ended = within_timeout("the run's end", child.wait_with_output()).await;
    let ended = ended.expect("an end");
    assert!(ended.status.success());
    let out = String::from_utf8_lossy(&ended.stdout).into_owned();
    assert!(out.starts_with("On it: wrote 5 bytes"), "{out}");
    assert_eq!(home.read("work/note.md"), "found");
}

#[tokio::test]
async fn the_only_call_that_waits_needs_no_id() {
    let app = careful("").spawn().await;
    app.provider
        .will("planner", [delegates([("careful", "write")]), says("done")]);
    app.provider.will("careful", [writes("a"), says("written")]);
    let (id, _) = sent(&app, "planner").await;
    // The root names the call of its child.
    let approved = axed(&app, &["runs", "approve", &id]).await;
    assert!(
        approved.with(0).trim_end().ends_with(" approved"),
        "{}",
        approved.out
    );
    let named = "approving, of careful: write_file {\"path\":\"a\",\"content\":\"new\"}";
    assert!(approved.err.contains(named), "{}", approved.err);
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "done");
    assert!(wrote(&app, "a"));
    let late = axed(&app, &["runs", "approve", &id]).await;
    late.with(2);
    let expected = format!("no tool call of {id} waits for approval; it is completed");
    assert!(late.err.contains(&expected), "{}", late.err);

    app.provider.will("careful", [writes("b"), says("denied")]);
    let (id, _) = sent(&app, "careful").await;
    let arguments = [
        "runs",
        "approve",
        &id,
        "--deny",
        "--reason",
        "not on a Friday",
    ];
    assert!(axed(&app, &arguments).await.with(0).contains(" denied"));
    assert_eq!(app.find(&id).await.wait_for_end().await.output(), "denied");
    let seen = app.provider.wait_for_request("careful", 4).await;
    assert_eq!(
        seen.tool_results(),
        ["The call of write_file was denied: not on a Friday"]
    );
}

#[tokio::test]
async fn a_run_that_waits_shows_its_call_and_how_to_decide_it() {
    let app = careful("").spawn().await;
    app.provider
        .will("planner", [delegates([("careful", "write")]), says("done")]);
    app.provider.will("careful", [writes("a"), says("written")]);
    let (id, request) = sent(&app, "planner").await;
    let call = request["tool_call_id"].as_str().expect("an id");
    let wait = "write_file {\"path\":\"a\",\"content\":\"new\"}";

    let shown = axed(&app, &["runs", "show", &id]).await;
    for line in [
        "waits      for approval\n",
        &format!("call       {wait} (of careful, "),
        &format!(" {call} --server {}", app.daemon.url),
    ] {
        assert!(
            shown.with(0).contains(line),
            "{line} is not in {}",
            shown.out
        );
    }
    let listed = axed(&app, &["runs", "list", "--agent", "planner"]).await;
    let reason = "\twaits for approval of write_file: {\"path\":\"a\",\"content\":\"new\"}\n";
    assert!(listed.with(0).ends_with(reason), "{}", listed.out);
    let approved = axed(&app, &["runs", "approve", &id]).await;
    let reported = format!(": write_file {call} approved\n");
    assert!(approved.with(0).ends_with(&reported), "{}", approved.out);
    assert_eq!(app.find(&id).await.wait_for_end().await.output(), "done");
}

#[tokio::test]
async fn several_calls_that_wait_are_listed() {
    let app = careful("").spawn().await;
    let file = |path: &str| ("write_file", json!({"path": path, "content": "\u{1b}[2J"}));
    app.provider.will(
        "careful",
        [calls([file("a"), file("b"), file("c")]), says("done")],
    );
    let id = app.start("careful", "go").await.id().to_owned();
    let requests = requests(&app, &id, 3).await;
    let call = |at: usize| requests[at]["tool_call_id"].as_str().expect("an id");

    let several = axed(&app, &["runs", "approve", &id]).await;
    several.with(2);
    assert!(several.err.contains("3 tool calls of"), "{}", several.err);
    for at in 0..3 {
        let line = format!("\n  {}  write_file {{\"path\":", call(at));
        assert!(several.err.contains(&line), "{}", several.err);
    }
    let listed = axed(&app, &["approvals"]).await;
    let lines: Vec<&str> = listed.with(0).lines().collect();
    assert_eq!(lines.len(), 4, "{}", listed.out);
    assert!(lines[0].starts_with("run\tcall\ttool\tage\targuments"));
    assert!(lines[1].starts_with(&format!("{id}\t")), "{}", lines[1]);
    assert!(lines[1].contains("\\u001b[2J"), "{}", lines[1]);
    let json = axed(&app, &["approvals", "-o", "json"]).await;
    let first: Value =
        serde_json::from_str(json.with(0).lines().next().expect("a line")).expect("JSON");
    assert_eq!(first, app.get("/approvals").await.json()["data"][0]);

    axed(&app, &["runs", "deny", &id, call(0)]).await.with(0);
    let rest = axed(&app, &["runs", "approve", &id, "--all"]).await;
    assert_eq!(rest.with(0).lines().count(), 2);
    assert_eq!(app.find(&id).await.wait_for_end().await.output(), "done");
    let none = axed(&app, &["approvals"]).await;
    assert_eq!(none.with(0), "");
    assert!(
        none.err.contains("nothing waits for approval"),
        "{}",
        none.err
    );
}

#[tokio::test]
async fn long_arguments_are_shown_whole() {
    let app = careful("").spawn().await;
    let content = format!("{}the end", "x".repeat(20_000));
    let write = json!({"path": "a", "content": content});
    app.provider
        .will("careful", [calls([("write_file", write)]), says("done")]);
    let (id, _) = sent(&app, "careful").await;
    let listed = axed(&app, &["approvals"]).await;
    assert!(listed.with(0).contains("the end"), "{}", listed.out);
    let approved = axed(&app, &["runs", "approve", &id]).await;
    approved.with(0);
    assert!(approved.err.contains("the end"), "{}", approved.err);
    assert_eq!(app.find(&id).await.wait_for_end().await.output(), "done");
}

#[tokio::test]
async fn a_question_is_printed_answered_and_declined() {
    let app = curious("").spawn().await;
    let form =
        json!({"question": "Which city?", "options": ["Oslo"], "schema": {"type": "object"}});
    app.provider
        .will("planner", [delegates([("curious", "ask")]), says("done")]);
    let turns = [
        asks(json!({"question": "Sure?"})),
        asks(form),
        says("answered"),
    ];
    app.provider.will("curious", turns);
    // The root names the question of its child.
    let (id, question) = waiting(&app, "planner").await;
    let shown = axed(&app, &["runs", "show", &id]).await;
    assert!(
        shown.with(0).contains("for a person's answer"),
        "{}",
        shown.out
    );
    assert!(shown.out.contains("curious asks: Sure?"), "{}", shown.out);
    let printed = axed(&app, &["runs", "answer", &id]).await;
    assert_eq!(printed.with(0).trim_end(), "curious asks: Sure?");
    let answered = axed(&app, &["runs", "answer", &id, "yes"]).await;
    assert!(
        answered.with(0).trim_end().ends_with(" answered"),
        "{}",
        answered.out
    );
    let first = question["id"].clone();
    let is_next = |got: &ApiResponse| {
        let got = got.json();
        got["pending_inputs"][0].is_object() && got["pending_inputs"][0]["id"] != first
    };
    app.get_until(&format!("/runs/{id}"), is_next).await;
    let printed = axed(&app, &["runs", "answer", &id]).await;
    let lines: Vec<&str> = printed.with(0).lines().collect();
    assert_eq!(
        lines,
        [
            "curious asks: Which city?",
            "  - Oslo",
            "  as JSON by this schema: {\"type\":\"object\"}"
        ]
    );
    let refused = axed(&app, &["runs", "answer", &id, "Oslo"]).await;
    assert!(
        refused.with(2).is_empty() && refused.err.contains("object"),
        "{}",
        refused.err
    );
    let bad = axed(&app, &["runs", "answer", &id, "--value", "{"]).await;
    assert!(
        bad.with(2).is_empty() && bad.err.contains("is not JSON"),
        "{}",
        bad.err
    );
    let declined = axed(&app, &["runs", "answer", &id, "--decline", "ask finance"]).await;
    assert!(
        declined.with(0).trim_end().ends_with(" declined"),
        "{}",
        declined.out
    );
    assert_eq!(app.find(&id).await.wait_for_end().await.output(), "done");
    let over = axed(&app, &["runs", "answer", &id, "yes"]).await;
    assert!(
        over.with(2).is_empty() && over.err.contains("it is completed"),
        "{}",
        over.err
    );
}

#[tokio::test]
async fn a_run_on_a_pipe_prints_the_command_that_answers_its_question() {
    let home = Home::new();
    let script = "[[replies]]\n[[replies.tool_calls]]\nname = \"ask_person\"\n\
        arguments = { question = \"Which city?\" }\n[[replies]]\ntext = \"{{result.1}}\"\n";
    home.agent("host", "[ask]\nenabled = true", script);
    let mut command = home.command(&["run", "host", "go"]);
    command
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .stdout(Stdio::piped());
    let mut child = command.kill_on_drop(true).spawn().expect("run axed");
    let mut lines = BufReader::new(child.stderr.take().expect("stderr")).lines();
    line_with(&mut lines, "host asks: Which city?").await;
    let hint = line_with(&mut lines, "to answer").await;
    let (_, rest) = hint.split_once("axed runs answer ").expect("a command");
    let (rest, _) = rest.split_once("   (or --decline").expect("an alternative");
    let rest = rest.replace("TEXT", "Oslo");
    let arguments: Vec<&str> = ["runs", "answer"]
        .into_iter()
        .chain(rest.split(' '))
        .collect();
    let answered = home.axed(&arguments).await;
    assert!(answered.with(0).contains(" answered"), "{}", answered.out);
    let ended = within_timeout("the run's end", child.wait_with_output()).await;
    let ended = ended.expect("an end");
    assert!(ended.status.success());
    let out = String::from_utf8_lossy(&ended.stdout).into_owned();
    assert!(out.starts_with("A person answered: Oslo"), "{out}");
}
