//! A store that fails while runs are at work: they are suspended, nothing is accepted, and all go on by themselves once the
//! store works again.

use std::fs;
use std::process::{Command as Blocking, Stdio};

use reqwest::Method;
use serde_json::{Value, json};
use tokio::process::Command;
use tokio::task::JoinSet;

use crate::support::app::{ApiResponse, TestApp, send};
use crate::support::daemon::{AXED, Daemon};
use crate::support::events::{Events, assert_complete, count, kinds};
use crate::support::eventually;
use crate::support::gate::Gate;
use crate::support::provider::answer::{calls, delegates, hangs, says};
use crate::support::run::Run;
use crate::support::within_timeout;

/// From now on no entry can be written whose column contains the text.
fn refuse(app: &TestApp, column: &str, text: &str) {
    let db = app.database();
    db.refuse_entries(&db.contains(column, text));
}

/// Checks for a 503 of the store with `Retry-After`.
fn is_unavailable(got: &ApiResponse) {
    got.problem(503);
    assert_eq!(got.json()["code"], "store_unavailable", "{}", got.text);
    assert!(!got.header("retry-after").is_empty(), "{:?}", got.headers);
}

async fn is_ready(app: &TestApp) {
    app.get_until("/readyz", |got| got.status == 200).await;
}

async fn is_not_ready(app: &TestApp) {
    let got = app.get_until("/readyz", |got| got.status == 503).await;
    assert_eq!(got.json()["checks"]["store"]["ok"], false, "{}", got.text);
}

/// The events of a new run of `solo`, from its first one: a stream that is opened later has no earlier deltas.
async fn streamed(app: &TestApp) -> Events {
    let request = app.request(Method::POST, "/agents/solo/runs");
    let request = request.header("accept", "text/event-stream").send();
    let response = within_timeout("the stream's head", request).await;
    Events::new(response.expect("a head"))
}

/// Starts a run in a task of its own that waits for its end.
fn wait_for(app: &TestApp, waiting: &mut JoinSet<ApiResponse>, agent: &str, body: &Value) {
    let path = format!("/agents/{agent}/runs?wait=180");
    waiting.spawn(send(app.request(Method::POST, &path).json(body)));
}

async fn ended_whole(app: &TestApp, id: &str) -> Value {
    let run = app.find(id).await.wait_for_end().await;
    let events = run.events().await;
    assert_complete(&events);
    assert_eq!(count(&events, "run.completed"), run.tree_runs().await.len());
    json!(run.output())
}

/// Agents whose replies wait for the gate, and `slow`, which never gets one.
async fn agents_behind_a_gate() -> (TestApp, Gate) {
    let app = TestApp::setup()
        .agent("solo", "")
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .agent("talker", "")
        .agent("slow", "")
        .spawn()
        .await;
    let gate = Gate::closed();
    for agent in ["solo", "reader"] {
        let door = gate.clone();
        app.provider
            .always(agent, move |_| says("done").after_gate(&door));
    }
    app.provider.always("planner", |seen| match seen.turn() {
        1 => delegates([("reader", "x")]),
        _ => says("planned"),
    });
    let door = gate.clone();
    app.provider.always("talker", move |seen| {
        says(format!("got {}", seen.user_messages().len())).after_gate(&door)
    });
    app.provider.will("slow", [hangs()]);
    app.provider.always("slow", |_| hangs());
    (app, gate)
}

/// Its clients have a text that is not in the record: the model may say another one.
#[tokio::test]
async fn a_text_that_could_not_be_recorded_is_withdrawn() {
    let app = TestApp::setup()
        .agent("solo", "stream = true")
        .spawn()
        .await;
    let gate = Gate::closed();
    app.provider
        .will("solo", [says("lost").pausing_at(&gate), says("kept")]);
    let mut stream = streamed(&app).await;
    let mut events = stream.until("text.delta").await;
    let db = app.database();
    db.refuse_entries("1 = 1");
    gate.open();
    app.daemon
        .wait_for_log("is suspended until the store works")
        .await;
    db.accept_entries();
    events.extend(stream.rest().await);
    let texts = events.iter().filter(|it| it.kind().starts_with("text."));
    let texts: Vec<_> = texts.map(|it| (it.kind(), it["text"].as_str())).collect();
    let expected = [
        ("text.delta", Some("lost")),
        ("text.withdrawn", None),
        ("text.delta", Some("kept")),
    ];
    assert_eq!(texts, expected);
    assert_eq!(kinds(&events).last(), Some(&"run.completed"));
}

