//! Tool calls that need human approval: the request, the decision, and what pauses meanwhile.

use crate::support::app::{ApiResponse, Setup, TestApp, send};
use crate::support::daemon::axed_command;
use crate::support::events::{Event, Events, assert_complete, count, kinds};
use crate::support::gate::Gate;
use crate::support::provider::answer::{ScriptedAnswer, calls, delegates, says};
use crate::support::run::Run;
use crate::support::within_timeout;
use axed::config::key_hash::KeyHash;
use reqwest::Method;
use serde_json::{Value, json};

/// An agent whose writing waits for a person.
const CAREFUL: &str =
    "workdir = \"work\"\ntools = [\"write_file\", \"read_file\"]\napprove = [\"write_file\"]\n";

pub fn careful(more: &str) -> Setup {
    TestApp::setup()
        .agent("careful", &format!("{CAREFUL}{more}"))
        .agent("solo", "")
        .agent("planner", "sub_agents = [\"careful\", \"solo\"]")
        .file("work/here.txt", "here")
}

pub fn writes(path: &str) -> ScriptedAnswer {
    calls([("write_file", json!({"path": path, "content": "new"}))])
}

/// More than a form shows.
pub fn writes_too_much() -> ScriptedAnswer {
    let content = "x".repeat((1 << 20) + 1);
    calls([("write_file", json!({ "path": "a", "content": content }))])
}

/// The `approval.requested` events of the run's tree, once there are that many.
pub async fn requests(app: &TestApp, id: &str, many: usize) -> Vec<Event> {
    let run = app.find(id).await;
    let mut events = app.events(&run).await;
    let received = events
        .until_matches(|events| count(events, "approval.requested") == many)
        .await;
    received
        .into_iter()
        .filter(|event| event.kind() == "approval.requested")
        .collect()
}

/// Sets an agent to work and waits until it asks for approval once.
pub async fn sent(app: &TestApp, agent: &str) -> (String, Event) {
    let id = app.start(agent, "go").await.id().to_owned();
    let request = requests(app, &id, 1).await.remove(0);
    (id, request)
}

fn path_of(request: &Event) -> String {
    let of = |key: &str| request[key].as_str().expect(key).to_owned();
    format!("/runs/{}/approvals/{}", of("run_id"), of("tool_call_id"))
}

pub async fn decide(app: &TestApp, request: &Event, decision: Value) -> ApiResponse {
    app.post(&path_of(request), &decision).await
}

pub async fn approve(app: &TestApp, request: &Event) {
    let decided = decide(app, request, json!({"decision": "approve"})).await;
    assert_eq!(decided.status, 202, "{}", decided.text);
}

pub fn wrote(app: &TestApp, file: &str) -> bool {
    app.path(&format!("work/{file}")).exists()
}

pub fn find<'e>(events: &'e [Event], kind: &str) -> &'e Event {
    let mut found = events.iter().filter(|event| event.kind() == kind);
    let event = found
        .next()
        .unwrap_or_else(|| panic!("{kind} in {events:#?}"));
    assert!(found.next().is_none(), "more than one {kind}");
    event
}

/// The run completed, requested approval once, got one decision, and executed the call once.
pub async fn ended_well(run: &Run<'_>, calls: u64) {
    let run = run.wait_for_end().await;
    assert_eq!(run.output(), "done");
    assert_eq!(run.usage().2, calls);
    let events = run.events().await;
    assert_complete(&events);
    find(&events, "approval.requested");
    find(&events, "approval.decided");
    assert_eq!(count(&events, "tool.started"), calls as usize);
}

