//! Runs whose record is damaged, or cannot be written while the store works otherwise: each ends alone, and delays no other.

use serde_json::json;

use crate::support::app::{ApiResponse, TestApp};
use crate::support::events::{assert_complete, count};
use crate::support::gate::Gate;
use crate::support::provider::answer::{delegates, hangs, says};
use crate::support::run::Run;

/// Makes the run's steps unreadable, but not its events, which need no long texts.
fn damage_steps(app: &TestApp, id: &str) {
    let db = app.database();
    let run = db.id(id);
    db.execute(&format!(
        "UPDATE entries SET texts = '[[' WHERE run = {run} AND entries IS NOT NULL"
    ));
}

/// Makes the rows of runs unreadable.
fn damage_rows(app: &TestApp, ids: &[&str]) {
    let db = app.database();
    let ids: Vec<String> = ids.iter().map(|id| db.id(id)).collect();
    let ids = ids.join(", ");
    db.execute(&format!(
        "UPDATE runs SET labels = '{{' WHERE id IN ({ids})"
    ));
}

async fn suspended(app: &TestApp, run: &Run<'_>) {
    let words = format!("{} is suspended until the store works", run.id());
    app.daemon.wait_for_log(&words).await;
}

/// The tree waits, because of the damage, its rows can be read, and a cancel of this run ends it.
async fn waits_until_it_is_cancelled<'a>(app: &'a TestApp, root: &str, id: &str) -> Run<'a> {
    let words = format!("{root} is suspended, and resumed soon to try again");
    app.daemon.wait_for_log(&words).await;
    assert!(app.daemon.log().contains("the database is damaged"));
    let run = app.find(id).await;
    assert_eq!(run["finished_at"], json!(null));
    let cancelled = run.cancel("damaged").await;
    assert_eq!(cancelled.status(), "cancelled");
    cancelled
}

fn is_damage(run: &Run<'_>) {
    let (code, message) = run.failure();
    assert_eq!(code, "internal");
    assert!(message.contains("the database is damaged"), "{message}");
}

#[tokio::test]
async fn a_run_whose_steps_are_damaged_waits_until_it_is_cancelled() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    let gate = Gate::closed();
    let door = gate.clone();
    app.provider
        .always("solo", move |_| says("done").after_gate(&door));
    let (bad, good) = (app.start("solo", "go").await, app.start("solo", "go").await);
    app.provider.wait_for_request("solo", 2).await;
    app.database().refuse_entries("1 = 1");
    gate.open();
    suspended(&app, &bad).await;
    suspended(&app, &good).await;
    damage_steps(&app, bad.id());
    // Nothing can be written before it has read its damaged steps.
    let retried = format!("{} is suspended, and resumed soon to try again", bad.id());
    app.daemon.wait_for_log(&retried).await;
    app.database().accept_entries();

    assert_eq!(good.wait_for_end().await.output(), "done");
    let bad = waits_until_it_is_cancelled(&app, bad.id(), bad.id()).await;
    let events = bad.events().await;
    assert_complete(&events);
    assert_eq!(count(&events, "run.cancelled"), 1);
    app.get_until("/readyz", |got| got.status == 200).await;
}

#[tokio::test]
async fn a_cancelled_child_whose_steps_are_damaged_is_an_error_result_to_its_parent() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .spawn()
        .await;
    let gate = Gate::closed();
    app.provider
        .will("planner", [delegates([("reader", "x")]), says("planned")]);
    let door = gate.clone();
    app.provider
        .always("reader", move |_| says("read").after_gate(&door));
    let run = app.start("planner", "go").await;
    app.provider.wait_for_request("reader", 1).await;
    // The request is sent while the child's record is being committed.
    let children = format!("/runs/{}/children", run.id());
    let is_recorded = |got: &ApiResponse| got.json()["data"][0].is_object();
    app.get_until(&children, is_recorded).await;
    app.database().refuse_entries("1 = 1");
    gate.open();
    suspended(&app, &run).await;
    let children = run.children().await;
    damage_steps(&app, children[0].id());
    app.database().accept_entries();

    waits_until_it_is_cancelled(&app, run.id(), children[0].id()).await;
    assert_eq!(run.wait_for_end().await.output(), "planned");
    let seen = app.provider.wait_for_request("planner", 2).await;
    assert_eq!(seen.tool_result_errors(), [true]);
    assert_complete(&run.events().await);
}