#[tokio::test]
async fn a_reply_that_comes_while_the_store_is_away_is_paid_once() {
    let app = TestApp::setup()
        .agent("solo", "stream = true")
        .spawn()
        .await;
    let gate = Gate::closed();
    app.provider
        .will("solo", [says("paid").pausing_at(&gate), says("again")]);
    let mut stream = streamed(&app).await;
    let mut events = stream.until("text.delta").await;
    let lock = app.database().lock();
    gate.open();
    for words in ["is suspended until the store works", "runs stay suspended"] {
        app.daemon.wait_for_log(words).await;
    }
    lock.release();
    events.extend(stream.rest().await);
    let texts = events.iter().filter(|it| it.kind().starts_with("text."));
    let texts: Vec<_> = texts.map(|it| (it.kind(), it["text"].as_str())).collect();
    assert_eq!(texts, [("text.delta", Some("paid"))]);
    assert_eq!(app.provider.requests_for("solo").len(), 1);
    let id = events[0]["run_id"].as_str().expect("an id");
    let run = app.find(id).await.wait_for_end().await;
    assert_eq!(run.output(), "paid");
    assert_eq!(run["tree"]["complete"], true);
    assert_eq!(run["tree"]["model_calls"], 1);
    let turns = format!("/runs/{}/turns", run.id());
    let listed = app.get(&turns).await.json();
    assert_eq!(listed["data"].as_array().map(Vec::len), Some(1), "{listed}");
    let turn = app.get(&format!("{turns}/1")).await;
    assert_eq!(turn.json()["reply"]["content"], "paid", "{}", turn.text);
}

/// A run whose entries are always refused waits longer and longer; the store is probed at once for another one.
#[tokio::test]
async fn a_run_does_not_wait_for_one_that_fails_again_and_again() {
    const ATTEMPTS: std::ops::Range<usize> = 7..10;
    let app = TestApp::setup()
        .agent("solo", "")
        .agent("planner", "")
        .spawn()
        .await;
    app.provider.always("planner", |_| says("cursed"));
    let db = app.database();
    let cursed = db.contains("new.entries", "cursed");
    db.refuse_entries(&format!(
        "{cursed} OR {}",
        db.contains("new.entries", "unlucky")
    ));
    let cursed = app.start("planner", "x").await;
    let suspended = format!("{} is suspended until", cursed.id());
    let mut has_not_waited = false;
    for attempts in ATTEMPTS {
        eventually("a run that was suspended again and again", async || {
            let count = app.daemon.log().matches(&suspended).count();
            (count >= attempts).then_some(())
        })
        .await;
        app.provider.will("solo", [says("unlucky"), says("done")]);
        let before = app.provider.requests_for("planner").len();
        assert_eq!(app.run("solo", "x").await.output(), "done");
        // On a slow machine the time of the next attempt may come meanwhile; the one after it is twice as far away.
        has_not_waited = app.provider.requests_for("planner").len() == before;
        if has_not_waited {
            break;
        }
    }
    assert!(has_not_waited, "{}", app.daemon.log());
    db.accept_entries();
    assert_eq!(cursed.wait_for_end().await.output(), "cursed");
}

