//! What a client requests of one daemon about a run that another one drives: done once, and answered as by the other one.

use axed::config::key_hash::KeyHash;
use reqwest::Method;
use serde_json::{Value, json};

use crate::cluster::{other, pair};
use crate::support::app::{ApiResponse, Setup, TestApp, send};
use crate::support::attachments::{PNG, base64, picture_part};
use crate::support::daemon::Daemon;
use crate::support::events::{Event, assert_complete, count};
use crate::support::eventually;
use crate::support::gate::Gate;
use crate::support::postgres;
use crate::support::provider::answer::{calls, hangs, says};
use crate::tools::approvals::{careful, decide, ended_well, sent, writes, wrote};
use crate::tools::ask_person::{answer, asks, curious, waiting};

/// An agent that reads a file, once the gate opens.
fn reader() -> Setup {
    TestApp::setup()
        .agent("solo", "workdir = \"work\"\ntools = [\"read_file\"]")
        .file("work/a", "alpha")
}

/// Starts a run, and waits for its first request.
async fn started(app: &TestApp, gate: &Gate) -> String {
    let call = calls([("read_file", json!({"path": "a"}))]);
    app.provider
        .will("solo", [call.after_gate(gate), says("done")]);
    let id = app.start("solo", "go").await.id().to_owned();
    app.provider.wait_for_request("solo", 1).await;
    id
}

async fn add(app: &TestApp, id: &str, content: Value) -> ApiResponse {
    let path = format!("/runs/{id}/messages");
    app.post(&path, &json!({"content": content})).await
}

async fn steer(app: &TestApp, id: &str, action: &str) -> ApiResponse {
    app.post(&format!("/runs/{id}/{action}"), &json!({})).await
}

fn code(got: &ApiResponse) -> String {
    got.json()["code"].as_str().unwrap_or_default().to_owned()
}

fn execute(url: &str, sql: &str) {
    postgres::with_client(url, async |client| client.batch_execute(sql).await);
}

/// The number of requests in the table.
fn request_count(url: &str) -> i64 {
    postgres::with_client(url, async |client| {
        let row = client.query_one("SELECT count(*) FROM requests", &[]);
        row.await?.try_get(0)
    })
}