#[tokio::test]
async fn an_approved_call_is_executed() {
    let app = careful("").spawn().await;
    app.provider.will("careful", [writes("a"), says("done")]);
    let (id, request) = sent(&app, "careful").await;
    assert_eq!(request["tool"], "write_file");
    assert_eq!(request["arguments"], json!({"path": "a", "content": "new"}));
    assert_eq!(request["turn"], 1);
    let run = app.find(&id).await;
    assert_eq!(run.status(), "waiting");
    assert!(!wrote(&app, "a"));
    let listed = app.get("/runs?status=waiting").await.json();
    assert_eq!(listed["data"][0]["id"], id);

    let decided = decide(&app, &request, json!({"decision": "approve"})).await;
    assert_eq!(decided.status, 202, "{}", decided.text);
    assert_eq!(decided.json()["id"], id);
    ended_well(&run, 1).await;
    assert!(wrote(&app, "a"));
    let events = run.events().await;
    assert_eq!(
        kinds(&events)[3..8],
        [
            "turn.completed",
            "approval.requested",
            "approval.decided",
            "tool.started",
            "tool.completed"
        ]
    );
    assert_eq!(find(&events, "approval.decided")["decision"], "approved");
    // Nothing waits for it any more.
    let again = decide(&app, &request, json!({"decision": "deny"})).await;
    again.problem(409);
    assert_eq!(again.json()["code"], "nothing_waits");
}

#[tokio::test]
async fn a_decision_that_is_repeated_with_its_idempotency_key_gets_the_same_answer() {
    let app = careful("").spawn().await;
    app.provider.will("careful", [writes("a"), says("done")]);
    let (id, request) = sent(&app, "careful").await;
    let path = path_of(&request);
    let post = |key: &str, decision: &str| {
        let request = app.request(Method::POST, &path);
        let request = request.header("idempotency-key", key);
        send(request.json(&json!({"decision": decision})))
    };
    let is_replay = |got: &ApiResponse| got.header("idempotency-replayed") == "true";

    let (one, other) = tokio::join!(post("k", "approve"), post("k", "approve"));
    for got in [&one, &other] {
        assert_eq!(got.status, 202, "{}", got.text);
        assert_eq!(got.json()["id"], id);
    }
    assert_ne!(is_replay(&one), is_replay(&other));
    let run = app.find(&id).await;
    ended_well(&run, 1).await;

    let late = post("k", "approve").await;
    assert_eq!((late.status, is_replay(&late)), (202, true));
    assert_eq!(late.json()["status"], "completed");
    let changed = post("k", "deny").await;
    changed.problem(422);
    assert_eq!(changed.json()["code"], "idempotency_mismatch");
    let another = post("another", "approve").await;
    another.problem(409);
    assert_eq!(another.json()["code"], "nothing_waits");
}

#[tokio::test]
async fn a_denial_and_its_reason_reach_the_model() {
    let app = careful("").spawn().await;
    app.provider.will("careful", [writes("a"), says("done")]);
    let (id, request) = sent(&app, "careful").await;
    let no = json!({"decision": "deny", "reason": "not on a Friday"});
    assert_eq!(decide(&app, &request, no).await.status, 202);
    ended_well(&app.find(&id).await, 0).await;
    let seen = app.provider.wait_for_request("careful", 2).await;
    assert_eq!(
        seen.tool_results(),
        ["The call of write_file was denied: not on a Friday"]
    );
    assert_eq!(seen.tool_result_errors(), [true]);
    assert!(!wrote(&app, "a"));
    let events = app.find(&id).await.events().await;
    let decided = find(&events, "approval.decided");
    assert_eq!(
        (&decided["decision"], &decided["reason"]),
        (&json!("denied"), &json!("not on a Friday"))
    );
}

#[tokio::test]
async fn an_undecided_call_times_out_as_denied() {
    let app = careful("approve_timeout = 1").spawn().await;
    app.provider.will("careful", [writes("a"), says("done")]);
    let (id, request) = sent(&app, "careful").await;
    assert!(request["deadline"].is_string(), "{request:?}");
    ended_well(&app.find(&id).await, 0).await;
    let seen = app.provider.wait_for_request("careful", 2).await;
    assert_eq!(
        seen.tool_results(),
        ["The call of write_file was not approved: no decision within 1s"]
    );
    let events = app.find(&id).await.events().await;
    assert_eq!(find(&events, "approval.decided")["decision"], "timed_out");
    decide(&app, &request, json!({"decision": "approve"}))
        .await
        .problem(409);
}

