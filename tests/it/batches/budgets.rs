//! Lines that a used-up budget or a busy session refuses.

use reqwest::Method;
use serde_json::{Value, json};

use crate::batches::{accepted, finished, lines, results, send_batch};
use crate::support::app::{Setup, TestApp, send};
use crate::support::gate::Gate;
use crate::support::provider::answer::says;

const BUDGET: &str = "[budgets.solo]\nmatch = { agent = \"solo\" }\ntokens = 50\nper = \"month\"";

fn setup() -> Setup {
    TestApp::setup().agent("solo", "")
}

#[tokio::test]
async fn a_batch_waits_for_its_budget_and_delays_no_other() {
    let mut app = setup().config(BUDGET).agent("other", "").spawn().await;
    let answer = says("done").with_usage(40, 20);
    app.provider.always("solo", move |_| answer.clone());
    app.provider.always("other", |_| says("done"));
    app.run("solo", "x").await;
    let mut ids = Vec::new();
    // More than may be fed at the same time.
    for key in ["a", "b", "c", "d", "e", "f"] {
        ids.push(accepted(&send_batch(&app, key, &lines(3)).await));
    }
    for id in &ids {
        let why = format!("{id} waits: the budget solo of this month is used up");
        app.daemon.wait_for_log(&why).await;
    }
    let other = app.request(Method::POST, "/agents/other/runs:batch");
    let other = accepted(&send(other.body(lines(3))).await);
    assert_eq!(finished(&app, &other).await["counts"]["completed"], 3);
    for id in &ids {
        let waiting = app.get(&format!("/batches/{id}")).await.json();
        let seen = (&waiting["status"], &waiting["counts"]["pending"]);
        assert_eq!(seen, (&json!("running"), &json!(3)));
    }
    let cancel = format!("/batches/{}/cancel", ids[0]);
    app.post(&cancel, &json!({})).await;
    let cancelled = finished(&app, &ids[0]).await;
    assert_eq!(cancelled["counts"]["cancelled"], 3);

    let file = app.path("config/axed.toml");
    let config = std::fs::read_to_string(file).expect("a file");
    let config = config.replace("tokens = 50", "tokens = 50000");
    app.write("config/axed.toml", &config);
    app.restart().await;
    for id in &ids[1..] {
        assert_eq!(finished(&app, id).await["counts"]["completed"], 3);
    }
}

/// Kills the daemon while the first line's run is at work, as if before the run was recorded for its line.
async fn kill_before_the_start_is_recorded(app: &mut TestApp, line: &str) {
    app.daemon.kill().await;
    let database = app.database();
    let body = database.free_text(line);
    database.execute(&format!("UPDATE batch_lines SET run = NULL, body = {body}"));
    app.restart_after_end().await;
}

async fn assert_one_run(app: &TestApp, batch: &str) {
    let ended = finished(app, batch).await;
    assert_eq!(ended["counts"]["completed"], 1, "{ended}");
    let result: Value = results(app, batch).await.remove(0);
    assert_eq!(result["run"]["input"], "line 0");
}

#[tokio::test]
async fn a_run_from_before_a_kill_is_found_though_its_budget_is_used_up() {
    let mut app = setup().config(BUDGET).spawn().await;
    let gate = Gate::closed();
    let slow = says("done").after_gate(&gate);
    app.provider.always("solo", move |request| {
        match request.user_messages().join("").contains("line") {
            true => slow.clone(),
            false => says("done").with_usage(40, 20),
        }
    });
    let line = lines(1);
    let id = accepted(&send_batch(&app, "k", &line).await);
    app.provider.wait_for_request("solo", 1).await;
    app.run("solo", "x").await;
    kill_before_the_start_is_recorded(&mut app, line.trim()).await;
    gate.open();
    assert_one_run(&app, &id).await;
    assert_eq!(app.database().count("runs"), 2);
}

#[tokio::test]
async fn a_run_from_before_a_kill_is_found_though_it_keeps_its_session_busy() {
    let mut app = setup().spawn().await;
    let gate = Gate::closed();
    let slow = says("done").after_gate(&gate);
    app.provider.always("solo", move |_| slow.clone());
    let line = "{\"input\": \"line 0\", \"session\": \"s\", \"on_busy\": \"reject\"}";
    let id = accepted(&send_batch(&app, "k", line).await);
    app.provider.wait_for_request("solo", 1).await;
    kill_before_the_start_is_recorded(&mut app, line).await;
    app.provider.wait_for_request("solo", 2).await;
    // The line is tried while the run is at work.
    let path = format!("/batches/{id}");
    let is_settled = |counts: &Value| counts["pending"] == 0;
    app.get_until(&path, |got| is_settled(&got.json()["counts"]))
        .await;
    gate.open();
    assert_one_run(&app, &id).await;
    assert_eq!(app.database().count("runs"), 1);
}