#[tokio::test]
async fn active_runs_survive_a_locked_database() {
    let (app, gate) = agents_behind_a_gate().await;
    let mut waiting = JoinSet::new();
    for number in 0..24 {
        wait_for(&app, &mut waiting, "solo", &json!({"input": "go"}));
        wait_for(&app, &mut waiting, "planner", &json!({"input": "go"}));
        let session = format!("talk-{}", number / 2);
        let talk = json!({"input": "go", "session": session});
        wait_for(&app, &mut waiting, "talker", &talk);
    }
    let slow = app.start("slow", "go").await;
    let path = format!("/runs/{}/cancel", slow.id());
    app.provider.wait_for_request("solo", 24).await;
    app.provider.wait_for_request("reader", 24).await;
    app.provider.wait_for_request("talker", 12).await;
    app.get_until("/runs?limit=200", |got| {
        got.json()["data"]
            .as_array()
            .is_some_and(|runs| runs.len() == 73)
    })
    .await;
    let listed = app.get("/runs?agent=planner&limit=1").await.json();
    let id = listed["data"][0]["id"].as_str().expect("an id").to_owned();
    let stream = app.events(&app.find(&id).await).await;

    let lock = app.database().lock();
    gate.open();
    app.daemon
        .wait_for_log("is suspended until the store works")
        .await;
    is_not_ready(&app).await;
    let refused = app.post("/agents/solo/runs", &json!({"input": "go"})).await;
    is_unavailable(&refused);
    is_unavailable(&app.post(&path, &json!({})).await);
    assert_eq!(slow.reload().await.status(), "running");
    lock.release();

    let mut ids = Vec::new();
    while let Some(got) = waiting.join_next().await {
        let got = got.expect("no panic");
        assert_eq!(got.status, 200, "{}", got.text);
        assert_eq!(got.json()["status"], "completed", "{}", got.text);
        ids.push(got.json()["id"].as_str().expect("an id").to_owned());
    }
    let events = stream.rest().await;
    assert_complete(&events);
    assert_eq!(kinds(&events).last(), Some(&"run.completed"));
    let mut received = Vec::new();
    for id in &ids {
        received.push(ended_whole(&app, id).await);
    }
    // Each session kept its order: its first run got one message, its second two.
    for (text, many) in [("got 1", 12), ("got 2", 12), ("planned", 24), ("done", 24)] {
        let found = received.iter().filter(|output| *output == text).count();
        assert_eq!(found, many, "{text}");
    }
    is_ready(&app).await;
    // 200 if the cancel settled at once.
    assert!(matches!(
        app.post(&path, &json!({})).await.status,
        200 | 202
    ));
    assert_eq!(slow.wait_for_end().await.status(), "cancelled");
    assert_eq!(app.run("solo", "go").await.output(), "done");
}

#[tokio::test]
async fn a_tree_with_a_failed_write_is_suspended_and_resumed() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"fast\", \"slow\"]")
        .agent("fast", "")
        .agent("slow", "")
        .spawn()
        .await;
    let (gate, last) = (Gate::closed(), Gate::closed());
    app.provider.will(
        "planner",
        [delegates([("fast", "a"), ("slow", "b")]), says("planned")],
    );
    app.provider.will("fast", [says("done").after_gate(&gate)]);
    let door = last.clone();
    app.provider
        .always("slow", move |_| says("late").after_gate(&door));
    let mut waiting = JoinSet::new();
    wait_for(&app, &mut waiting, "planner", &json!({"input": "go"}));
    app.provider.wait_for_concurrency("fast", 1).await;
    app.provider.wait_for_concurrency("slow", 1).await;

    refuse(&app, "new.entries", "{\"call_completed\"");
    gate.open();
    // The tree's requests in progress are cancelled, and repeated when it resumes.
    app.provider.wait_for_disconnects(1).await;
    app.database().accept_entries();
    app.provider.wait_for_request("slow", 2).await;
    last.open();

    let got = waiting.join_next().await.expect("one").expect("no panic");
    assert_eq!(got.status, 200, "{}", got.text);
    let run = Run::new(&app, got.json());
    assert_eq!(run.output(), "planned");
    assert_eq!(run.children().await.len(), 2);
    assert_complete(&run.events().await);
    assert_eq!(app.provider.requests_for("fast").len(), 1);
    assert_eq!(app.provider.requests_for("planner").len(), 2);
}

