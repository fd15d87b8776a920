//! Messages to runs that have not ended: read in order before the next request, across restarts, and never lost.

use futures_util::future::join_all;
use reqwest::{Method, RequestBuilder};
use serde_json::{Value, json};

use crate::support::app::{ApiResponse, TestApp, send};
use crate::support::events::{Event, assert_complete, count};
use crate::support::gate::Gate;
use crate::support::provider::answer::{calls, delegates, hangs, says};
use crate::support::run::Run;

async fn add(app: &TestApp, id: &str, text: &str) -> ApiResponse {
    let path = format!("/runs/{id}/messages");
    app.post(&path, &json!({"content": text})).await
}

async fn added(app: &TestApp, id: &str, text: &str) -> u64 {
    let got = add(app, id, text).await;
    assert_eq!(got.status, 202, "{}", got.text);
    assert_eq!(got.json()["run_id"], id);
    got.json()["number"].as_u64().expect("a number")
}

fn code(got: &ApiResponse) -> String {
    got.json()["code"].as_str().unwrap_or_default().to_owned()
}

fn added_events(events: &[Event]) -> Vec<(Value, Value)> {
    let added = events.iter().filter(|it| it.kind() == "message.added");
    added
        .map(|it| (it["number"].clone(), it["content"].clone()))
        .collect()
}

fn unread_warnings(run: &Run<'_>) -> Vec<String> {
    let warnings = run["warnings"].as_array().expect("warnings");
    let unread = warnings.iter().filter(|it| it["code"] == "message_unread");
    unread.map(|it| it["message"].to_string()).collect()
}

/// An agent that reads files; its first reply calls a tool once the gate opens.
async fn reader_behind_a_gate() -> (TestApp, Gate) {
    let app = TestApp::setup()
        .agent("solo", "workdir = \"work\"\ntools = [\"read_file\"]")
        .file("work/a", "alpha")
        .spawn()
        .await;
    let gate = Gate::closed();
    let call = calls([("read_file", json!({"path": "a"}))]).after_gate(&gate);
    app.provider.will("solo", [call, says("done")]);
    (app, gate)
}

#[tokio::test]
async fn a_message_comes_after_the_results_of_open_calls() {
    let (app, gate) = reader_behind_a_gate().await;
    let run = app.start("solo", "go").await;
    app.provider.wait_for_request("solo", 1).await;

    assert_eq!(added(&app, run.id(), "be brief").await, 1);
    assert_eq!(added(&app, run.id(), "and kind").await, 2);
    gate.open();

    let run = run.wait_for_end().await;
    assert_eq!(run.output(), "done");
    let requests = app.provider.requests();
    assert_eq!(requests[0].user_messages(), ["go"]);
    assert_eq!(requests[1].user_messages(), ["go", "be brief", "and kind"]);
    assert_eq!(requests[1].tool_results().len(), 1);
    let conversation = run.messages().await;
    let roles = conversation["data"].as_array().expect("data").iter();
    let roles: Vec<&str> = roles
        .map(|it| it["role"].as_str().expect("a role"))
        .collect();
    let expected = ["user", "assistant", "tool", "user", "user", "assistant"];
    assert_eq!(roles, expected);
    let events = run.events().await;
    assert_complete(&events);
    let expected = [(json!(1), json!("be brief")), (json!(2), json!("and kind"))];
    assert_eq!(added_events(&events), expected);
    let second_turn = events.iter().rfind(|it| it.kind() == "turn.started");
    assert_eq!(second_turn.expect("a turn")["results"], 1);
    assert!(unread_warnings(&run).is_empty());
}

#[tokio::test]
async fn a_reply_does_not_end_a_run_that_has_unread_messages() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    let gates = [Gate::closed(), Gate::closed()];
    let first = says("too early").after_gate(&gates[0]);
    let second = says("still too early").after_gate(&gates[1]);
    app.provider.will("solo", [first, second, says("done")]);
    let run = app.start("solo", "go").await;
    for (index, gate) in gates.iter().enumerate() {
        app.provider.wait_for_request("solo", index + 1).await;
        added(&app, run.id(), &format!("message {index}")).await;
        gate.open();
    }

    let run = run.wait_for_end().await;
    assert_eq!((run.output(), &run["turns"]), ("done", &json!(3)));
    let last = app.provider.requests().pop().expect("a request");
    assert_eq!(last.user_messages(), ["go", "message 0", "message 1"]);
    assert!(unread_warnings(&run).is_empty());
    let late = add(&app, run.id(), "too late").await;
    late.problem(409);
    assert_eq!(code(&late), "run_ended");
}