async fn events_of(app: &TestApp, id: &str) -> Vec<Event> {
    let events = app.find(id).await.events().await;
    assert_complete(&events);
    events
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_daemon_cancels_a_run() {
    let Some((mut app, second, url)) = pair(reader()).await else {
        return;
    };
    let gate = Gate::closed();
    let id = started(&app, &gate).await;
    let first = std::mem::replace(&mut app.daemon, second);
    let path = format!("/runs/{id}/cancel");
    let reason = json!({"reason": "not needed"});
    let got = app.post(&path, &reason).await;
    assert!([200, 202].contains(&got.status), "{}", got.text);
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.status(), "cancelled");
    assert_eq!(run["cancel_reason"], "not needed");
    let events = events_of(&app, &id).await;
    assert_eq!(count(&events, "run.cancelling"), 1);
    assert_eq!(count(&events, "run.cancelled"), 1);
    // What has ended answers the same everywhere.
    let second = std::mem::replace(&mut app.daemon, first);
    for daemon in [None, Some(second)] {
        if let Some(daemon) = daemon {
            app.daemon = daemon;
        }
        assert_eq!(app.post(&path, &reason).await.status, 200);
        for late in [
            add(&app, &id, json!("late")).await,
            steer(&app, &id, "pause").await,
        ] {
            late.problem(409);
            assert_eq!(code(&late), "run_ended");
        }
        let nobody = "run_00000000-0000-7000-8000-000000000000";
        steer(&app, nobody, "cancel").await.problem(404);
        steer(&app, nobody, "pause").await.problem(404);
        add(&app, nobody, json!("x")).await.problem(404);
    }
    assert_eq!(request_count(&url), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_requests_to_one_run_do_not_keep_others_waiting() {
    let Some((mut app, second, url)) = pair(reader()).await else {
        return;
    };
    app.provider.always("solo", |_| hangs());
    let busy = app.start("solo", "go").await.id().to_owned();
    let other = app.start("solo", "go").await.id().to_owned();
    app.provider.wait_for_request("solo", 2).await;
    let _first = std::mem::replace(&mut app.daemon, second);
    let busy = app.database().id(&busy);
    execute(
        &url,
        &format!(
            "INSERT INTO requests (id, root, run, asker, kind, body, blobs) \
             SELECT gen_random_uuid(), {busy}, {busy}, gen_random_uuid(), 'hold', '', '{{}}' FROM generate_series(1, 5000)"
        ),
    );
    let got = steer(&app, &other, "pause").await;
    assert_eq!(got.status, 202, "{}", got.text);
    let open: i64 = postgres::with_client(&url, async |client| {
        let open = "SELECT count(*) FROM requests WHERE answer IS NULL";
        client.query_one(open, &[]).await?.try_get(0)
    });
    assert!(open > 300, "{open} of 5000");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_to_any_daemon_are_read_in_order() {
    let Some((mut app, second, _)) = pair(reader()).await else {
        return;
    };
    let gate = Gate::closed();
    let id = started(&app, &gate).await;
    let first = std::mem::replace(&mut app.daemon, second);
    let picture = json!([{"type": "text", "text": "look"}, picture_part(PNG)]);
    for (number, content) in [(1, json!("be brief")), (2, picture)] {
        let got = add(&app, &id, content).await;
        assert_eq!(got.status, 202, "{}", got.text);
        assert_eq!(got.json(), json!({"run_id": id, "number": number}));
    }
    app.daemon = first;
    let got = add(&app, &id, json!("and kind")).await;
    assert_eq!(got.json()["number"], 3);
    gate.open();
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "done");
    let seen = app.provider.wait_for_request("solo", 2).await;
    assert_eq!(
        seen.user_messages(),
        ["go", "be brief", "look", "and kind"],
        "{:?}",
        seen.messages()
    );
    let sent = json!(seen.messages()).to_string();
    assert!(sent.contains(&base64(PNG)), "{sent}");
    assert_eq!(count(&events_of(&app, &id).await, "message.added"), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_daemon_takes_a_decision_once() {
    let Some((mut app, mut daemon, _)) = pair(careful("")).await else {
        return;
    };
    let decisions = [
        (json!({"decision": "approve"}), "a", "a"),
        (json!({"decision": "deny", "reason": "no"}), "b", ""),
        (
            json!({"decision": "approve", "arguments": {"path": "d", "content": "new"}}),
            "c",
            "d",
        ),
    ];
    for (decision, path, written) in decisions {
        app.provider.will("careful", [writes(path), says("done")]);
        let (id, request) = sent(&app, "careful").await;
        daemon = std::mem::replace(&mut app.daemon, daemon);
        let decided = decide(&app, &request, decision.clone()).await;
        assert_eq!(decided.status, 202, "{}", decided.text);
        let run = app.find(&id).await;
        ended_well(&run, u64::from(!written.is_empty())).await;
        if !written.is_empty() {
            assert!(wrote(&app, written));
        }
        for _ in 0..2 {
            let again = decide(&app, &request, decision.clone()).await;
            again.problem(409);
            assert_eq!(code(&again), "nothing_waits");
            daemon = std::mem::replace(&mut app.daemon, daemon);
        }
        daemon = std::mem::replace(&mut app.daemon, daemon);
    }
    assert!(!wrote(&app, "b") && !wrote(&app, "c"));
}

/// The response once a daemon has taken the request: a takeover may last longer than a request waits, which then has done nothing.
async fn taken(send: impl AsyncFn() -> ApiResponse) -> ApiResponse {
    eventually("a daemon that takes the request", async || {
        let got = send().await;
        (got.status != 503).then_some(got)
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_daemon_answers_a_question_and_takes_its_run_over() {
    let Some((mut app, mut daemon, _)) = pair(curious("")).await else {
        return;
    };
    let question = || asks(json!({"question": "How many?", "schema": {"type": "integer"}}));
    for is_killed in [false, true] {
        app.provider.will("curious", [question(), says("done")]);
        let (id, question) = waiting(&app, "curious").await;
        daemon = std::mem::replace(&mut app.daemon, daemon);
        if is_killed {
            daemon.signal("KILL");
        }
        let wrong = taken(async || answer(&app, &question, json!({"answer": "three"})).await).await;
        assert_eq!(wrong.status, 422, "{}", wrong.text);
        let answered = taken(async || answer(&app, &question, json!({"answer": 3})).await).await;
        assert_eq!(answered.status, 202, "{}", answered.text);
        let run = app.find(&id).await.wait_for_end().await;
        assert_eq!(run.output(), "done");
        let events = events_of(&app, &id).await;
        assert_eq!(count(&events, "input.requested"), 1);
        assert_eq!(count(&events, "input.answered"), 1);
        let again = answer(&app, &question, json!({"answer": 4})).await;
        again.problem(409);
        assert_eq!(code(&again), "nothing_waits");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_daemons_that_decide_at_once_decide_once() {
    let Some((mut app, second, _)) = pair(careful("")).await else {
        return;
    };
    app.provider.will("careful", [writes("a"), says("done")]);
    let (id, request) = sent(&app, "careful").await;
    let text = |key: &str| request[key].as_str().expect(key).to_owned();
    let path = format!(
        "/runs/{}/approvals/{}",
        text("run_id"),
        text("tool_call_id")
    );
    let post = |url: &str| {
        let request = app.client.post(format!("{url}{path}"));
        crate::support::app::send(request.json(&json!({"decision": "approve"})))
    };
    let (one, two) = tokio::join!(post(&second.url), post(&app.daemon.url));
    let mut statuses = [one.status, two.status];
    statuses.sort_unstable();
    assert_eq!(statuses, [202, 409], "{} {}", one.text, two.text);
    let _first = std::mem::replace(&mut app.daemon, second);
    ended_well(&app.find(&id).await, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_daemon_pauses_and_resumes_a_run() {
    let Some((mut app, second, _)) = pair(reader()).await else {
        return;
    };
    let gate = Gate::closed();
    let id = started(&app, &gate).await;
    let _first = std::mem::replace(&mut app.daemon, second);
    let paused = steer(&app, &id, "pause").await;
    assert_eq!(paused.status, 202, "{}", paused.text);
    assert_eq!(steer(&app, &id, "pause").await.status, 200);
    gate.open();
    let path = format!("/runs/{id}");
    app.get_until(&path, |got| got.json()["waiting_for"] == "resume")
        .await;
    assert_eq!(app.provider.requests().len(), 1);
    let resumed = steer(&app, &id, "resume").await;
    assert_eq!(resumed.status, 202, "{}", resumed.text);
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "done");
    assert_eq!(count(&events_of(&app, &id).await, "run.paused"), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn results_of_client_tools_reach_a_run_of_another_daemon() {
    let Some((mut app, second, _)) = pair(TestApp::setup().agent("solo", "")).await else {
        return;
    };
    app.provider.will(
        "solo",
        [calls([("weather", json!({"city": "Bonn"}))]), says("Rain.")],
    );
    let chat = |messages: &[Value]| {
        json!({"model": "solo", "messages": messages, "tools": [{"type": "function", "function": {
            "name": "weather", "description": "The weather.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        }}]})
    };
    let mut messages = vec![json!({"role": "user", "content": "How is it?"})];
    let got = app.post("/v1/chat/completions", &chat(&messages)).await;
    assert_eq!(got.status, 200, "{}", got.text);
    let id = got.header("x-run-id").to_owned();
    let message = got.json()["choices"][0]["message"].clone();
    let call = message["tool_calls"][0]["id"].clone();
    messages.push(message);
    messages.push(json!({"role": "tool", "tool_call_id": call, "content": "rain"}));
    let _first = std::mem::replace(&mut app.daemon, second);
    let got = app.post("/v1/chat/completions", &chat(&messages)).await;
    assert_eq!(got.status, 200, "{}", got.text);
    assert_eq!(got.header("x-run-id"), id);
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "Rain.");
    let seen = app.provider.wait_for_request("solo", 2).await;
    assert_eq!(seen.tool_results(), ["rain"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_to_a_paused_daemon_go_to_its_successor() {
    let Some((mut app, second, url)) = pair(reader()).await else {
        return;
    };
    let gate = Gate::closed();
    let door = gate.clone();
    // It ends only after a second turn, before which it is paused.
    app.provider
        .always("solo", move |seen| match seen.tool_results().is_empty() {
            true => calls([("read_file", json!({"path": "a"}))]).after_gate(&door),
            false => says("done"),
        });
    let id = app.start("solo", "go").await.id().to_owned();
    app.provider.wait_for_request("solo", 1).await;
    app.daemon.signal("STOP");
    let first = std::mem::replace(&mut app.daemon, second);
    let (added, paused) = tokio::join!(
        taken(async || add(&app, &id, json!("be brief")).await),
        taken(async || steer(&app, &id, "pause").await)
    );
    assert_eq!(added.status, 202, "{}", added.text);
    assert_eq!(added.json()["number"], 1);
    assert_eq!(paused.status, 202, "{}", paused.text);
    first.signal("CONT");
    gate.open();
    first.wait_for_log("This node has joined again").await;
    assert_eq!(steer(&app, &id, "resume").await.status, 202);
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "done");
    let events = events_of(&app, &id).await;
    assert_eq!(count(&events, "message.added"), 1);
    assert_eq!(count(&events, "run.paused"), 1);
    let last = app.provider.requests().pop().expect("a request");
    assert_eq!(last.user_messages(), ["go", "be brief"]);
    assert_eq!(request_count(&url), 0);
}

/// Refuses all answers, until `ANSWERS_PASS`.
const ANSWERS_FAIL: &str = "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS \
     'BEGIN RAISE EXCEPTION ''no answer''; END'; \
     CREATE TRIGGER refuse BEFORE UPDATE ON requests FOR EACH ROW WHEN (NEW.answer IS NOT NULL) EXECUTE FUNCTION refuse()";
const ANSWERS_PASS: &str = "DROP TRIGGER refuse ON requests";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_whose_answer_was_lost_is_performed_once() {
    let Some((mut app, second, url)) = pair(careful("")).await else {
        return;
    };
    let gate = Gate::closed();
    app.provider
        .will("careful", [writes("a"), says("late").after_gate(&gate)]);
    let (id, request) = sent(&app, "careful").await;
    execute(&url, ANSWERS_FAIL);
    let first = std::mem::replace(&mut app.daemon, second);
    let lose_answers = async {
        // The first one has performed both, and cannot say so; then it dies.
        let path = format!("/runs/{id}");
        app.get_until(&path, |got| got.json()["pending_approvals"] == json!([]))
            .await;
        app.provider.wait_for_request("careful", 2).await;
        let messages = format!("/runs/{id}/events");
        app.get_until(&messages, |got| got.text.contains("message.added"))
            .await;
        app.provider.always("careful", |_| says("done"));
        first.signal("KILL");
        execute(&url, ANSWERS_PASS);
    };
    let edited = json!({"decision": "approve", "arguments": {"path": "b", "content": "new"}});
    let (added, decided, ()) = tokio::join!(
        add(&app, &id, json!("be brief")),
        decide(&app, &request, edited),
        lose_answers
    );
    assert_eq!(added.status, 202, "{}", added.text);
    assert_eq!(added.json()["number"], 1);
    assert_eq!(decided.status, 202, "{}", decided.text);
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "done");
    let events = events_of(&app, &id).await;
    assert_eq!(count(&events, "message.added"), 1);
    assert_eq!(count(&events, "approval.decided"), 1);
    assert!(wrote(&app, "b"));
    assert_eq!(request_count(&url), 0);
}

/// Another node owns all trees; it is alive, and does nothing. The beats of the others raise its own.
const SILENT_NODE: &str = "INSERT INTO nodes (incarnation, id, beat, version) \
     VALUES ('00000000-0000-7000-8000-000000000001', 'silent', 0, ''); \
     UPDATE trees SET node = '00000000-0000-7000-8000-000000000001', epoch = epoch + 1; \
     CREATE FUNCTION beat() RETURNS trigger LANGUAGE plpgsql AS \
     'BEGIN UPDATE nodes SET beat = beat + 1 WHERE id = ''silent''; RETURN NULL; END'; \
     CREATE TRIGGER beat AFTER UPDATE ON nodes WHEN (pg_trigger_depth() = 0) EXECUTE FUNCTION beat()";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_no_daemon_takes_is_refused_and_not_performed() {
    let Some((mut app, second, url)) = pair(reader()).await else {
        return;
    };
    let gate = Gate::closed();
    let id = started(&app, &gate).await;
    // The second one does not take over before.
    second.signal("STOP");
    app.daemon.kill().await;
    app.daemon = second;
    execute(&url, SILENT_NODE);
    app.daemon.signal("CONT");
    let (cancelled, added) = tokio::join!(
        steer(&app, &id, "cancel"),
        add(&app, &id, json!("be brief"))
    );
    for refused in [cancelled, added] {
        let detail = refused.problem(503);
        assert!(detail.contains("nothing has happened"), "{detail}");
        assert_eq!(refused.header("retry-after"), "1");
    }
    assert_eq!(request_count(&url), 0);
    // Once the node is gone, the run goes on without them.
    execute(&url, "DELETE FROM nodes WHERE id = 'silent'");
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "done");
    let events = events_of(&app, &id).await;
    assert_eq!(count(&events, "message.added"), 0);
    assert_eq!(count(&events, "run.cancelling"), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_replaces_that_of_another_daemon_although_its_own_dies() {
    let Some((mut app, second, url)) = pair(reader()).await else {
        return;
    };
    let gate = Gate::closed();
    app.provider
        .will("solo", [says("late").after_gate(&gate), says("instead")]);
    let in_session = |busy: &str| json!({"input": "go", "session": "talk", "on_busy": busy});
    let replaced = app.post("/agents/solo/runs", &in_session("queue")).await;
    let replaced = replaced.json()["id"].as_str().expect("an id").to_owned();
    app.provider.wait_for_request("solo", 1).await;
    app.daemon.signal("STOP");
    let mut first = std::mem::replace(&mut app.daemon, second);
    let got = app
        .post("/agents/solo/runs", &in_session("cancel_previous"))
        .await;
    assert_eq!(got.status, 202, "{}", got.text);
    // What was accepted is in the record with the cancel of the other run.
    assert_eq!(request_count(&url), 1);
    app.daemon.kill().await;
    first.signal("CONT");
    std::mem::swap(&mut app.daemon, &mut first);
    let run = app.find(&replaced).await.wait_for_end().await;
    assert_eq!(run.status(), "cancelled");
    let _again = Daemon::start(other(&app, &url, "second")).await;
    let id = got.json()["id"].as_str().expect("an id").to_owned();
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "instead");
    assert_complete(&run.events().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_daemon_accepts_a_ticket_for_events() {
    let sha256 = KeyHash::digest(b"ada");
    let key = format!("[auth.keys.ada]\nsha256 = \"{sha256}\"\nscopes = [\"run\", \"read\"]");
    let setup = TestApp::setup().agent("solo", "").config(&key);
    let Some((mut app, second, _)) = pair(setup).await else {
        return;
    };
    app.provider.always("solo", |_| says("done"));
    let started = app
        .request(Method::POST, "/agents/solo/runs?wait=180")
        .json(&json!({"input": "go"}));
    let run = send(started.bearer_auth("ada")).await.json();
    let id = run["id"].as_str().expect("an id");
    let path = format!("/runs/{id}/events/ticket");
    let issued = send(app.request(Method::POST, &path).bearer_auth("ada")).await;
    let issued = issued.json();
    let ticket = issued["ticket"].as_str().expect("a ticket");
    // Its daemon is gone.
    app.daemon.kill().await;
    app.daemon = second;
    let events = |ticket: &str| {
        let path = format!("/runs/{id}/events?ticket={ticket}");
        let request = app.request(Method::GET, &path);
        send(request.header("accept", "text/event-stream"))
    };
    let stream = events(ticket).await;
    assert_eq!(stream.status, 200, "{}", stream.text);
    assert!(stream.text.contains("run.completed"), "{}", stream.text);
    let refused = events(&ticket[..ticket.len() - 1]).await;
    assert_eq!(
        (refused.status, code(&refused)),
        (401, "invalid_ticket".to_owned())
    );
}
