//! Calls that a person approves with other arguments than the model's.

use std::fs;

use serde_json::{Value, json};

use crate::support::app::TestApp;
use crate::support::events::{Event, assert_complete};
use crate::support::gate::Gate;
use crate::support::provider::answer::{hangs, says};
use crate::tools::approvals::{careful, decide, find, requests, sent, writes, wrote};

fn with_arguments(arguments: &Value) -> Value {
    json!({"decision": "approve", "arguments": arguments})
}

/// The call was executed with `arguments`, and the model knows it.
async fn was_changed(app: &TestApp, id: &str, arguments: &Value) -> Vec<Event> {
    let run = app.find(id).await.wait_for_end().await;
    assert_eq!(run.output(), "done");
    let text = arguments["content"].as_str().expect("a text");
    assert_eq!(
        fs::read_to_string(app.path("work/b")).expect("a file"),
        text
    );
    assert!(!wrote(app, "a"));
    let request = app
        .provider
        .requests_for("careful")
        .pop()
        .expect("a request");
    let results = request.tool_results();
    let note = format!("Note: a person changed the arguments of this call to {arguments}.\n");
    let result = results[0].strip_prefix(&note).expect("the note");
    assert_eq!(result, format!("wrote {} bytes to b", text.len()));
    let conversation = run.messages().await;
    let call = &conversation["data"][1]["tool_calls"][0];
    assert_eq!(call["arguments"], json!({"path": "a", "content": "new"}));
    let events = run.events().await;
    assert_complete(&events);
    events
}

#[tokio::test]
async fn a_call_is_executed_with_the_arguments_of_a_person() {
    let app = careful("").spawn().await;
    app.provider.will("careful", [writes("a"), says("done")]);
    let (id, request) = sent(&app, "careful").await;
    let arguments = json!({"content": "better", "path": "b"});
    let decided = decide(&app, &request, with_arguments(&arguments)).await;
    assert_eq!(decided.status, 202, "{}", decided.text);
    let events = was_changed(&app, &id, &arguments).await;
    assert_eq!(find(&events, "approval.decided")["arguments"], arguments);
    assert_eq!(find(&events, "tool.started")["arguments"], arguments);
    assert_eq!(
        find(&events, "approval.requested")["arguments"]["path"],
        "a"
    );
}

#[tokio::test]
async fn arguments_that_do_not_fit_leave_the_call_waiting() {
    let app = careful("").spawn().await;
    app.provider.will("careful", [writes("a"), says("done")]);
    let (id, request) = sent(&app, "careful").await;
    for (body, why) in [
        (with_arguments(&json!({"path": "b"})), "content"),
        (
            with_arguments(&json!({"path": "b", "content": "x", "mode": 7})),
            "mode",
        ),
        // What a model may write, a person has to correct.
        (
            with_arguments(&json!({"path": {"a": 1}, "content": "x"})),
            "path",
        ),
        (
            with_arguments(&json!({"path": "b", "content": 5})),
            "content",
        ),
        (with_arguments(&json!(["b"])), "/arguments"),
        (json!({"decision": "deny", "arguments": {}}), "approved"),
    ] {
        let refused = decide(&app, &request, body).await;
        let detail = refused.problem(422);
        assert!(detail.contains(why), "{detail}");
        assert_eq!(refused.json()["errors"][0]["pointer"], "/arguments");
        let run = app.find(&id).await;
        assert_eq!(run["pending_approvals"].as_array().map(Vec::len), Some(1));
    }
    // Long ones are cut in the event and nowhere else.
    let arguments = json!({"content": "x".repeat(20_000), "path": "b"});
    let decided = decide(&app, &request, with_arguments(&arguments)).await;
    assert_eq!(decided.status, 202, "{}", decided.text);
    let events = was_changed(&app, &id, &arguments).await;
    let shown = find(&events, "approval.decided");
    assert_eq!(shown["truncated"], true);
    assert!(
        shown["arguments"]
            .as_str()
            .is_some_and(|it| it.len() < 17_000)
    );
    let late = decide(&app, &request, with_arguments(&arguments)).await;
    late.problem(409);
}

#[tokio::test]
async fn a_decision_on_other_arguments_than_the_calls_decides_nothing() {
    let mut app = careful("").spawn().await;
    app.provider.will("careful", [writes("a"), says("done")]);
    let (id, request) = sent(&app, "careful").await;
    let hash = request["arguments_hash"].clone();
    assert!(
        hash.as_str()
            .is_some_and(|hash| hash.starts_with("sha256:"))
    );
    let pending = app.get("/approvals").await.json();
    assert_eq!(pending["data"][0]["arguments_hash"], hash);
    let decision = |hash: &Value| json!({"decision": "approve", "arguments_hash": hash});
    for is_restarted in [false, true] {
        if is_restarted {
            app.restart().await;
        }
        for wrong in ["sha256:00", ""] {
            let refused = decide(&app, &request, decision(&json!(wrong))).await;
            assert!(refused.problem(409).contains("other arguments"));
            assert_eq!(refused.json()["code"], "other_arguments");
            let run = app.find(&id).await;
            assert_eq!(run["pending_approvals"].as_array().map(Vec::len), Some(1));
        }
    }
    let decided = decide(&app, &request, decision(&hash)).await;
    assert_eq!(decided.status, 202, "{}", decided.text);
    assert_eq!(app.find(&id).await.wait_for_end().await.output(), "done");
    assert!(wrote(&app, "a"));
}

#[tokio::test]
async fn changed_arguments_survive_a_kill() {
    for is_decided_before in [false, true] {
        let mut app = careful("").config("[runs]\nmax_running = 1").spawn().await;
        app.provider.will("careful", [writes("a"), says("done")]);
        app.provider
            .will("solo", [hangs(), says("x").after_gate(&Gate::closed())]);
        let id = app.start("careful", "go").await.id().to_owned();
        let request = requests(&app, &id, 1).await.remove(0);
        // It has the only slot, so that a decided call cannot be executed.
        let other = app.start("solo", "go").await.id().to_owned();
        app.provider.wait_for_request("solo", 1).await;
        let arguments = json!({"content": "better", "path": "b"});
        if is_decided_before {
            let decided = decide(&app, &request, with_arguments(&arguments)).await;
            assert_eq!(decided.status, 202, "{}", decided.text);
        }
        app.crash_and_restart().await;
        if !is_decided_before {
            let decided = decide(&app, &request, with_arguments(&arguments)).await;
            assert_eq!(decided.status, 202, "{}", decided.text);
        }
        app.find(&other).await.cancel("enough").await;
        was_changed(&app, &id, &arguments).await;
    }
}
