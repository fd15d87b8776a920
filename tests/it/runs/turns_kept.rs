//! How turns are stored: what is left out, over restarts, and what they cost the store.

use serde_json::{Value, json};

use crate::support::app::{Setup, TestApp};
use crate::support::gate::Gate;
use crate::support::provider::answer::{calls, fails, says};

const READER: &str = "workdir = \"work\"\ntools = [\"read_file\", \"grep\", \"find_path\"]";

/// An agent that reads `work/notes.md`, which has this many lines.
fn reader(lines: usize) -> Setup {
    let text: String = (0..lines)
        .map(|line| format!("{line}: a line of \"notes\"\n"))
        .collect();
    TestApp::setup()
        .agent("reader", READER)
        .file("work/notes.md", &text)
}

/// Lets the model read another part of the file in each turn but the last.
fn will_read(app: &TestApp, turns: usize, lines: usize) {
    let reads = (1..turns).map(move |turn| {
        let arguments = json!({"path": "notes.md", "offset": turn * lines, "limit": lines});
        calls([("read_file", arguments)]).with_text(&format!("I read part {turn}."))
    });
    app.provider
        .will("reader", reads.chain([says("I have read it.")]));
}

/// Compares each recorded request with what the provider got.
async fn assert_requests_as_sent(app: &TestApp, run: &str) {
    for (number, seen) in (1..).zip(app.provider.requests_for("reader")) {
        let turn = app.get(&format!("/runs/{run}/turns/{number}")).await;
        let sent = std::str::from_utf8(&seen.bytes).expect("UTF-8");
        assert!(
            turn.text.contains(&format!("\"body\":{sent}")),
            "turn {number}: {}",
            turn.text
        );
    }
}

#[tokio::test]
async fn a_long_run_keeps_each_request() {
    let app = reader(400).spawn().await;
    will_read(&app, 45, 8);
    let run = app.run("reader", "read the notes").await;
    assert_eq!(run.output(), "I have read it.");
    assert_requests_as_sent(&app, run.id()).await;
    let largest = app
        .database()
        .number("SELECT max(length(turns)) FROM entries")
        .expect("a length");
    // Also those that are stored whole refer to what the steps have.
    assert!(largest < 20_000, "{largest} bytes");
}

#[tokio::test]
async fn a_large_request_is_stored_as_differences() {
    let app = reader(40_000).spawn().await;
    will_read(&app, 6, 4_000);
    let run = app.run("reader", "read the notes").await;
    assert_eq!(run.output(), "I have read it.");
    assert_requests_as_sent(&app, run.id()).await;
}

#[tokio::test]
async fn turns_survive_a_crash() {
    let mut app = reader(100).spawn().await;
    let gate = Gate::closed();
    let read = |turn: usize| {
        calls([(
            "read_file",
            json!({"path": "notes.md", "offset": turn, "limit": 20}),
        )])
    };
    app.provider
        .will("reader", [read(1), read(2), says("lost").after_gate(&gate)]);
    let run = app.start("reader", "read the notes").await.id().to_owned();
    app.provider.wait_for_request("reader", 3).await;
    app.provider.will("reader", [read(3), says("done")]);

    app.crash_and_restart().await;
    let ended = app.find(&run).await.wait_for_end().await;

    assert_eq!(ended.output(), "done");
    let mut seen = app.provider.requests_for("reader");
    // The third request was sent again.
    seen.remove(2);
    for (number, seen) in (1..).zip(seen) {
        let turn = app.get(&format!("/runs/{run}/turns/{number}")).await;
        let sent = std::str::from_utf8(&seen.bytes).expect("UTF-8");
        assert!(
            turn.text.contains(&format!("\"body\":{sent}")),
            "turn {number}: {}",
            turn.text
        );
    }
}

#[tokio::test]
async fn a_request_is_not_recorded_if_that_is_off() {
    let app = reader(10)
        .config("[data]\nrequests = \"off\"")
        .spawn()
        .await;
    will_read(&app, 3, 2);
    let run = app.run("reader", "read the notes").await;
    let turn = run.get("/turns/2").await.json();
    assert_eq!(
        (&turn["request"], &turn["request_bytes"]),
        (&Value::Null, &Value::Null)
    );
    assert_eq!(turn["reply"]["content"], "I read part 2.");
    assert_eq!(turn["attempts"][0]["status"], 200);
}

#[tokio::test]
async fn what_a_pattern_matches_is_not_in_a_turn() {
    let app = TestApp::setup()
        .agent("reader", READER)
        .file("work/notes.md", "x")
        .config("[data]\nredact = [\"sk-[a-z]+\", '(?i)password: \\S+']")
        .spawn()
        .await;
    let first = calls([("fly", json!({"with": "sk-abc"}))]).with_text("with sk-def");
    app.provider.will("reader", [first, says("done")]);
    app.provider.will("plain", [says("done")]);

    let run = app.run("reader", "use \"Password: open\\sesame\"").await;

    for number in [1, 2] {
        let turn = run.get(&format!("/turns/{number}")).await;
        assert!(
            turn.text.contains("\\\"[redacted] sesame\\\"") || turn.text.contains("[redacted]"),
            "{}",
            turn.text
        );
        for secret in ["sk-abc", "sk-def", "Password: open"] {
            assert!(!turn.text.contains(secret), "{}", turn.text);
        }
        assert_eq!(turn.json()["redacted"], true);
    }
    let db = app.database();
    let found = db.contains("turns", "sk-abc");
    assert_eq!(db.count(&format!("entries WHERE {found}")), 0);
}