#[tokio::test]
async fn children_that_a_damaged_root_does_not_reach_end_before_it() {
    let mut app = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .spawn()
        .await;
    app.provider
        .will("planner", [delegates([("reader", "x")]), says("planned")]);
    app.provider.will("reader", [hangs()]);
    let id = app.start("planner", "go").await.id().to_owned();
    app.provider.wait_for_request("reader", 1).await;
    let children = format!("/runs/{id}/children");
    let is_recorded = |got: &ApiResponse| got.json()["data"][0].is_object();
    app.get_until(&children, is_recorded).await;
    app.daemon.kill().await;
    damage_steps(&app, &id);
    app.restart_after_end().await;

    let run = waits_until_it_is_cancelled(&app, &id, &id).await;
    let children = run.children().await;
    assert_eq!(children[0].failure().0, "interrupted");
    assert_eq!(children[0]["error"]["retryable"], false);
    // Nothing follows the end of the root: who follows the tree has seen everything then.
    let events = run.events().await;
    assert_complete(&events);
    let last = events.last().expect("events");
    assert_eq!(
        (last.kind(), &last["run_id"]),
        ("run.cancelled", &json!(id))
    );
}

#[tokio::test]
async fn a_suspended_run_whose_row_is_damaged_delays_no_other() {
    // On PostgreSQL a damaged run keeps its place in its session until it is deleted.
    let app = TestApp::setup().sqlite().agent("solo", "").spawn().await;
    let gate = Gate::closed();
    let door = gate.clone();
    app.provider
        .always("solo", move |_| says("done").after_gate(&door));
    let talk = json!({"input": "go", "session": "talk"});
    let bad = app.start_with("solo", talk.clone()).await;
    let good = app.start("solo", "go").await;
    app.provider.wait_for_request("solo", 2).await;
    app.database().refuse_entries("1 = 1");
    gate.open();
    suspended(&app, &bad).await;
    suspended(&app, &good).await;
    damage_rows(&app, &[bad.id()]);
    app.database().accept_entries();

    assert_eq!(good.wait_for_end().await.output(), "done");
    let shown = app.get(&format!("/runs/{}", bad.id())).await;
    shown.problem(500);
    assert_eq!(shown.json()["code"], "store_damaged", "{}", shown.text);
    // Its slot and its session are free.
    assert_eq!(app.run_with("solo", talk).await.output(), "done");
}

#[tokio::test]
async fn a_session_whose_last_conversation_is_damaged_fails_its_next_run() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.always("solo", |_| says("done"));
    let talk = json!({"input": "go", "session": "talk"});
    let first = app.run_with("solo", talk.clone()).await;
    damage_steps(&app, first.id());
    let next = app.run_with("solo", talk).await;
    is_damage(&next);
    assert_eq!(app.run("solo", "go").await.output(), "done");
}

#[tokio::test]
async fn one_tree_that_cannot_be_written_affects_no_other() {
    let app = TestApp::setup()
        .agent("solo", "")
        .agent("stubborn", "")
        .spawn()
        .await;
    let gate = Gate::closed();
    app.provider.always("solo", |_| says("done"));
    let door = gate.clone();
    app.provider
        .always("stubborn", move |_| says("late").after_gate(&door));
    let stubborn = app.start("stubborn", "go").await;
    app.provider.wait_for_request("stubborn", 1).await;
    let db = app.database();
    db.refuse_entries(&format!("new.run = {}", db.id(stubborn.id())));
    gate.open();
    // From here on the store was seen to work.
    app.daemon
        .wait_for_log("works again: resuming 1 root run")
        .await;
    app.get_until("/readyz", |got| got.status == 200).await;

    let words = format!("{} is suspended until", stubborn.id());
    while app.daemon.log().matches(&words).count() < 4 {
        assert_eq!(app.run("solo", "go").await.output(), "done");
        assert_eq!(app.get("/readyz").await.status, 200);
    }
    app.database().accept_entries();
    assert_eq!(stubborn.wait_for_end().await.output(), "late");
}

#[tokio::test]
async fn a_suspended_run_does_not_count_as_running() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .spawn()
        .await;
    let gate = Gate::closed();
    app.provider.will("planner", [delegates([("reader", "x")])]);
    app.provider.always("planner", |_| says("planned"));
    let door = gate.clone();
    app.provider
        .always("reader", move |_| says("read").after_gate(&door));
    let run = app.start("planner", "go").await;
    app.provider.wait_for_request("reader", 1).await;
    let running = |count: u64| format!("\naxed_runs_running {count}\n");
    let page = app.get("/metrics").await.text;
    assert!(page.contains(&running(2)), "{page}");

    app.database().refuse_entries("1 = 1");
    gate.open();
    suspended(&app, &run).await;
    app.get_until("/metrics", |got| got.text.contains(&running(0)))
        .await;
    app.database().accept_entries();
    assert_eq!(run.wait_for_end().await.output(), "planned");
}

