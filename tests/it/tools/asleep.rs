//! Trees that only sleep, or wait for an event: the daemon keeps nothing of them in memory, and nobody notices.

use std::fs;

use axed::config::environment::process_environment;
use serde_json::json;

use crate::cluster::{other, spawn};
use crate::support::app::{ApiResponse, TestApp, send};
use crate::support::daemon::Daemon;
use crate::support::events::{assert_complete, count};
use crate::support::eventually;
use crate::support::provider::answer::{ScriptedAnswer, calls, delegates, says};
use crate::support::provider::recorded_request::RecordedRequest;
use crate::telemetry::metrics::Page;
use crate::tools::approvals::{approve, careful, sent, writes};
use crate::tools::wait::{patient, publish, published, result, sleeps, waiting, waits, waits_for};

/// Waits until so many trees are asleep.
async fn asleep(app: &TestApp, trees: f64) {
    let are_asleep = |got: &ApiResponse| Page::read(got).of("axed_runs_asleep") == trees;
    app.get_until("/metrics", are_asleep).await;
}

/// Waits once, and is done then.
fn once(key: &'static str) -> impl Fn(&RecordedRequest) -> ScriptedAnswer {
    move |request| match request.tool_results().is_empty() {
        true => waits_for(key),
        false => says("done"),
    }
}

#[tokio::test]
async fn a_tree_that_sleeps_goes_on_as_if_it_had_been_awake() {
    let app = patient("").spawn().await;
    app.provider.will(
        "planner",
        [delegates([("patient", "go")]), says("all done")],
    );
    app.provider.always("patient", once("17"));
    let id = app.start("planner", "go").await.id().to_owned();
    waits(&app, &id).await;
    let mut followed = app.events_at(&format!("/runs/{id}/events")).await;
    followed.until("wait.started").await;
    asleep(&app, 1.0).await;
    let path = format!("/runs/{id}/messages");
    let message = app.post(&path, &json!({"content": "hurry"})).await;
    assert_eq!(message.status, 202, "{}", message.text);
    let waited = format!("/runs/{id}?wait=60");
    let child = app.find(&id).await.children().await[0].id().to_owned();
    let of_child = format!("/runs/{child}?wait=60");
    let (ended, child_ended, woken) = tokio::join!(
        app.get(&waited),
        app.get(&of_child),
        publish(&app, "17", json!(5))
    );
    assert_eq!(woken, 1);
    assert_eq!(child_ended.json()["status"], "completed");
    assert_eq!(ended.json()["status"], "completed", "{}", ended.text);
    assert_eq!(ended.json()["attempt"], 1);
    let rest = followed.rest().await;
    assert_eq!(count(&rest, "wait.ended"), 1);
    let run = app.find(&id).await;
    let events = run.events().await;
    assert_complete(&events);
    assert_eq!(count(&events, "run.resumed"), 0);
    let child = &run.children().await[0];
    assert_eq!(result(child).await, ("5".to_owned(), false));
    let messages = run.messages().await.to_string();
    assert!(messages.contains("hurry"), "{messages}");
    asleep(&app, 0.0).await;
}

#[tokio::test]
async fn a_tree_sleeps_over_a_kill_and_wakes_at_its_time() {
    let mut app = patient("").spawn().await;
    app.provider.always("patient", |request| {
        match request.tool_results().is_empty() {
            true => sleeps(json!({"seconds": request.user_messages().concat().parse::<u32>().expect("seconds")})),
            false => says("rested"),
        }
    });
    let long = app.start("patient", "1000").await.id().to_owned();
    let short = app.start("patient", "8").await.id().to_owned();
    asleep(&app, 2.0).await;
    app.crash_and_restart().await;
    let run = app.find(&short).await.wait_for_end().await;
    assert_eq!((run.output(), &run["attempt"]), ("rested", &json!(1)));
    // A deploy changes nothing either.
    app.restart().await;
    asleep(&app, 1.0).await;
    let path = format!("/runs/{long}/cancel");
    app.post(&path, &json!({"reason": "enough"})).await;
    let run = app.find(&long).await.wait_for_end().await;
    assert_eq!(
        (run.status(), &run["cancel_reason"]),
        ("cancelled", &json!("enough"))
    );
    asleep(&app, 0.0).await;
}

#[tokio::test]
async fn a_tree_that_also_waits_for_a_person_stays_in_memory() {
    let app = patient("tools = [\"write_file\"]\napprove = [\"write_file\"]\n")
        .spawn()
        .await;
    let both = calls([
        ("sleep", json!({"seconds": 1000})),
        ("write_file", json!({"path": "a", "content": "b"})),
    ]);
    app.provider.will("patient", [both]);
    app.provider.always("patient", once("18"));
    let other = app.start("patient", "go").await.id().to_owned();
    waits(&app, &other).await;
    let id = waiting(&app, "patient").await;
    asleep(&app, 1.0).await;
    let run = app.find(&other).await;
    assert_eq!(run["wait"]["reason"], "approval");
    // Once it is decided, the tree only sleeps.
    let call = run["pending_approvals"][0]["tool_call_id"]
        .as_str()
        .expect("an id")
        .to_owned();
    let path = format!("/runs/{other}/approvals/{call}");
    app.post(&path, &json!({"decision": "deny"})).await;
    asleep(&app, 2.0).await;
    assert_eq!(app.find(&id).await["wait"]["reason"], "event");
}