#[tokio::test]
async fn each_of_several_calls_is_decided_separately() {
    let app = careful("").spawn().await;
    let file = |path: &str| ("write_file", json!({"path": path, "content": "new"}));
    let reads = ("read_file", json!({"path": "here.txt"}));
    let asks = calls([file("a"), reads, file("b"), ("write_file", json!({}))]);
    app.provider.will("careful", [asks, says("done")]);
    let id = app.start("careful", "go").await.id().to_owned();
    // The fourth does not match its schema: no approval is requested.
    let requests = requests(&app, &id, 2).await;
    let path = |request: &Event| request["arguments"]["path"].clone();
    let of = |name: &str| requests.iter().find(|it| path(it) == name).expect(name);
    assert_eq!(
        decide(&app, of("b"), json!({"decision": "deny"}))
            .await
            .status,
        202
    );
    let run = app.find(&id).await;
    let mut events = app.events(&run).await;
    events
        .until_matches(|events| count(events, "tool.completed") == 3)
        .await;
    let path = format!("/runs/{id}");
    app.get_until(&path, |got| got.json()["status"] == "waiting")
        .await;
    approve(&app, of("a")).await;
    assert_eq!(run.wait_for_end().await.output(), "done");
    let results = app
        .provider
        .wait_for_request("careful", 2)
        .await
        .tool_results();
    assert!(results[1].contains("here"), "{results:?}");
    assert_eq!(results[2], "The call of write_file was denied");
    assert!(results[3].contains("do not fit"), "{results:?}");
    assert!(wrote(&app, "a") && !wrote(&app, "b"));
}

#[tokio::test]
async fn a_parent_waits_while_all_its_children_wait() {
    let app = careful("").spawn().await;
    let gate = Gate::closed();
    app.provider.will(
        "planner",
        [
            delegates([("careful", "write"), ("solo", "think")]),
            says("done"),
        ],
    );
    app.provider.will("careful", [writes("a"), says("written")]);
    app.provider
        .will("solo", [says("thought").after_gate(&gate)]);
    let (id, request) = sent(&app, "planner").await;
    let child = request["run_id"].as_str().expect("an id");
    assert_eq!(app.find(child).await.status(), "waiting");
    assert_eq!(app.find(&id).await.status(), "running", "the other works");
    gate.open();
    let path = format!("/runs/{id}");
    app.get_until(&path, |got| got.json()["status"] == "waiting")
        .await;

    let last = Gate::closed();
    app.provider
        .will("careful", [says("written").after_gate(&last)]);
    approve(&app, &request).await;
    let run = app.find(&id).await;
    let mut events = app.events(&run).await;
    events
        .until_matches(|events| count(events, "tool.started") == 3)
        .await;
    app.get_until(&path, |got| got.json()["status"] != "waiting")
        .await;
    last.open();
    assert_eq!(run.wait_for_end().await.output(), "done");
}

#[tokio::test]
async fn time_is_paused_for_a_waiting_run_and_its_parent() {
    let app = careful("").agent("other", "timeout = 20").spawn().await;
    app.provider
        .will("planner", [delegates([("careful", "write")]), says("done")]);
    app.provider.will("careful", [writes("a"), says("written")]);
    let body = json!({"input": "go", "timeout": 20});
    let id = app
        .start_with("planner", body.clone())
        .await
        .id()
        .to_owned();
    let request = requests(&app, &id, 1).await.remove(0);
    // As long as another run needs to run out of the same time.
    app.provider
        .will("other", [says("late").after_gate(&Gate::closed())]);
    let overdue = app.run_with("other", body).await;
    assert_eq!(overdue.failure().0, "timeout");
    approve(&app, &request).await;
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "done");
}

