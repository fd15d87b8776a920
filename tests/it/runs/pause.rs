//! Runs that a client pauses and resumes: nothing below them begins meanwhile, over restarts and with a failing store.

use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::support::app::{ApiResponse, Setup, TestApp};
use crate::support::events::{Event, assert_complete, count, kinds};
use crate::support::gate::Gate;
use crate::support::provider::answer::{ScriptedAnswer, calls, delegates, hangs, says};
use crate::support::run::Run;
use crate::tools::approvals::{approve, careful, requests, writes, wrote};

async fn steer(app: &TestApp, id: &str, action: &str) -> ApiResponse {
    app.post(&format!("/runs/{id}/{action}"), &json!({})).await
}

async fn pause(app: &TestApp, id: &str) {
    let got = steer(app, id, "pause").await;
    assert_eq!(got.status, 202, "{}", got.text);
    assert_eq!(got.json()["id"], id);
}

async fn resume(app: &TestApp, id: &str) {
    let got = steer(app, id, "resume").await;
    assert_eq!(got.status, 202, "{}", got.text);
}

/// Waits until the run waits for this.
async fn waits_for(app: &TestApp, id: &str, reason: &str) -> Value {
    let path = format!("/runs/{id}");
    let got = app
        .get_until(&path, |got| got.json()["waiting_for"] == reason)
        .await;
    assert_eq!(got.json()["status"], "waiting", "{}", got.text);
    got.json()
}

fn reads() -> ScriptedAnswer {
    calls([("read_file", json!({"path": "a"}))])
}

fn reader() -> Setup {
    TestApp::setup()
        .agent("solo", "workdir = \"work\"\ntools = [\"read_file\"]")
        .agent("other", "")
        .agent("planner", "sub_agents = [\"solo\"]")
        .file("work/a", "alpha")
}

/// The run completed, and each of its turns sent one request.
async fn completed(app: &TestApp, id: &str, output: &str) -> Vec<Event> {
    let run = app.find(id).await.wait_for_end().await;
    assert_eq!(run.output(), output);
    assert_eq!(run["waiting_for"], Value::Null);
    let events = run.events().await;
    assert_complete(&events);
    events
}

#[tokio::test]
async fn a_paused_run_stops_before_its_next_step() {
    let app = reader().spawn().await;
    let gate = Gate::closed();
    app.provider
        .will("solo", [reads().after_gate(&gate), says("done")]);
    let run = app.start("solo", "go").await;
    app.provider.wait_for_request("solo", 1).await;

    pause(&app, run.id()).await;
    assert_eq!(steer(&app, run.id(), "pause").await.status, 200);
    gate.open();
    waits_for(&app, run.id(), "resume").await;
    let events = run.events().await;
    assert_eq!(count(&events, "turn.completed"), 1);
    assert_eq!(count(&events, "tool.started"), 0);

    resume(&app, run.id()).await;
    let events = completed(&app, run.id(), "done").await;
    assert_eq!(app.provider.requests().len(), 2);
    let steered = kinds(&events).into_iter().filter(|it| {
        let is_steered = ["run.paused", "run.resumed"].contains(it);
        is_steered || it.starts_with("tool.")
    });
    let expected = [
        "run.paused",
        "run.resumed",
        "tool.started",
        "tool.completed",
    ];
    assert_eq!(steered.collect::<Vec<_>>(), expected);
    let resumed = events.iter().find(|it| it.kind() == "run.resumed");
    let resumed = resumed.expect("an event");
    assert_eq!(
        (&resumed["cause"], &resumed["attempt"]),
        (&json!("request"), &json!(1))
    );
    for action in ["pause", "resume"] {
        let late = steer(&app, run.id(), action).await;
        late.problem(409);
        assert_eq!(late.json()["code"], "run_ended");
    }
}

#[tokio::test]
async fn a_paused_run_takes_no_slot_and_comes_before_new_runs() {
    let app = reader().config("[runs]\nmax_running = 1\n").spawn().await;
    let gates = [Gate::closed(), Gate::closed()];
    app.provider
        .will("solo", [reads().after_gate(&gates[0]), says("done")]);
    app.provider
        .will("planner", [says("blocked").after_gate(&gates[1])]);
    app.provider.always("other", |_| says("new"));
    let run = app.start("solo", "go").await;
    app.provider.wait_for_request("solo", 1).await;
    pause(&app, run.id()).await;
    let second = app.start("planner", "go").await;
    assert_eq!(second.status(), "queued");
    gates[0].open();
    waits_for(&app, run.id(), "resume").await;
    app.provider.wait_for_request("planner", 1).await;

    let new = app.start("other", "go").await;
    resume(&app, run.id()).await;
    assert_eq!(run.reload().await.status(), "waiting");
    // The new one and the resumed one.
    let are_queued = |got: &ApiResponse| got.text.contains("axed_runs_queued 2\n");
    app.get_until("/metrics", are_queued).await;
    gates[1].open();
    completed(&app, run.id(), "done").await;
    assert_eq!(new.wait_for_end().await.output(), "new");
    let order: Vec<String> = app
        .provider
        .requests()
        .iter()
        .map(|it| it.model().to_owned())
        .collect();
    assert_eq!(order, ["solo", "planner", "solo", "other"]);
}

