//! Recordings of runs that did not go straight to their end: persons, forks and cancels took part, or a secret did.

use std::fs;

use serde_json::json;

use crate::cli::recordings::{axed, read, save, tested};
use crate::forks::fork;
use crate::support::app::TestApp;
use crate::support::gate::Gate;
use crate::support::provider::answer::{calls, delegates, fails, hangs, says};
use crate::tools::approvals::{careful, decide, sent, writes, wrote};

#[tokio::test]
async fn live_tools_get_the_arguments_of_a_person() {
    let app = careful("").spawn().await;
    app.provider.will("careful", [writes("a"), says("done")]);
    let (id, request) = sent(&app, "careful").await;
    let arguments = json!({"path": "b", "content": "better"});
    let decision = json!({"decision": "approve", "arguments": arguments});
    let decided = decide(&app, &request, decision).await;
    assert_eq!(decided.status, 202, "{}", decided.text);
    app.find(&id).await.wait_for_end().await;
    save(&app, &id, "tests/changed.toml").await;
    let recording = read(&app, "tests/changed.toml");
    let part = "arguments = { path = \"b\", content = \"better\" }";
    assert!(recording.contains(part), "{part} is not in {recording}");

    fs::remove_file(app.path("work/b")).expect("a file");
    tested(&app, 0, &[]).await;
    assert!(!wrote(&app, "b"));
    tested(&app, 0, &["--live-tools"]).await;
    assert!(wrote(&app, "b") && !wrote(&app, "a"));
}

#[tokio::test]
async fn an_agent_gets_the_task_of_a_person() {
    let boss = "sub_agents = [\"kid\"]\napprove = [\"call_agent\"]";
    let app = TestApp::setup()
        .agent("boss", boss)
        .agent("kid", "")
        .spawn()
        .await;
    let first = delegates([("kid", "old task")]);
    app.provider.will("boss", [first, says("done")]);
    app.provider.will("kid", [says("did it")]);
    let (id, request) = sent(&app, "boss").await;
    let arguments = json!({"agent": "kid", "task": "new task"});
    let decision = json!({"decision": "approve", "arguments": arguments});
    let decided = decide(&app, &request, decision).await;
    assert_eq!(decided.status, 202, "{}", decided.text);
    app.find(&id).await.wait_for_end().await;
    save(&app, &id, "tests/task.toml").await;
    tested(&app, 0, &[]).await;

    app.write_agent("boss", "sub_agents = [\"kid\"]");
    let failed = axed(&app, &["test"]).await;
    for part in ["approval of call_agent", "save a new run"] {
        assert!(failed.with(1).contains(part), "{}", failed.out);
    }
}

#[tokio::test]
async fn null_in_a_schema_is_played_back() {
    let schema = json!({
        "type": "object", "properties": {"a": {"enum": ["b", null]}}, "required": ["a"],
        "additionalProperties": false,
    });
    let format = format!("[params.response_format]\ntype = \"json_schema\"\nschema = '{schema}'");
    let app = TestApp::setup()
        .agent("strict", &format)
        .agent("solo", "")
        .spawn()
        .await;
    let reply = || says(json!({"a": null}).to_string());
    app.provider.will("strict", [reply()]);
    app.provider.will("solo", [reply()]);
    let strict = app.run("strict", "go").await.id().to_owned();
    save(&app, &strict, "tests/strict.toml").await;
    tested(&app, 0, &["tests/strict.toml"]).await;

    let format = json!({"type": "json_schema", "schema": schema});
    let request = json!({"input": "go", "params": {"response_format": format}});
    let solo = app.run_with("solo", request).await.id().to_owned();
    save(&app, &solo, "tests/solo.toml").await;
    tested(&app, 0, &["tests/solo.toml"]).await;
}

#[tokio::test]
async fn redacted_texts_stay_out_of_the_file() {
    let agent = |prompt: &str| {
        format!(
            "system_prompt = \"{prompt}\"\ntools = [\"list_directory\"]\n\
             [params.response_format]\ntype = \"json_schema\"\n\
             schema = {{ type = \"object\", properties = {{ a = {{ type = \"string\", description = \"not pin-7\" }} }}, \
             required = [\"a\"], additionalProperties = false }}"
        )
    };
    let app = TestApp::setup()
        .agent("solo", &agent("The code is pin-1."))
        .config("[data]\nredact = ['pin-\\d+']")
        .spawn()
        .await;
    let lists = calls([("list_directory", json!({"path": ".", "pin-8": "v"}))]);
    let reply = says(json!({"a": "b"}).to_string());
    app.provider.will("solo", [lists, reply]);
    let run = app.run("solo", "go").await.id().to_owned();
    save(&app, &run, "tests/pin.toml").await;
    let recording = read(&app, "tests/pin.toml");
    assert!(!recording.contains("pin-"), "{recording}");
    tested(&app, 0, &[]).await;

    app.write_agent("solo", &agent("The new code is pin-1."));
    let failed = tested(&app, 1, &[]).await;
    let divergence = &failed["attempts"][0]["divergence"];
    assert_eq!(divergence["now"], "The new code is [redacted].");
    tested(&app, 0, &["--accept"]).await;
    let recording = read(&app, "tests/pin.toml");
    assert!(!recording.contains("pin-"), "{recording}");
    tested(&app, 0, &[]).await;
}