#[tokio::test]
async fn a_child_queued_behind_a_waiting_one_does_not_keep_its_parent_running() {
    let app = careful("")
        .agent(
            "planner",
            "sub_agents = [\"careful\"]\n[sub_agents_config]\nmax_concurrent = 1",
        )
        .spawn()
        .await;
    let both = [("careful", "one"), ("careful", "two")];
    app.provider
        .will("planner", [delegates(both), says("done")]);
    let files = [writes("a"), says("one"), writes("b"), says("two")];
    app.provider.will("careful", files);
    let (id, first) = sent(&app, "planner").await;
    let path = format!("/runs/{id}");
    app.get_until(&path, |got| got.json()["status"] == "waiting")
        .await;
    approve(&app, &first).await;
    let second = requests(&app, &id, 2).await.remove(1);
    app.get_until(&path, |got| got.json()["status"] == "waiting")
        .await;
    approve(&app, &second).await;
    assert_eq!(app.find(&id).await.wait_for_end().await.output(), "done");
    assert!(wrote(&app, "a") && wrote(&app, "b"));
}

#[tokio::test]
async fn the_command_line_decides_and_waiting_runs_do_not_count_as_running() {
    let app = careful("").spawn().await;
    app.provider.will(
        "careful",
        [writes("a"), says("done"), writes("b"), says("done")],
    );
    for (decision, file) in [("approve", "a"), ("deny", "b")] {
        let (id, request) = sent(&app, "careful").await;
        app.get_until("/metrics", |got| {
            got.text.contains("\naxed_runs_running 0\n")
        })
        .await;
        let call = request["tool_call_id"].as_str().expect("an id");
        let arguments = ["runs", decision, &id, call, "--reason", "so"];
        let mut command = axed_command(&app.path(""), &arguments);
        command.args(["--server", &app.daemon.url]);
        let done = within_timeout("the command", command.output())
            .await
            .expect("an end");
        assert!(done.status.success(), "{done:?}");
        assert!(String::from_utf8_lossy(&done.stdout).starts_with(&id));
        assert_eq!(app.find(&id).await.wait_for_end().await.output(), "done");
        assert_eq!(wrote(&app, file), decision == "approve");
        let again = axed_command(&app.path(""), &arguments)
            .args(["--server", &app.daemon.url])
            .output();
        let refused = within_timeout("the command", again).await.expect("an end");
        assert!(!refused.status.success(), "{refused:?}");
    }
}

#[tokio::test]
async fn a_waiting_run_returns_its_permit_and_queues_again() {
    let app = careful("").config("[runs]\nmax_running = 1").spawn().await;
    app.provider.will("careful", [writes("a"), says("done")]);
    let (id, request) = sent(&app, "careful").await;
    app.provider.will("solo", [says("first")]);
    assert_eq!(app.run("solo", "go").await.output(), "first");

    let gate = Gate::closed();
    app.provider
        .will("solo", [says("second").after_gate(&gate)]);
    let second = app.start("solo", "go").await;
    app.provider.wait_for_request("solo", 2).await;
    approve(&app, &request).await;
    let run = app.find(&id).await;
    assert_eq!(run.status(), "waiting", "another has the slot");
    assert!(!wrote(&app, "a"));
    gate.open();
    assert_eq!(second.wait_for_end().await.output(), "second");
    ended_well(&run, 1).await;
}

#[tokio::test]
async fn a_waiting_run_can_be_cancelled() {
    let app = careful("").config("[runs]\nmax_running = 1").spawn().await;
    app.provider.will("careful", [writes("a")]);
    app.provider
        .will("planner", [delegates([("careful", "write")])]);
    for agent in ["careful", "planner"] {
        app.provider.will("careful", [writes("a")]);
        let (id, request) = sent(&app, agent).await;
        let run = app.find(&id).await.cancel("changed my mind").await;
        assert_eq!(run.status(), "cancelled");
        decide(&app, &request, json!({"decision": "approve"}))
            .await
            .problem(409);
    }
    assert!(!wrote(&app, "a"));
    // A child that is cancelled alone is an error result; its parent needs its permit to continue.
    app.provider
        .will("planner", [delegates([("careful", "write")]), says("done")]);
    let (id, request) = sent(&app, "planner").await;
    let child = request["run_id"].as_str().expect("an id");
    assert_eq!(
        app.find(child).await.cancel("no").await.status(),
        "cancelled"
    );
    assert_eq!(app.find(&id).await.wait_for_end().await.output(), "done");
}

