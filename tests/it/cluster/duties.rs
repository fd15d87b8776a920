//! What one node does for all, also after its death, and what all nodes share: memories and budgets.

use serde_json::json;

use crate::batches::{accepted, finished, lines, results, send_batch};
use crate::cluster::{other, spawn};
use crate::schedules::{move_back, run_ids, schedule_at, wait_until_seen};
use crate::support::app::{ApiResponse, Setup, TestApp};
use crate::support::daemon::Daemon;
use crate::support::eventually;
use crate::support::gate::Gate;
use crate::support::provider::answer::{hangs, says};
use crate::support::webhook_receiver::WebhookReceiver;
use crate::webhooks::messages::{SECRET, daemon, settled, webhook};
use jiff::SignedDuration;

const HOUR: SignedDuration = SignedDuration::from_hours(1);
const DAY: SignedDuration = SignedDuration::from_hours(24);

/// Two daemons on one database; the app's is the first one, which leads. `None` without a server.
async fn spawn_two(setup: Setup) -> Option<(TestApp, Daemon)> {
    let (app, url) = spawn(setup).await?;
    let mut second = other(&app, &url, "second");
    second.env("HOOK_SECRET", SECRET);
    let second = Daemon::start(second).await;
    Some((app, second))
}

/// Kills the first daemon; the app's is the second one now.
async fn kill_first(app: &mut TestApp, second: Daemon) {
    app.daemon.kill().await;
    app.daemon = second;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_schedule_starts_one_run_at_a_time_also_after_the_leaders_death() {
    let first_time = schedule_at(HOUR, "missed = \"once\"");
    let setup = TestApp::setup().agent("solo", &first_time);
    let Some((mut app, second)) = spawn_two(setup).await else {
        return;
    };
    app.provider.always("solo", |_| says("done"));
    wait_until_seen(&app).await;
    move_back(&app, DAY);
    // Both have to look again.
    app.write_agent("solo", &format!("description = \"a\"\n{first_time}"));
    let is_completed = |page: &ApiResponse| page.json()["data"][0]["status"] == "completed";
    app.get_until("/runs", is_completed).await;
    second.wait_for_log("Agent solo").await;

    let db = app.database();
    let before = db.text("SELECT times FROM schedules");
    kill_first(&mut app, second).await;
    let second_time = schedule_at(HOUR * 2, "missed = \"once\"");
    app.write_agent("solo", &second_time);
    eventually("a new leader", async || {
        (db.text("SELECT times FROM schedules") != before).then_some(())
    })
    .await;
    move_back(&app, DAY);
    app.write_agent("solo", &format!("description = \"b\"\n{second_time}"));
    app.get_until("/runs", |page| page.json()["data"][1].is_object())
        .await;
    for run in run_ids(&app).await {
        assert_eq!(app.find(&run).await.wait_for_end().await.output(), "done");
    }
    assert_eq!(run_ids(&app).await.len(), 2);
    assert_eq!(app.provider.requests_for("solo").len(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn webhooks_of_all_nodes_are_sent_once_also_after_the_leaders_death() {
    let receiver = WebhookReceiver::start().await;
    let setup = daemon().agent("solo", &webhook(&receiver.url("/")));
    let Some((mut app, second)) = spawn_two(setup).await else {
        return;
    };
    app.provider.always("solo", |_| says("done"));
    let first = std::mem::replace(&mut app.daemon, second);
    let run = app.run("solo", "of the second").await.id().to_owned();
    settled(&app, &run, "delivered").await;
    let second = std::mem::replace(&mut app.daemon, first);

    kill_first(&mut app, second).await;
    let run = app.run("solo", "of the second").await.id().to_owned();
    settled(&app, &run, "delivered").await;
    let received = receiver.messages();
    assert_eq!(received.len(), 2);
    assert_ne!(
        received[0].header("webhook-id"),
        received[1].header("webhook-id")
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_memory_belongs_to_all_nodes() {
    let setup = TestApp::setup().agent("solo", "[memory]\nenabled = true");
    let Some((mut app, second)) = spawn_two(setup).await else {
        return;
    };
    app.provider
        .will("solo", [says("It is blue."), says("done")]);
    app.run("solo", "What colour is the sky?").await;
    let _first = std::mem::replace(&mut app.daemon, second);
    app.run("solo", "go").await;
    let prompt = app.provider.wait_for_request("solo", 2).await.system();
    assert!(
        prompt.contains("**Task:** What colour is the sky?\n**Result:** It is blue."),
        "{prompt}"
    );
    let memory = app.get("/agents/solo/memory").await.json();
    assert_eq!(memory["data"][1]["task"], "go", "{memory}");
    assert!(!app.path("data/memory").exists() && !app.path("data-second/memory").exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_one_node_spends_counts_at_the_others_and_alerts_once() {
    let receiver = WebhookReceiver::start().await;
    let setup = daemon().agent("solo", "").config(&format!(
        "[budgets.all]\ntokens = 100\nper = \"month\"\nalert_at = [0.5]\nwebhook = {{ url = \"{}\" }}",
        receiver.url("/alerts")
    ));
    let Some((mut app, second)) = spawn_two(setup).await else {
        return;
    };
    let gate = Gate::closed();
    let door = gate.clone();
    app.provider.always("solo", move |_| {
        says("done").with_usage(40, 20).after_gate(&door)
    });
    let of_first = app.start("solo", "x").await.id().to_owned();
    let first = std::mem::replace(&mut app.daemon, second);
    let of_second = app.start("solo", "y").await.id().to_owned();
    app.provider.wait_for_requests(2).await;
    gate.open();
    for run in [of_second, of_first] {
        app.find(&run).await.wait_for_end().await;
    }
    for daemon in [Some(first), None] {
        app.get_until("/usage", |got| {
            got.json()["budgets"][0]["used_tokens"] == 120
        })
        .await;
        let refused = app.post("/agents/solo/runs", &json!({"input": "z"})).await;
        refused.problem(429);
        assert_eq!(refused.json()["code"], "budget_exhausted");
        if let Some(daemon) = daemon {
            app.daemon = daemon;
        }
    }
    assert_eq!(app.database().count("budget_alerts"), 1);
    assert_eq!(app.database().count("deliveries"), 1);
    receiver.wait_for_messages(1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn old_runs_of_all_nodes_are_removed_also_after_the_leaders_death() {
    let setup = TestApp::setup()
        .agent("solo", "")
        .config("[data.retention]\ncompleted = { age = 1 }");
    let Some((mut app, second)) = spawn_two(setup).await else {
        return;
    };
    app.provider.always("solo", |_| says("done"));
    let first = std::mem::replace(&mut app.daemon, second);
    let run = app.start("solo", "x").await.id().to_owned();
    app.get_until(&format!("/runs/{run}"), |got| got.status == 404)
        .await;
    let second = std::mem::replace(&mut app.daemon, first);
    kill_first(&mut app, second).await;
    let run = app.start("solo", "x").await.id().to_owned();
    app.get_until(&format!("/runs/{run}"), |got| got.status == 404)
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_runs_and_is_cancelled_whichever_node_has_it() {
    let setup = TestApp::setup().agent("solo", "");
    let Some((mut app, second)) = spawn_two(setup).await else {
        return;
    };
    app.provider.always("solo", |_| says("done"));
    let first = std::mem::replace(&mut app.daemon, second);
    let batch = accepted(&send_batch(&app, "a", &lines(20)).await);
    assert_eq!(finished(&app, &batch).await["counts"]["completed"], 20);
    assert_eq!(app.provider.requests_for("solo").len(), 20);

    app.provider.always("solo", |_| hangs());
    let batch = accepted(&send_batch(&app, "b", &lines(3)).await);
    app.provider.wait_for_request("solo", 23).await;
    let cancelled = app
        .post(&format!("/batches/{batch}/cancel"), &json!({}))
        .await;
    assert_eq!(cancelled.status, 202, "{}", cancelled.text);
    assert_eq!(finished(&app, &batch).await["counts"]["cancelled"], 3);

    let batch = accepted(&send_batch(&app, "c", &lines(3)).await);
    app.provider.wait_for_request("solo", 26).await;
    app.provider.always("solo", |_| says("resumed"));
    let second = std::mem::replace(&mut app.daemon, first);
    kill_first(&mut app, second).await;
    assert_eq!(finished(&app, &batch).await["counts"]["completed"], 3);
    for result in results(&app, &batch).await {
        assert_eq!(result["run"]["content"], "resumed", "{result}");
    }
}