#[tokio::test]
async fn a_run_that_cannot_be_recorded_is_not_accepted() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.always("solo", |_| says("done"));
    refuse(&app, "new.entries", "run.queued");
    let talk = json!({"input": "go", "session": "talk"});
    is_unavailable(&app.post("/agents/solo/runs", &talk).await);
    app.database().accept_entries();
    is_ready(&app).await;

    let runs = app.get("/runs").await.json();
    assert_eq!(runs["data"].as_array().map(Vec::len), Some(0));
    // Its place in its session is free.
    assert_eq!(app.run_with("solo", talk).await.output(), "done");
}

#[tokio::test]
async fn a_failed_unawaited_write_suspends_its_tree_too() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .spawn()
        .await;
    let (gate, last) = (Gate::closed(), Gate::closed());
    app.provider.will("planner", [delegates([("reader", "x")])]);
    let door = last.clone();
    app.provider
        .always("planner", move |_| says("planned").after_gate(&door));
    app.provider
        .will("reader", [says("read").after_gate(&gate)]);
    let run = app.start("planner", "go").await;
    app.provider.wait_for_request("reader", 1).await;
    // A request is sent while the start of its turn is committed.
    let events = format!("/runs/{}/events", run.id());
    let both_started = |got: &ApiResponse| got.text.matches("turn.started").count() == 2;
    app.get_until(&events, both_started).await;

    // The planner's second turn has begun and its request is in progress.
    refuse(&app, "new.entries", "turn.started");
    gate.open();
    app.daemon
        .wait_for_log("is suspended until the store works")
        .await;
    app.database().accept_entries();
    last.open();

    let run = run.wait_for_end().await;
    assert_eq!(run.output(), "planned");
    let events = run.events().await;
    assert_complete(&events);
    assert_eq!(count(&events, "agent.returned"), 1);
    assert_eq!(app.provider.requests_for("reader").len(), 1);
}

#[tokio::test]
async fn a_tool_with_side_effects_is_not_executed_twice() {
    let agent = "workdir = \"work\"\ntools = [\"edit_file\"]\n";
    let app = TestApp::setup()
        .agent("careful", agent)
        .file("work/a.txt", "x")
        .spawn()
        .await;
    let gate = Gate::closed();
    let edit = json!({"path": "a.txt", "old_string": "x", "new_string": "yx"});
    app.provider.will(
        "careful",
        [
            calls([("edit_file", edit)]).after_gate(&gate),
            says("edited"),
        ],
    );
    let run = app.start("careful", "go").await;
    app.provider.wait_for_request("careful", 1).await;

    refuse(&app, "new.entries", "{\"call_completed\"");
    gate.open();
    app.daemon
        .wait_for_log("is suspended until the store works")
        .await;
    app.database().accept_entries();

    // Its result came while it could not be recorded.
    let run = run.wait_for_end().await;
    assert_eq!(run.output(), "edited");
    let text = fs::read_to_string(app.path("work/a.txt")).expect("the file");
    assert_eq!(text, "yx");
}

#[tokio::test]
async fn a_decision_is_refused_while_the_store_fails() {
    let agent = "workdir = \"work\"\ntools = [\"write_file\"]\napprove = [\"write_file\"]\n";
    let app = TestApp::setup()
        .agent("careful", agent)
        .file("work/here.txt", "here")
        .spawn()
        .await;
    let write = json!({"path": "a", "content": "new"});
    app.provider
        .will("careful", [calls([("write_file", write)]), says("written")]);
    let run = app.start("careful", "go").await;
    let mut events = app.events(&run).await;
    let request = events.until("approval.requested").await;
    let call = request.last().expect("it")["tool_call_id"].clone();
    let path = format!(
        "/runs/{}/approvals/{}",
        run.id(),
        call.as_str().expect("an id")
    );

    let lock = app.database().lock();
    // The first one decides nothing, so the second must not be refused as late.
    let approve = json!({"decision": "approve"});
    let (first, second) = tokio::join!(app.post(&path, &approve), app.post(&path, &approve));
    is_unavailable(&first);
    is_unavailable(&second);
    assert!(!app.path("work/a").exists());
    lock.release();
    is_ready(&app).await;

    assert_eq!(run.reload().await.status(), "waiting");
    let taken = app
        .get_until(&format!("/runs/{}", run.id()), |got| {
            got.json()["status"] == "waiting"
        })
        .await;
    assert_eq!(taken.status, 200);
    let decided = app.post(&path, &json!({"decision": "approve"})).await;
    assert_eq!(decided.status, 202, "{}", decided.text);
    assert_eq!(run.wait_for_end().await.output(), "written");
}