#[tokio::test]
async fn waiting_does_not_count_in_a_time_quota() {
    let quota = "[subagent]\nenabled = true\nmax_total_time = 20";
    let app = careful(quota).agent("other", "timeout = 20").spawn().await;
    let task = |task: &str| {
        let task = json!({"label": "look", "task_prompt": task});
        calls([("subagent", task)])
    };
    let answers = [
        task("write"),
        writes("a"),
        says("written"),
        task("look"),
        says("seen"),
        says("done"),
    ];
    app.provider.will("careful", answers);
    let (id, request) = sent(&app, "careful").await;
    // As long as the quota is.
    app.provider
        .will("other", [says("late").after_gate(&Gate::closed())]);
    assert_eq!(app.run("other", "go").await.failure().0, "timeout");
    approve(&app, &request).await;
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "done");
    assert_eq!(run.children().await.len(), 2);
}

#[tokio::test]
async fn decisions_without_a_pending_call_are_refused() {
    let app = careful("").spawn().await;
    app.provider.will("careful", [writes("a"), says("done")]);
    let (id, request) = sent(&app, "careful").await;
    for wrong in [
        json!({}),
        json!({"decision": "perhaps"}),
        json!({"decision": "approve", "reason": 1}),
        json!({"decision": "deny", "reason": "x".repeat(1001)}),
        json!({"decision": "approve", "also": 1}),
    ] {
        decide(&app, &request, wrong).await.problem(422);
    }
    let yes = json!({"decision": "approve"});
    let other = format!("/runs/{id}/approvals/nobody");
    app.post(&other, &yes).await.problem(409);
    let nowhere = "/runs/run_00000000-0000-7000-8000-000000000000/approvals/x";
    app.post(nowhere, &yes).await.problem(404);
    // Of two at once one decides.
    let (one, two) = tokio::join!(
        decide(&app, &request, yes.clone()),
        decide(&app, &request, yes.clone())
    );
    let mut both = [one.status, two.status];
    both.sort_unstable();
    assert_eq!(both, [202, 409]);
    ended_well(&app.find(&id).await, 1).await;
}

#[tokio::test]
async fn a_decision_names_its_key_and_other_keys_see_nothing() {
    let key = |name: &str| {
        let sha256 = KeyHash::digest(format!("key-of-{name}").as_bytes());
        format!("[auth.keys.{name}]\nsha256 = \"{sha256}\"\nscopes = [\"run\", \"read\"]\n")
    };
    let app = careful("")
        .config(&(key("ada") + &key("bob")))
        .spawn()
        .await;
    app.provider.will("careful", [writes("a"), says("done")]);
    let by = |name: &str, method: Method, path: &str| {
        app.request(method, path)
            .bearer_auth(format!("key-of-{name}"))
    };
    let start = by("ada", Method::POST, "/agents/careful/runs").json(&json!({"input": "go"}));
    let id = send(start).await.json()["id"]
        .as_str()
        .expect("an id")
        .to_owned();
    let listen = by("ada", Method::GET, &format!("/runs/{id}/events"));
    let stream = listen.header("accept", "text/event-stream").send().await;
    let mut stream = Events::new(stream.expect("a stream"));
    let request = stream.until("approval.requested").await;
    let request = request.last().expect("the request");
    let yes = json!({"decision": "approve"});
    let path = path_of(request);
    send(by("bob", Method::POST, &path).json(&yes))
        .await
        .problem(404);
    let decided = send(by("ada", Method::POST, &path).json(&yes)).await;
    assert_eq!(decided.status, 202, "{}", decided.text);
    let events = stream.until("run.completed").await;
    assert_eq!(find(&events, "approval.decided")["by"], "ada");
}