#[tokio::test]
async fn a_run_without_turns_ends_with_a_warning() {
    let app = TestApp::setup()
        .agent("solo", "[limits]\nmax_turns = 1")
        .spawn()
        .await;
    let gate = Gate::closed();
    app.provider.will("solo", [says("done").after_gate(&gate)]);
    let run = app.start("solo", "go").await;
    app.provider.wait_for_request("solo", 1).await;
    added(&app, run.id(), "one more thing").await;
    gate.open();

    let run = run.wait_for_end().await;
    assert_eq!(run.output(), "done");
    let expected = "a message was not read: the run ended before its next request";
    assert_eq!(unread_warnings(&run), [json!(expected).to_string()]);
    assert_eq!(app.provider.requests().len(), 1);
}

#[tokio::test]
async fn a_queued_run_has_its_messages_in_its_first_request() {
    let mut app = TestApp::setup()
        .config("[runs]\nmax_running = 1\n")
        .agent("slow", "")
        .agent("solo", "")
        .spawn()
        .await;
    app.provider.will("slow", [hangs(), hangs()]);
    app.provider.will("solo", [says("done")]);
    let slow = app.start("slow", "go").await.id().to_owned();
    app.provider.wait_for_request("slow", 1).await;
    let queued = app.start("solo", "go").await;
    assert_eq!(queued.status(), "queued");
    let id = queued.id().to_owned();
    assert_eq!(added(&app, &id, "first").await, 1);

    app.crash_and_restart().await;
    assert_eq!(added(&app, &id, "second").await, 2);
    app.find(&slow).await.cancel("enough").await;

    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "done");
    let requests = app.provider.requests_for("solo");
    assert_eq!(requests.len(), 1);
    assert_eq!(requests[0].user_messages(), ["go", "first", "second"]);
}

#[tokio::test]
async fn a_recovered_turn_sends_the_same_request() {
    let mut app = TestApp::setup().agent("solo", "").spawn().await;
    let gate = Gate::closed();
    let first = says("too early").after_gate(&gate);
    app.provider.will(
        "solo",
        [hangs(), first, hangs(), says("done"), says("the end")],
    );
    let id = app.start("solo", "go").await.id().to_owned();
    app.provider.wait_for_request("solo", 1).await;
    let mut events = app.events(&app.find(&id).await).await;
    events.until("turn.started").await;
    added(&app, &id, "before the kill").await;

    app.crash_and_restart().await;
    // The first turn is repeated without the message; the second one has it.
    app.provider.wait_for_request("solo", 2).await;
    gate.open();
    app.provider.wait_for_request("solo", 3).await;
    added(&app, &id, "during the second turn").await;
    app.crash_and_restart().await;

    // The reply to the second turn does not end the run either.
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "the end");
    assert_complete(&run.events().await);
    let requests = app.provider.requests();
    assert_eq!(requests.len(), 5);
    assert_eq!(requests[0].body, requests[1].body);
    assert_eq!(requests[2].body, requests[3].body);
    assert_eq!(requests[2].user_messages(), ["go", "before the kill"]);
    let all = ["go", "before the kill", "during the second turn"];
    assert_eq!(requests[4].user_messages(), all);
    assert!(unread_warnings(&run).is_empty());
}

#[tokio::test]
async fn a_child_gets_its_messages_by_its_id() {
    let mut app = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .spawn()
        .await;
    app.provider
        .will("planner", [delegates([("reader", "x")]), says("planned")]);
    app.provider
        .will("reader", [hangs(), says("too early"), says("read")]);
    let root = app.start("planner", "go").await.id().to_owned();
    app.provider.wait_for_request("reader", 1).await;
    let child = app.find(&root).await.wait_for_children(1).await.remove(0);
    let child = child.id().to_owned();
    added(&app, &child, "for the child").await;
    app.crash_and_restart().await;

    let run = app.find(&root).await.wait_for_end().await;
    assert_eq!(run.output(), "planned");
    let last = app
        .provider
        .requests_for("reader")
        .pop()
        .expect("a request");
    assert!(last.user_messages().contains(&"for the child".to_owned()));
    for request in app.provider.requests_for("planner") {
        assert_eq!(request.user_messages(), ["go"]);
    }
    assert_eq!(app.find(&child).await["turns"], 2);
}

fn keyed(app: &TestApp, id: &str, key: &str, text: &str) -> RequestBuilder {
    app.request(Method::POST, &format!("/runs/{id}/messages"))
        .header("idempotency-key", key)
        .json(&json!({"content": text}))
}