#[tokio::test]
async fn a_pause_survives_restarts_and_stops_the_clock() {
    let mut app = reader().spawn().await;
    let gate = Gate::closed();
    app.provider.will(
        "solo",
        [reads().after_gate(&gate), says("too early"), says("done")],
    );
    app.provider.will("other", [hangs()]);
    let body = json!({"input": "go", "timeout": 20});
    let run = app.start_with("solo", body).await;
    app.provider.wait_for_request("solo", 1).await;
    pause(&app, run.id()).await;
    gate.open();
    waits_for(&app, run.id(), "resume").await;
    let id = run.id().to_owned();
    // As much time passes as the run has in all.
    let other = app.run_with("other", json!({"timeout": 20})).await;
    assert_eq!(other.failure().0, "timeout");

    app.crash_and_restart().await;
    assert_eq!(steer(&app, &id, "pause").await.status, 200);
    let path = format!("/runs/{id}/messages");
    let added = app.post(&path, &json!({"content": "be brief"})).await;
    assert_eq!(added.status, 202, "{}", added.text);
    app.restart().await;
    waits_for(&app, &id, "resume").await;
    assert_eq!(app.provider.requests_for("solo").len(), 1);

    resume(&app, &id).await;
    // The message came before the second request, so the reply to that one ends the run.
    let events = completed(&app, &id, "too early").await;
    assert_eq!(count(&events, "tool.started"), 1);
    let last = app.provider.requests_for("solo").pop().expect("a request");
    assert_eq!(last.user_messages(), ["go", "be brief"]);
}

#[tokio::test]
async fn a_run_that_is_killed_before_it_stops_stays_paused() {
    let mut app = reader().spawn().await;
    app.provider.will("solo", [hangs()]);
    let id = app.start("solo", "go").await.id().to_owned();
    app.provider.wait_for_request("solo", 1).await;
    pause(&app, &id).await;
    app.crash_and_restart().await;
    waits_for(&app, &id, "resume").await;
    app.crash_and_restart().await;
    app.provider.will("solo", [says("done")]);
    resume(&app, &id).await;
    completed(&app, &id, "done").await;
    assert_eq!(app.provider.requests().len(), 2);
}

/// A planner with two children at work, which are behind the gate.
async fn paused_tree() -> (TestApp, String, Gate) {
    let app = reader().spawn().await;
    let gate = Gate::closed();
    let planned = delegates([("solo", "x"), ("solo", "y")]);
    app.provider.will("planner", [planned, says("planned")]);
    let door = gate.clone();
    app.provider.always("solo", move |seen| match seen.turn() {
        1 => reads().after_gate(&door),
        _ => says("read"),
    });
    let id = app.start("planner", "go").await.id().to_owned();
    app.provider.wait_for_concurrency("solo", 2).await;
    pause(&app, &id).await;
    (app, id, gate)
}

#[tokio::test]
async fn all_runs_below_a_paused_one_stop() {
    let (mut app, id, gate) = paused_tree().await;
    assert_eq!(app.find(&id).await.status(), "running");
    gate.open();
    waits_for(&app, &id, "resume").await;
    for child in app.find(&id).await.children().await {
        waits_for(&app, child.id(), "resume").await;
    }
    app.crash_and_restart().await;
    waits_for(&app, &id, "resume").await;
    assert_eq!(app.provider.requests_for("solo").len(), 2);
    resume(&app, &id).await;

    let events = completed(&app, &id, "planned").await;
    assert_eq!(count(&events, "agent.called"), 2);
    // Two calls of the planner, and one of each child.
    assert_eq!(count(&events, "tool.started"), 4);
    assert_eq!(app.provider.requests().len(), 6);
}

#[tokio::test]
async fn a_paused_tree_can_be_cancelled() {
    for is_killed in [false, true] {
        let (mut app, id, gate) = paused_tree().await;
        gate.open();
        waits_for(&app, &id, "resume").await;
        if is_killed {
            app.crash_and_restart().await;
        }
        let run = app.find(&id).await.cancel("enough").await;
        assert_eq!(run.status(), "cancelled");
        for run in run.tree_runs().await {
            assert_eq!(run["status"], "cancelled", "{run}");
        }
        assert_complete(&run.events().await);
        assert_eq!(app.provider.requests_for("solo").len(), 2);
    }
}

