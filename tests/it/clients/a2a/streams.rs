//! Streams: of a new task, of one that is subscribed to, over decisions and restarts.

use reqwest::Method;
use serde_json::{Value, json};

use crate::clients::a2a::{
    data, error, events, get, kinds, message, post, request, state, task_of, to_task,
};
use crate::support::app::{ApiResponse, TestApp, send};
use crate::support::gate::Gate;
use crate::support::provider::answer::{calls, hangs, says};
use crate::support::within_timeout;
use crate::tools::approvals::{careful, writes, wrote};

/// The states that the events name, without repetitions.
fn states(events: &[Value]) -> Vec<&str> {
    let states = events.iter().filter_map(|event| {
        let status = [&event["task"]["status"], &event["statusUpdate"]["status"]];
        status
            .into_iter()
            .find_map(|status| status["state"].as_str())
    });
    let mut states: Vec<&str> = states.collect();
    states.dedup();
    states
}

/// The text of the artifact, put together as a client does.
fn text(events: &[Value]) -> String {
    let mut text = String::new();
    for update in events.iter().map(|event| &event["artifactUpdate"]) {
        let Some(parts) = update["artifact"]["parts"].as_array() else {
            continue;
        };
        if update["append"] != true {
            text.clear();
        }
        text.extend(parts.iter().filter_map(|part| part["text"].as_str()));
    }
    text
}

async fn stream(app: &TestApp, agent: &str, message: &Value) -> Vec<Value> {
    events(&post(app, &format!("{agent}/message:stream"), message).await)
}

/// Starts a task and does not wait for it.
async fn start(app: &TestApp, agent: &str) -> Value {
    let mut body = message("m1", "go");
    body["configuration"] = json!({ "returnImmediately": true });
    task_of(app, agent, &body).await
}

async fn subscribe(app: &TestApp, agent: &str, task: &Value) -> ApiResponse {
    let id = task["id"].as_str().expect("an id");
    let path = format!("{agent}/tasks/{id}:subscribe");
    send(request(app, Method::POST, &path)).await
}

#[tokio::test]
async fn a_stream_shows_the_task_the_text_and_the_end() {
    let app = TestApp::setup()
        .agent("reader", "workdir = \"work\"\ntools = [\"read_file\"]")
        .file("work/here.txt", "what it says")
        .spawn()
        .await;
    let reads = calls([("read_file", json!({ "path": "here.txt" }))]).with_text("Let me see.");
    app.provider
        .will("reader", [reads, says("It says what it says.")]);
    let got = post(&app, "reader/message:stream", &message("m1", "read it")).await;
    let events = events(&got);
    assert_eq!(kinds(&events)[0], "task");
    assert_eq!(events[0]["task"]["id"], got.header("x-run-id"));
    assert!(states(&events).ends_with(&["TASK_STATE_WORKING", "TASK_STATE_COMPLETED"]));
    assert_eq!(text(&events), "It says what it says.");
    let progress = events
        .iter()
        .map(|event| &event["statusUpdate"]["status"]["message"]);
    let progress: Vec<_> = progress
        .filter_map(|it| it["parts"][0]["text"].as_str())
        .collect();
    assert_eq!(progress, ["calls read_file"]);
    let last_chunk = events.iter().rev().nth(1).expect("an event");
    assert_eq!(
        last_chunk["artifactUpdate"]["lastChunk"], true,
        "{events:#?}"
    );
    // The same message again: the task has ended.
    let again = stream(&app, "reader", &message("m1", "read it")).await;
    assert_eq!(
        (kinds(&again), states(&again)),
        (vec!["task"], vec!["TASK_STATE_COMPLETED"])
    );
}

#[tokio::test]
async fn a_stream_ends_with_the_input_that_is_required() {
    let app = careful("").spawn().await;
    app.provider.will("careful", [writes("a"), says("done")]);
    let first = stream(&app, "careful", &message("m1", "write")).await;
    let last = &first.last().expect("an event")["statusUpdate"];
    assert_eq!(last["status"]["state"], "TASK_STATE_INPUT_REQUIRED");
    assert_eq!(
        last["status"]["message"]["parts"][1]["data"]["tool"],
        "write_file"
    );
    let task = &first[0]["task"];
    let second = stream(&app, "careful", &to_task(message("m2", "approve"), task)).await;
    assert_eq!(second[0]["task"]["id"], task["id"]);
    assert_eq!(states(&second).last(), Some(&"TASK_STATE_COMPLETED"));
    assert_eq!(text(&second), "done");
    assert!(wrote(&app, "a"));
}

#[tokio::test]
async fn subscribers_see_the_end_also_after_a_crash() {
    let mut app = TestApp::setup().agent("solo", "").spawn().await;
    let gate = Gate::closed();
    app.provider
        .will("solo", [hangs(), says("done").after_gate(&gate)]);
    let task = start(&app, "solo").await;
    app.provider.wait_for_requests(1).await;
    app.crash_and_restart().await;
    app.provider.wait_for_requests(2).await;
    let id = task["id"].as_str().expect("an id");
    let open = async || {
        let path = format!("solo/tasks/{id}:subscribe");
        let sent = request(&app, Method::POST, &path).send();
        within_timeout("a stream", sent).await.expect("a stream")
    };
    // A stream that has begun is subscribed.
    let streams = [open().await, open().await];
    gate.open();
    for stream in streams {
        let text_of_stream = within_timeout("the end", stream.text()).await;
        let events = data(&text_of_stream.expect("a body"));
        assert_eq!(events[0]["task"]["id"], task["id"]);
        assert_eq!(states(&events).last(), Some(&"TASK_STATE_COMPLETED"));
        assert_eq!(text(&events), "done");
    }
    let got = subscribe(&app, "solo", &task).await;
    assert_eq!(
        error(&got),
        (400, "UNSUPPORTED_OPERATION".into(), "run_ended".into())
    );
    let got = get(&app, &format!("solo/tasks/{id}:subscribe")).await;
    assert_eq!(error(&got).0, 400);
    assert_eq!(
        state(&get(&app, &format!("solo/tasks/{id}")).await.json()),
        "TASK_STATE_COMPLETED"
    );
}