#[tokio::test]
async fn a_run_that_goes_on_waits_for_the_server_that_it_requires() {
    let server = "[[mcp_servers]]\nname = \"s\"\ntransport = \"stdio\"\ncommand = \"python3\"\nargs = [\"asking.py\"]\n";
    let program = include_str!("mcp/asking.py");
    let path = process_environment().remove("PATH").expect("a PATH");
    let mut app = careful(&format!("{server}required = true\n"))
        .file("asking.py", program)
        .environment("PATH", &path)
        .spawn()
        .await;
    app.provider.will("careful", [writes("a"), says("done")]);
    let (id, request) = sent(&app, "careful").await;
    fs::remove_file(app.path("asking.py")).expect("a file");
    app.crash_and_restart().await;
    approve(&app, &request).await;
    eventually("a failed start", async || {
        app.daemon.log().contains("asking.py").then_some(())
    })
    .await;
    assert_eq!(app.find(&id).await.status(), "waiting");
    app.write("asking.py", program);
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "done");
}

#[tokio::test]
async fn the_next_run_of_a_session_waits_behind_one_that_sleeps() {
    let mut app = patient("").config("[wait]\nlookback = 0").spawn().await;
    app.provider.always("patient", |request| {
        // The conversation has those of the earlier runs.
        match request.tool_results().len() < request.user_messages().len() {
            true => waits_for("17"),
            false => says("done"),
        }
    });
    let body = json!({"input": "go", "session": "s"});
    let first = app
        .start_with("patient", body.clone())
        .await
        .id()
        .to_owned();
    asleep(&app, 1.0).await;
    let second = app
        .start_with("patient", body.clone())
        .await
        .id()
        .to_owned();
    assert_eq!(app.find(&second).await.status(), "queued");
    app.crash_and_restart().await;
    asleep(&app, 1.0).await;
    assert_eq!(app.find(&second).await.status(), "queued");
    assert_eq!(publish(&app, "17", json!(1)).await, 1);
    app.find(&first).await.wait_for_end().await;
    waits(&app, &second).await;
    asleep(&app, 1.0).await;
    // The run that takes its place cancels it, although it sleeps.
    let third = json!({"input": "go", "session": "s", "on_busy": "cancel_previous"});
    let third = app.start_with("patient", third).await.id().to_owned();
    let run = app.find(&second).await.wait_for_end().await;
    assert_eq!(run.status(), "cancelled");
    waits(&app, &third).await;
}

#[tokio::test]
async fn a_child_is_cancelled_while_its_tree_sleeps() {
    let app = patient("").spawn().await;
    app.provider
        .will("planner", [delegates([("patient", "go")]), says("alone")]);
    app.provider.always("patient", once("17"));
    let id = app.start("planner", "go").await.id().to_owned();
    asleep(&app, 1.0).await;
    let child = app.find(&id).await.children().await[0].id().to_owned();
    app.post(&format!("/runs/{child}/cancel"), &json!({})).await;
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "alone");
    assert_eq!(app.find(&child).await.status(), "cancelled");
}

#[tokio::test]
async fn another_node_wakes_what_one_left_asleep() {
    let Some((mut app, url)) = spawn(patient("").config("[wait]\nlookback = 0")).await else {
        return;
    };
    let second = Daemon::start(other(&app, &url, "second")).await;
    app.provider.always("patient", once("17"));
    let woken_here = waiting(&app, "patient").await;
    asleep(&app, 1.0).await;
    let path = format!("/runs/{woken_here}?wait=60");
    let publish_there = async || {
        let body = json!({"event": "order.paid", "key": "17", "data": 1});
        published(
            &send(
                app.client
                    .post(format!("{}/events", second.url))
                    .json(&body),
            )
            .await,
        )
    };
    let (ended, woken) = tokio::join!(app.get(&path), publish_there());
    assert_eq!(
        (ended.json()["status"].clone(), woken),
        (json!("completed"), 1)
    );
    let left = waiting(&app, "patient").await;
    asleep(&app, 1.0).await;
    let cancelled = format!("{}/runs/{left}/cancel", second.url);
    app.daemon.kill().await;
    let answer = send(app.client.post(cancelled).json(&json!({}))).await;
    assert_eq!(answer.status, 202, "{}", answer.text);
    let path = format!("{}/runs/{left}?wait=60", second.url);
    let ended = send(app.client.get(path)).await;
    assert_eq!(ended.json()["status"], "cancelled");
}