#[tokio::test]
async fn a_request_with_a_message_fails_again() {
    let app = TestApp::setup()
        .agent("solo", "[retry]\nmax_retries = 0")
        .spawn()
        .await;
    let gate = Gate::closed();
    let first = says("too early").after_gate(&gate);
    app.provider.will("solo", [first, fails(400, "too long")]);
    let run = app.start("solo", "go").await;
    app.provider.wait_for_request("solo", 1).await;
    let path = format!("/runs/{}/messages", run.id());
    let added = app.post(&path, &json!({"content": "be brief"})).await;
    assert_eq!(added.status, 202, "{}", added.text);
    gate.open();
    let run = run.wait_for_end().await;
    assert_eq!(run.status(), "failed");
    save(&app, run.id(), "tests/message.toml").await;
    let recording = read(&app, "tests/message.toml");
    assert!(recording.contains("added = [\"be brief\"]"), "{recording}");
    tested(&app, 0, &[]).await;
}

#[tokio::test]
async fn a_run_is_cancelled_again_after_a_reply_that_could_end_it() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    let gate = Gate::closed();
    let first = says("too early").after_gate(&gate);
    app.provider.will("solo", [first, hangs()]);
    let run = app.start("solo", "go").await;
    app.provider.wait_for_request("solo", 1).await;
    let path = format!("/runs/{}/messages", run.id());
    let added = app.post(&path, &json!({"content": "be brief"})).await;
    assert_eq!(added.status, 202, "{}", added.text);
    gate.open();
    app.provider.wait_for_request("solo", 2).await;
    let cancelled = run.cancel("not needed").await;
    save(&app, cancelled.id(), "tests/cancelled.toml").await;
    tested(&app, 0, &[]).await;
}

#[tokio::test]
async fn a_fork_has_the_failure_that_it_took_over() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"lost\"]")
        .agent("lost", "[retry]\nmax_retries = 0")
        .spawn()
        .await;
    let first = delegates([("lost", "find it")]);
    app.provider.will("planner", [first, says("not found")]);
    app.provider.will("lost", [fails(400, "no such thing")]);
    let source = app.run("planner", "go").await.id().to_owned();
    app.provider.will("planner", [says("ended otherwise")]);
    let forked = fork(&app, &source, &json!({"at": {"turn": 2}})).await;
    assert_eq!(forked.output(), "ended otherwise");
    save(&app, forked.id(), "tests/fork.toml").await;
    let recording = read(&app, "tests/fork.toml");
    assert!(recording.contains("reused = true"), "{recording}");
    tested(&app, 0, &[]).await;
}

#[tokio::test]
async fn a_cancelled_tree_is_cancelled_again() {
    let app = TestApp::setup()
        .agent("boss", "sub_agents = [\"kid\"]")
        .agent("kid", "")
        .spawn()
        .await;
    app.provider.will("boss", [delegates([("kid", "wait")])]);
    app.provider.will("kid", [hangs()]);
    let run = app.start("boss", "go").await;
    app.provider.wait_for_request("kid", 1).await;
    let cancelled = run.cancel("not needed").await;
    assert_eq!(cancelled.status(), "cancelled");
    save(&app, cancelled.id(), "tests/cancelled.toml").await;
    let recording = read(&app, "tests/cancelled.toml");
    let reason = "cancelled = \"not needed\"";
    assert_eq!(recording.matches(reason).count(), 2, "{recording}");
    tested(&app, 0, &[]).await;
}

#[tokio::test]
async fn children_in_the_background_are_played_back() {
    let boss = "sub_agents = [\"kid\"]\n[sub_agents_config]\nbackground = true";
    let app = TestApp::setup()
        .agent("boss", boss)
        .agent("kid", "")
        .spawn()
        .await;
    let starts = || {
        let arguments = json!({"agent": "kid", "task": "play", "background": true});
        calls([("call_agent", arguments)])
    };
    app.provider.will(
        "boss",
        [
            starts(),
            calls([("await_agents", json!({}))]),
            starts(),
            says("for now"),
            says("done"),
        ],
    );
    let gate = Gate::closed();
    let second = says("did it").after_gate(&gate);
    app.provider.will("kid", [says("did it"), second]);
    let run = app.start("boss", "go").await;
    app.provider.wait_for_request("boss", 4).await;
    gate.open();
    let run = run.wait_for_end().await;
    assert_eq!(run.output(), "done");
    save(&app, run.id(), "tests/background.toml").await;
    for _ in 0..3 {
        let report = tested(&app, 0, &[]).await;
        assert_eq!(report["status"], "passed", "{report}");
    }
}