#[tokio::test]
async fn what_a_pattern_matches_is_not_in_errors_of_a_provider() {
    let app = TestApp::setup()
        .agent("solo", "[retry]\nmax_retries = 1\ninitial_delay_ms = 1")
        .config("[data]\nredact = [\"SECRET-[0-9]+\"]")
        .spawn()
        .await;
    let refused = [fails(529, "busy: SECRET-1"), fails(400, "no SECRET-2")];
    app.provider.will("solo", refused);

    let run = app.run("solo", "go").await;

    let (code, message) = run.failure();
    assert_eq!(code, "provider_bad_request");
    assert!(message.contains("no [redacted]"), "{message}");
    let events = run.events().await;
    let event = |kind: &str| {
        let event = events.iter().find(|event| event.kind() == kind);
        event.unwrap_or_else(|| panic!("{kind} in {events:#?}"))
    };
    assert_eq!(event("run.failed")["error"]["message"], message);
    let reason = "overloaded: busy: [redacted]";
    assert_eq!(event("retry.scheduled")["reason"], reason);
    let turn = run.get("/turns/1").await;
    assert_eq!(turn.json()["attempts"][0]["error"], reason);
    assert!(!turn.text.contains("SECRET"), "{}", turn.text);
    app.daemon.wait_for_log("failed: ").await;
    let log = app.daemon.log();
    assert!(!log.contains("SECRET"), "{log}");
}

/// Ten turns cost the store at most 1.3 times what they cost without their requests.
#[tokio::test]
async fn ten_turns_cost_little_more() {
    for lines in [1, 60, 300] {
        let app = reader(4_000).spawn().await;
        let mut run = String::new();
        // The first run of an agent also stores what the later ones share with it.
        for _ in 0..2 {
            will_read(&app, 10, lines);
            let ended = app.run("reader", "read the notes").await;
            assert_eq!(ended["turns"], 10);
            run = ended.id().to_owned();
        }
        let db = app.database();
        let sum = |bytes: &str| {
            let sql = format!(
                "SELECT sum({bytes}) FROM entries WHERE run = {}",
                db.id(&run)
            );
            db.number(&sql).expect("a sum") as f64
        };
        // With the header of a row, its fixed columns and its entry in the index.
        let before =
            sum("coalesce(octet_length(entries), 0) + coalesce(octet_length(texts), 0) + 90");
        let turns = sum("coalesce(length(turns), 0)");
        let factor = (before + turns) / before;
        println!(
            "{lines} lines a result: {before} bytes before, {turns} bytes of turns, factor {factor:.3}"
        );
        assert!(factor <= 1.3, "{lines} lines a result: {factor:.3}");
    }
}

/// How many texts the store has that begin like the definitions of tools.
fn tool_texts(app: &TestApp) -> i64 {
    let db = app.database();
    let like = db.begins_with("body", "[{");
    db.count(&format!("definitions WHERE {like}"))
}

#[tokio::test]
async fn what_runs_share_is_kept_as_long_as_one_of_them() {
    let mut app = reader(100).spawn().await;
    let mut runs = Vec::new();
    for _ in 0..2 {
        will_read(&app, 3, 10);
        runs.push(app.run("reader", "read the notes").await.id().to_owned());
        assert_eq!(tool_texts(&app), 1);
    }
    app.crash_and_restart().await;
    let deleted = app.delete(&format!("/runs/{}", runs[0])).await;
    assert_eq!(deleted.status, 204, "{}", deleted.text);
    let sent = app.provider.requests_for("reader").split_off(3);
    for (number, seen) in (1..).zip(sent) {
        let turn = app.get(&format!("/runs/{}/turns/{number}", runs[1])).await;
        let sent = std::str::from_utf8(&seen.bytes).expect("UTF-8");
        assert!(turn.text.contains(sent), "turn {number}: {}", turn.text);
    }
    // A fork shares it too, and does not need its source.
    app.provider.always("reader", |_| says("again"));
    let forked = app
        .post(&format!("/runs/{}/fork", runs[1]), &json!({}))
        .await;
    assert_eq!(forked.status, 202, "{}", forked.text);
    let fork = forked.json()["id"].as_str().expect("an id").to_owned();
    app.find(&fork).await.wait_for_end().await;
    let deleted = app.delete(&format!("/runs/{}", runs[1])).await;
    assert_eq!(deleted.status, 204, "{}", deleted.text);
    let turn = app.get(&format!("/runs/{fork}/turns/1")).await.json();
    assert_eq!(turn["copied"], true);
    let tools = turn["request"]["body"]["tools"].as_array();
    assert_eq!(tools.map(Vec::len), Some(3), "{turn}");
    assert_eq!(tool_texts(&app), 1);
}

#[tokio::test]
async fn what_only_one_run_uses_is_deleted_with_it() {
    let app = reader(100).spawn().await;
    will_read(&app, 3, 10);
    let run = app.run("reader", "read the notes").await.id().to_owned();
    assert_eq!(tool_texts(&app), 1);
    let deleted = app.delete(&format!("/runs/{run}")).await;
    assert_eq!(deleted.status, 204, "{}", deleted.text);
    assert_eq!(tool_texts(&app), 0);
}
