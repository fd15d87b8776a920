//! Trees that only wait for people, times and events: the daemon keeps nothing of them in memory, and nobody notices.

use std::fs;

use axed::config::environment::process_environment;
use serde_json::{Value, json};

use crate::cluster::{other, spawn};
use crate::support::app::{ApiResponse, TestApp, send};
use crate::support::daemon::Daemon;
use crate::support::events::{assert_complete, count};
use crate::support::eventually;
use crate::support::provider::answer::{ScriptedAnswer, calls, delegates, says};
use crate::support::provider::recorded_request::RecordedRequest;
use crate::support::webhook_receiver::WebhookReceiver;
use crate::telemetry::metrics::Page;
use crate::tools::approvals::{approve, careful, decide, sent, writes};
use crate::tools::ask_person::{self, answer, asks, curious, questions};
use crate::tools::wait::{patient, publish, published, result, sleeps, waiting, waits, waits_for};
use crate::webhooks::messages::{daemon, settled, webhook};

/// Waits until so many trees are asleep.
pub async fn asleep(app: &TestApp, trees: f64) {
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
    let waited = format!("/runs/{id}?wait=180");
    let child = app.find(&id).await.children().await[0].id().to_owned();
    let of_child = format!("/runs/{child}?wait=180");
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
    let short = app.start("patient", "30").await.id().to_owned();
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
async fn a_tree_that_waits_for_a_person_sleeps_too() {
    let mut app = careful("[wait]\nenabled = true\nmax = 1000\n")
        .spawn()
        .await;
    let both = calls([
        ("sleep", json!({"seconds": 1000})),
        ("write_file", json!({"path": "here.txt", "content": "b"})),
    ]);
    app.provider.will("careful", [both]);
    let (id, request) = sent(&app, "careful").await;
    asleep(&app, 1.0).await;
    let pending = async |app: &TestApp, count: f64| {
        let are = |got: &ApiResponse| Page::read(got).of("axed_approvals_pending") == count;
        app.get_until("/metrics", are).await;
    };
    pending(&app, 1.0).await;
    // Restarted, it falls asleep again.
    app.crash_and_restart().await;
    asleep(&app, 1.0).await;
    pending(&app, 1.0).await;
    assert_eq!(app.find(&id).await["wait"]["reason"], "approval");
    let page = app.get("/ui/approvals").await.text;
    assert!(page.contains("Replaces"), "{page}");
    let with = |arguments: Value| json!({"decision": "approve", "arguments": arguments});
    let refused = decide(&app, &request, with(json!({"path": 1}))).await;
    assert!(refused.problem(422).contains("path"));
    asleep(&app, 1.0).await;
    let better = json!({"path": "here.txt", "content": "better"});
    assert_eq!(decide(&app, &request, with(better)).await.status, 202);
    let path = format!("/runs/{id}");
    app.get_until(&path, |got| got.json()["wait"]["reason"] == "sleep")
        .await;
    let text = fs::read_to_string(app.path("work/here.txt"));
    assert_eq!(text.expect("a file"), "better");
    asleep(&app, 1.0).await;
    pending(&app, 0.0).await;
}

#[tokio::test]
async fn a_run_that_goes_on_waits_for_the_server_that_it_requires() {
    let server = "[[mcp_servers]]\nname = \"s\"\ntransport = \"stdio\"\ncommand = \"python3\"\nargs = [\"asking.py\"]\nopen_timeout = 120\n";
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
async fn an_answer_wakes_a_tree_and_the_next_one_too() {
    let app = curious("").spawn().await;
    let both = calls([1, 2].map(|n| ("ask_person", json!({"question": format!("{n}?")}))));
    app.provider.will(
        "planner",
        [delegates([("curious", "go")]), says("all done")],
    );
    app.provider.will("curious", [both, says("done")]);
    let id = app.start("planner", "go").await.id().to_owned();
    asleep(&app, 1.0).await;
    for left in [1, 0] {
        let questions = questions(&app, left + 1).await;
        let given = answer(&app, &questions[0], json!({"answer": "yes"})).await;
        assert_eq!(given.status, 202, "{}", given.text);
        if left == 1 {
            asleep(&app, 1.0).await;
        }
    }
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!((run.output(), &run["attempt"]), ("all done", &json!(1)));
    let events = run.events().await;
    assert_complete(&events);
    assert_eq!(count(&events, "input.requested"), 2);
    assert_eq!(count(&events, "input.answered"), 2);
    assert_eq!(count(&events, "run.resumed"), 0);
}

#[tokio::test]
async fn what_clients_do_to_a_tree_that_sleeps_is_sent_to_its_webhooks() {
    let receiver = WebhookReceiver::start().await;
    let events = "events = [\"message.added\", \"run.paused\", \"input.answered\"]\n";
    let settings = format!(
        "[ask]\nenabled = true\n{}\n{events}",
        webhook(&receiver.url("/"))
    );
    let app = daemon().agent("curious", &settings).spawn().await;
    let asks = asks(json!({"question": "Now?"}));
    app.provider.will("curious", [asks, says("done")]);
    let (id, question) = ask_person::waiting(&app, "curious").await;
    asleep(&app, 1.0).await;
    let path = |action: &str| format!("/runs/{id}/{action}");
    let message = json!({"content": "by the way"});
    for (action, body) in [("messages", &message), ("pause", &json!({}))] {
        assert_eq!(app.post(&path(action), body).await.status, 202, "{action}");
    }
    let given = answer(&app, &question, json!({"answer": "yes"})).await;
    assert_eq!(given.status, 202, "{}", given.text);
    app.post(&path("resume"), &json!({})).await;
    assert_eq!(app.find(&id).await.wait_for_end().await.output(), "done");
    let sent = settled(&app, &id, "delivered").await;
    let sent: Vec<_> = sent.iter().map(|it| it["event"].clone()).collect();
    assert_eq!(sent, ["message.added", "run.paused", "input.answered"]);
}

#[tokio::test]
async fn the_time_of_a_person_ends_while_the_tree_sleeps_but_not_during_a_pause() {
    let settings = "ask_timeout = 40\nask_default = \"no\"\n[ask]\nenabled = true\n";
    let app = curious("ask_timeout = 3\nask_default = \"no\"\n")
        .agent("held", settings)
        .spawn()
        .await;
    let asks = || [asks(json!({"question": "Now?"})), says("done")];
    app.provider.will("curious", asks());
    app.provider.will("held", asks());
    let id = app.start("curious", "go").await.id().to_owned();
    let run = app.find(&id).await.wait_for_end().await;
    assert!(result(&run).await.0.contains("no"));

    let id = app.start("held", "go").await.id().to_owned();
    asleep(&app, 1.0).await;
    let held = app.post(&format!("/runs/{id}/pause"), &json!({})).await;
    assert_eq!(held.status, 202, "{}", held.text);
    // It wakes at the time that was recorded, and waits on.
    asleep(&app, 0.0).await;
    let run = app.find(&id).await;
    assert_eq!(
        (run.status(), count(&run.events().await, "input.answered")),
        ("waiting", 0)
    );
    app.post(&format!("/runs/{id}/resume"), &json!({})).await;
    let run = app.find(&id).await.wait_for_end().await;
    assert!(result(&run).await.0.contains("no"));
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
    let path = format!("/runs/{woken_here}?wait=180");
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
    let path = format!("{}/runs/{left}?wait=180", second.url);
    let ended = send(app.client.get(path)).await;
    assert_eq!(ended.json()["status"], "cancelled");
}