#[tokio::test]
async fn a_child_is_paused_by_its_id() {
    let (app, id, gate) = paused_tree().await;
    let children = app.find(&id).await.children().await;
    let ids: Vec<String> = children.iter().map(|it| it.id().to_owned()).collect();
    pause(&app, &ids[0]).await;
    resume(&app, &id).await;
    gate.open();
    // Its sibling ends, and then the parent only waits for it.
    assert_eq!(
        app.find(&ids[1]).await.wait_for_end().await.output(),
        "read"
    );
    waits_for(&app, &ids[0], "resume").await;
    waits_for(&app, &id, "resume").await;
    resume(&app, &ids[0]).await;
    completed(&app, &id, "planned").await;
}

#[tokio::test]
async fn a_call_that_is_approved_during_a_pause_waits_for_the_resume() {
    let mut app = careful("").spawn().await;
    app.provider.will("careful", [writes("a"), says("done")]);
    let id = app.start("careful", "go").await.id().to_owned();
    let request = requests(&app, &id, 1).await.remove(0);
    pause(&app, &id).await;
    waits_for(&app, &id, "approval").await;
    approve(&app, &request).await;
    let run = waits_for(&app, &id, "resume").await;
    assert_eq!(run["pending_approvals"], json!([]));
    app.crash_and_restart().await;
    waits_for(&app, &id, "resume").await;
    assert!(!wrote(&app, "a"));
    resume(&app, &id).await;
    let events = completed(&app, &id, "done").await;
    assert!(wrote(&app, "a"));
    assert_eq!(count(&events, "approval.decided"), 1);
    assert_eq!(count(&events, "tool.started"), 1);
}

#[tokio::test]
async fn the_time_for_an_approval_is_paused_too() {
    let mut app = careful("approve_timeout = 20").spawn().await;
    app.provider.will("careful", [writes("a"), says("done")]);
    let id = app.start("careful", "go").await.id().to_owned();
    let request = requests(&app, &id, 1).await.remove(0);
    pause(&app, &id).await;
    for _ in 0..2 {
        // As much time passes as a person has.
        app.provider.will("solo", [hangs()]);
        let other = app.start_with("solo", json!({"timeout": 20})).await;
        assert_eq!(other.wait_for_end().await.failure().0, "timeout");
        app.crash_and_restart().await;
    }
    waits_for(&app, &id, "approval").await;
    resume(&app, &id).await;
    approve(&app, &request).await;
    completed(&app, &id, "done").await;
    assert!(wrote(&app, "a"));
}

#[tokio::test]
async fn a_queued_run_waits_once_it_has_a_slot() {
    let app = reader().config("[runs]\nmax_running = 1\n").spawn().await;
    app.provider.will("other", [hangs()]);
    app.provider.will("solo", [says("done")]);
    let first = app.start_with("other", json!({"timeout": 60})).await;
    app.provider.wait_for_request("other", 1).await;
    let queued = app.start("solo", "go").await;
    pause(&app, queued.id()).await;
    assert_eq!(queued.reload().await.status(), "queued");
    first.cancel("enough").await;
    waits_for(&app, queued.id(), "resume").await;
    assert_eq!(app.provider.requests_for("solo").len(), 0);
    resume(&app, queued.id()).await;
    completed(&app, queued.id(), "done").await;
}

/// Pauses and resumes the run until it has ended.
async fn toggle(app: &TestApp, run: &Run<'_>) {
    loop {
        for action in ["pause", "resume"] {
            let got = steer(app, run.id(), action).await;
            match got.status {
                200 | 202 => {}
                409 => return,
                _ => panic!("{}", got.text),
            }
        }
    }
}

#[tokio::test]
async fn pauses_and_resumes_lose_no_step_and_repeat_none() {
    let app = reader().config("[runs]\nmax_running = 3\n").spawn().await;
    app.provider.always("planner", |seen| match seen.turn() {
        turn if turn < 5 => delegates([("solo", "x"), ("solo", "y")]),
        _ => says("planned"),
    });
    app.provider.always("solo", |seen| match seen.turn() {
        1 => reads(),
        _ => says("read"),
    });
    let app = &app;
    let stories = (0..6).map(|_| async move {
        let run = app.start("planner", "go").await;
        toggle(app, &run).await;
        let events = completed(app, run.id(), "planned").await;
        assert_eq!(count(&events, "agent.called"), 8);
        assert_eq!(count(&events, "tool.started"), 16);
    });
    join_all(stories).await;
    // Five turns of each planner, and two of each of its eight children.
    assert_eq!(app.provider.requests().len(), 6 * (5 + 16));
}

#[tokio::test]
async fn a_request_that_a_kill_interrupted_counts_also_after_a_pause() {
    let mut app = reader().spawn().await;
    app.provider.will("other", [hangs(), says("done")]);
    let run = app.start_with("other", json!({"timeout": 60})).await;
    let id = run.id().to_owned();
    app.provider.wait_for_request("other", 1).await;
    pause(&app, &id).await;
    for _ in 0..2 {
        app.crash_and_restart().await;
        waits_for(&app, &id, "resume").await;
    }
    resume(&app, &id).await;
    completed(&app, &id, "done").await;
    let run = app.find(&id).await;
    assert_eq!(run["tree"]["complete"], false, "the first may be billed");
}
