//! A daemon that is killed while it accepts or feeds a batch: none is half accepted, none is lost, no line runs twice.

use std::collections::BTreeSet;

use tokio::task::JoinSet;

use crate::batches::{accepted, finished, lines, results, send_batch};
use crate::support::app::TestApp;
use crate::support::eventually;
use crate::support::provider::answer::says;

fn count(app: &TestApp, table: &str) -> i64 {
    app.database().count(table)
}

#[tokio::test]
async fn a_batch_that_is_being_accepted_exists_after_a_kill_only_if_it_is_complete() {
    let mut app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.always("solo", |_| says("done"));
    let body = lines(3000);
    for attempt in 0..3 {
        let url = format!("{}/agents/solo/runs:batch", app.daemon.url);
        let request = app.client.post(url);
        let request = request
            .header("idempotency-key", format!("k{attempt}"))
            .body(body.clone());
        let before = count(&app, "batch_lines");
        let mut sending = JoinSet::new();
        sending.spawn(request.send());
        // In the middle of the lines.
        eventually("lines in the store", async || {
            (count(&app, "batch_lines") > before).then_some(())
        })
        .await;
        app.daemon.kill().await;
        let response = sending.join_next().await.expect("a request");
        let response = response.expect("a response");
        app.restart_after_end().await;
        let listed = app.get("/batches").await.json();
        let batches = listed["data"].as_array().expect("batches");
        let is_accepted = response.is_ok_and(|it| it.status() == 202);
        assert!(!is_accepted || batches.len() == attempt + 1, "{listed}");
        for batch in batches {
            assert_eq!(batch["lines"], 3000);
        }
        // The client sends it again.
        let again = send_batch(&app, &format!("k{attempt}"), &body).await;
        let id = accepted(&again);
        assert_eq!(again.json()["lines"], 3000);
        assert_eq!(results(&app, &id).await.len(), 3000);
        app.post(&format!("/batches/{id}/cancel"), &serde_json::json!({}))
            .await;
        finished(&app, &id).await;
        let listed = app.get("/batches").await.json();
        assert_eq!(
            listed["data"].as_array().expect("batches").len(),
            attempt + 1
        );
    }
}

#[tokio::test]
async fn a_batch_continues_after_kills_and_no_line_has_two_runs() {
    let mut app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.always("solo", |_| says("done"));
    let id = accepted(&send_batch(&app, "k", &lines(300)).await);
    for part in 1..=3 {
        app.provider.wait_for_request("solo", part * 60).await;
        app.crash_and_restart().await;
    }
    let batch = finished(&app, &id).await;
    assert_eq!(batch["counts"]["completed"], 300, "{batch}");
    let results = results(&app, &id).await;
    let runs: BTreeSet<String> = results
        .iter()
        .map(|it| it["run"]["id"].to_string())
        .collect();
    assert_eq!((results.len(), runs.len()), (300, 300));
    assert_eq!(count(&app, "runs"), 300);
    for (index, result) in results.iter().enumerate() {
        assert_eq!(result["run"]["input"], format!("line {index}"));
    }
}