#[tokio::test]
async fn runs_suspended_at_shutdown_are_resumed_by_the_next_process() {
    let mut app = TestApp::setup()
        .server("drain_timeout = 600")
        .agent("solo", "")
        .spawn()
        .await;
    let gate = Gate::closed();
    let door = gate.clone();
    app.provider.always("solo", move |seen| {
        says(format!("got {}", seen.user_messages().len())).after_gate(&door)
    });
    let talk = json!({"input": "go", "session": "talk"});
    let first = app.start_with("solo", talk.clone()).await.id().to_owned();
    let second = app.start_with("solo", talk).await.id().to_owned();
    app.provider.wait_for_request("solo", 1).await;
    let lock = app.database().lock();
    gate.open();
    app.daemon
        .wait_for_log("is suspended until the store works")
        .await;

    app.daemon.signal("TERM");
    let status = app.daemon.wait_for_exit().await;
    assert!(status.success(), "{}", app.daemon.log());
    lock.release();
    app.restart_after_end().await;

    assert_eq!(ended_whole(&app, &first).await, "got 1");
    assert_eq!(ended_whole(&app, &second).await, "got 2");
}

/// Restarts the app's daemon with a data directory of this size; false if that is not permitted.
async fn restart_in_little_room(app: &mut TestApp) -> bool {
    let mount = "mount -t tmpfs -o size=16m tmpfs data";
    let unshare = ["--user", "--map-root-user", "--mount", "sh", "-c"];
    let permitted = Blocking::new("unshare")
        .args(unshare)
        .arg(mount)
        .current_dir(app.path(""))
        .status();
    if !permitted.is_ok_and(|status| status.success()) {
        return false;
    }
    app.daemon.kill().await;
    let mut command = Command::new("unshare");
    command
        .args(unshare)
        .arg(format!("{mount} && exec \"$0\" \"$@\""))
        .args([AXED, "serve", "--config", "config/axed.toml"])
        .args(["--agents", "agents", "--data", "data"])
        .args(["--listen", "127.0.0.1:0"])
        .current_dir(app.path(""))
        .stdin(Stdio::null())
        .kill_on_drop(true);
    app.daemon = Daemon::start(command).await;
    true
}

#[tokio::test]
async fn active_runs_survive_a_full_disk() {
    let mut app = TestApp::setup()
        .agent("planner", "sub_agents = [\"solo\"]")
        .agent("solo", "")
        .spawn()
        .await;
    if !restart_in_little_room(&mut app).await {
        eprintln!("skipped: this machine does not let a test mount a file system");
        return;
    }
    let gate = Gate::closed();
    let door = gate.clone();
    app.provider
        .always("solo", move |_| says("x".repeat(100_000)).after_gate(&door));
    app.provider.always("planner", |seen| match seen.turn() {
        1 => delegates([("solo", "x")]),
        _ => says("planned"),
    });
    let mut waiting = JoinSet::new();
    for _ in 0..8 {
        wait_for(&app, &mut waiting, "planner", &json!({"input": "go"}));
    }
    app.provider.wait_for_request("solo", 8).await;

    let filler = format!(
        "/proc/{}/root{}/filler",
        app.daemon.pid(),
        app.path("data").display()
    );
    // It ends with an error: no space left.
    assert!(fs::write(&filler, vec![0; 32 << 20]).is_err());
    gate.open();
    app.daemon
        .wait_for_log("is suspended until the store works")
        .await;
    fs::remove_file(&filler).expect("space");

    while let Some(got) = waiting.join_next().await {
        let got = got.expect("no panic");
        assert_eq!(got.status, 200, "{}", got.text);
        let id = got.json()["id"].as_str().expect("an id").to_owned();
        assert_eq!(ended_whole(&app, &id).await, "planned");
    }
    is_ready(&app).await;
}