#[tokio::test]
async fn a_damaged_run_is_left_out_of_lists_and_can_be_deleted() {
    let mut app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.will("solo", [says("done"), says("done")]);
    app.provider.always("solo", |_| hangs());
    let labelled = json!({"input": "go", "labels": {"a": "b"}});
    let ended = app.run_with("solo", labelled.clone()).await.id().to_owned();
    let good = app.run_with("solo", labelled.clone()).await.id().to_owned();
    let unfinished = app.start_with("solo", labelled).await.id().to_owned();
    app.provider.wait_for_request("solo", 3).await;
    damage_rows(&app, &[&ended, &unfinished]);
    // The daemon that drives a run continues it.
    let refused = app.delete(&format!("/runs/{unfinished}")).await;
    refused.problem(500);

    app.crash_and_restart().await;

    for query in ["", "?status=completed", "?label.a=b", "?all=true&limit=1"] {
        let mut path = format!("/runs{query}");
        let mut found = Vec::new();
        loop {
            let page = app.get(&path).await.json();
            let runs = page["data"].as_array().expect("runs");
            found.extend(runs.iter().map(|run| run["id"].clone()));
            match page["next_cursor"].as_str() {
                Some(cursor) if query.is_empty() => path = format!("/runs?cursor={cursor}"),
                Some(cursor) => path = format!("/runs{query}&cursor={cursor}"),
                None => break,
            }
        }
        assert_eq!(found, [good.as_str()], "{query}");
    }
    app.daemon
        .wait_for_log(&format!("{unfinished} is left out of a list"))
        .await;
    for id in [&ended, &unfinished] {
        let shown = app.get(&format!("/runs/{id}")).await;
        shown.problem(500);
        assert!(shown.text.contains("can be deleted"), "{}", shown.text);
        assert_eq!(app.delete(&format!("/runs/{id}")).await.status, 204);
        app.get(&format!("/runs/{id}")).await.problem(404);
    }
    assert_eq!(app.find(&good).await.output(), "done");
}

#[tokio::test]
async fn sessions_with_a_damaged_run_are_listed_beside_others() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.always("solo", |_| says("done"));
    let mut runs = Vec::new();
    for session in ["bad", "good", "long", "long", "long"] {
        let request = json!({"input": "go", "session": session});
        runs.push(app.run_with("solo", request).await.id().to_owned());
    }
    damage_rows(&app, &[&runs[0], &runs[3]]);
    damage_steps(&app, &runs[4]);

    let page = app.get("/sessions").await.json();
    let sessions = page["data"].as_array().expect("sessions");
    let shown = |at: usize| {
        (
            sessions[at]["name"].as_str(),
            sessions[at]["messages"].as_u64(),
        )
    };
    assert_eq!(sessions.len(), 3);
    assert_eq!(shown(0), (Some("bad"), Some(0)));
    assert_eq!(shown(1), (Some("good"), Some(2)));
    assert_eq!(shown(2), (Some("long"), Some(0)));
    app.daemon
        .wait_for_log("The conversation of session bad is left out of a list")
        .await;

    // Two runs of three can be read, also page by page.
    let mut path = "/sessions/long?limit=1".to_owned();
    for (id, is_last) in [(&runs[4], false), (&runs[2], true)] {
        let page = app.get(&path).await.json();
        assert_eq!(page["data"][0]["id"], id.as_str(), "{page}");
        assert_eq!(page["next_cursor"].is_null(), is_last, "{page}");
        path = format!("/sessions/long?limit=1&cursor={id}");
    }
    // What a run would continue is not hidden.
    let refused = app.get("/sessions/long/messages").await;
    refused.problem(500);
    app.get("/sessions/bad").await.problem(500);
    assert_eq!(app.get("/sessions/good/messages").await.status, 200);
}

#[tokio::test]
async fn a_damaged_run_keeps_no_permit_and_no_place_in_its_session() {
    let setup = TestApp::setup().agent("solo", "");
    let mut app = setup.config("[runs]\nmax_running = 1").spawn().await;
    let gate = Gate::closed();
    app.provider
        .will("solo", [says("late").after_gate(&gate), says("next")]);
    let in_session = json!({"input": "go", "session": "talk"});
    let damaged = app.start_with("solo", in_session.clone()).await;
    let damaged = damaged.id().to_owned();
    app.provider.wait_for_request("solo", 1).await;
    damage_rows(&app, &[&damaged]);
    app.crash_and_restart().await;
    let next = app.run_with("solo", in_session).await;
    assert_eq!(next.output(), "next");
}