#[tokio::test]
async fn a_repeated_key_adds_one_message() {
    let mut app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider
        .will("solo", [hangs(), says("too early"), says("done")]);
    let id = app.start("solo", "go").await.id().to_owned();
    app.provider.wait_for_request("solo", 1).await;
    let many = (0..8).map(|_| send(keyed(&app, &id, "k", "once")));
    let many = join_all(many).await;
    assert!(
        many.iter()
            .all(|got| got.json()["number"] == 1 && got.status == 202)
    );
    let replayed = many
        .iter()
        .filter(|it| it.header("idempotency-replayed") == "true");
    assert_eq!(replayed.count(), 7);
    let other = send(keyed(&app, &id, "k", "something else")).await;
    other.problem(422);
    assert_eq!(code(&other), "idempotency_mismatch");

    app.crash_and_restart().await;
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(added_events(&run.events().await).len(), 1);
    let again = send(keyed(&app, &id, "k", "once")).await;
    assert_eq!((again.status, &again.json()["number"]), (202, &json!(1)));
}

#[tokio::test]
async fn a_message_has_a_content_and_their_number_is_limited() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.will("solo", [hangs()]);
    let run = app.start("solo", "go").await;
    app.provider.wait_for_request("solo", 1).await;
    let path = format!("/runs/{}/messages", run.id());
    for (body, pointer) in [
        (json!({}), "/content"),
        (json!({"content": " "}), "/content"),
        (json!({"content": []}), "/content"),
        (json!({"content": "x", "role": "user"}), "/role"),
        (
            json!({"content": [{"type": "image", "url": "https://example.com/a.png"}]}),
            "/content/0/url",
        ),
    ] {
        let got = app.post(&path, &body).await;
        got.problem(422);
        assert_eq!(got.json()["errors"][0]["pointer"], pointer, "{}", got.text);
    }
    let text = app
        .request(Method::POST, &path)
        .header("content-type", "text/plain");
    assert_eq!(send(text.body("plain")).await.status, 202);
    for number in 2..=32 {
        assert_eq!(added(&app, run.id(), "x").await, number);
    }
    let refused = add(&app, run.id(), "one too many").await;
    refused.problem(409);
    assert_eq!(code(&refused), "too_many_messages");

    let cancelled = run.cancel("enough").await;
    assert_eq!(unread_warnings(&cancelled).len(), 1);
    assert_eq!(code(&add(&app, run.id(), "late").await), "run_ended");
    let nobody = add(&app, "run_01900000-0000-7000-8000-000000000009", "x").await;
    nobody.problem(404);
}

/// What became of the messages to one run: each accepted one was read, or the run has a warning.
async fn check_accepted(app: &TestApp, id: &str, accepted: &[String]) {
    let run = app.find(id).await.wait_for_end().await;
    let conversation = run.messages().await.to_string();
    let unread = accepted
        .iter()
        .filter(|text| !conversation.contains(&json!(text).to_string()));
    let is_warned = !unread_warnings(&run).is_empty();
    assert_eq!(unread.count() > 0, is_warned, "{run:?} {accepted:?}");
    let events = run.events().await;
    assert_complete(&events);
    assert_eq!(count(&events, "message.added"), accepted.len());
    assert_eq!(code(&add(app, id, "late").await), "run_ended");
}

#[tokio::test]
async fn messages_that_race_with_the_end_are_read_or_warned_of() {
    let app = TestApp::setup()
        .agent("long", "[limits]\nmax_turns = 40")
        .agent("short", "[limits]\nmax_turns = 2")
        .spawn()
        .await;
    for agent in ["long", "short"] {
        app.provider
            .always(agent, |seen| says(format!("reply {}", seen.turn())));
    }
    let app = &app;
    let stories = (0..24).map(|number| async move {
        let agent = ["long", "short"][number % 2];
        let id = app.start(agent, "go").await.id().to_owned();
        let mut accepted = Vec::new();
        for message in 0..60 {
            let text = format!("message {number}.{message}.");
            let got = add(app, &id, &text).await;
            match got.status {
                202 => accepted.push(text),
                // Its turn takes long.
                409 if code(&got) == "too_many_messages" => {}
                409 => {
                    assert_eq!(code(&got), "run_ended");
                    break;
                }
                _ => panic!("{}", got.text),
            }
        }
        check_accepted(app, &id, &accepted).await;
    });
    join_all(stories).await;
}
