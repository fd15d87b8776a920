//! What becomes of the lines of a batch.

use std::collections::BTreeSet;

use futures_util::future::join_all;
use serde_json::{Value, json};
use tokio::process::Command;

use axed::config::key_hash::KeyHash;
use reqwest::Method;

use crate::batches::{accepted, finished, lines, results, send_batch};
use crate::support::app::{ApiResponse, Setup, TestApp, send};
use crate::support::daemon::axed_command;
use crate::support::gate::Gate;
use crate::support::provider::answer::{fails, hangs, says};
use crate::support::relay::Relay;
use crate::support::within_timeout;

fn setup() -> Setup {
    TestApp::setup().agent("solo", "[retry]\nmax_retries = 0")
}

/// Replies with the input of the run, except that the provider fails for inputs with "fail".
async fn app() -> TestApp {
    let app = setup().spawn().await;
    app.provider.always("solo", |request| {
        let input = request.user_messages().join("");
        match input.contains("fail") {
            true => fails(400, "refused"),
            false => says(format!("reply to {input}")),
        }
    });
    app
}

#[tokio::test]
async fn each_line_has_its_result_in_the_order_of_the_lines() {
    let app = app().await;
    let body = "{\"input\": \"one\", \"labels\": {\"n\": \"1\"}}\r\n\n{\"input\": \"fail\"}\nno json\n\
                {\"inptu\": \"x\"}\n{\"workdir\": \"/etc\"}\n{\"input\": \"six\"}";
    let batch = send_batch(&app, "k", body).await;
    let id = accepted(&batch);
    assert_eq!(batch.json()["lines"], 6, "the blank line is left out");
    let batch = finished(&app, &id).await;
    assert_eq!(batch["status"], "completed");
    let counts = &batch["counts"];
    assert_eq!(
        [
            &counts["completed"],
            &counts["failed"],
            &counts["rejected"],
            &counts["pending"]
        ],
        [2, 1, 3, 0]
    );
    let results = results(&app, &id).await;
    let statuses: Vec<&Value> = results.iter().map(|it| &it["status"]).collect();
    let expected = [
        "completed",
        "failed",
        "rejected",
        "rejected",
        "rejected",
        "completed",
    ];
    assert_eq!(statuses, expected);
    assert_eq!(results[0]["run"]["content"], "reply to one");
    assert_eq!(results[0]["run"]["labels"], json!({"n": "1"}));
    assert_eq!(results[1]["run"]["error"]["code"], "provider_bad_request");
    assert_eq!(results[2]["problem"]["code"], "invalid_json");
    assert_eq!(results[3]["problem"]["errors"][0]["pointer"], "/inptu");
    assert_eq!(results[3]["run"], Value::Null);
    assert_eq!(results[5]["problem"], Value::Null);
    let listed = app.get("/batches").await.json();
    assert_eq!(listed["data"], json!([batch]));
}

#[tokio::test]
async fn a_batch_is_bounded_and_needs_a_valid_agent() {
    let app = setup().server("max_body = \"1 KiB\"").spawn().await;
    for (body, status) in [
        (String::new(), 422),
        ("\n \n".to_owned(), 422),
        ("{}\n".repeat(10_001)[..4000].to_owned(), 202),
        (lines(300), 413),
    ] {
        let got = send_batch(&app, "k", &body).await;
        assert_eq!(got.status, status, "{}", got.text);
    }
    let long = format!("{{\"input\": \"{}\"}}\n{{}}\n", "x".repeat(1500));
    let id = accepted(&send_batch(&app, "long", &long).await);
    let results = results(&app, &id).await;
    assert_eq!(results[0]["problem"]["code"], "body_too_large");
    let request = app.request(Method::POST, "/agents/nobody/runs:batch");
    send(request.body(lines(1))).await.problem(404);

    let app = setup().spawn().await;
    let got = send_batch(&app, "k", &"{}\n".repeat(10_001)).await;
    assert!(got.problem(422).contains("has 10001"), "{}", got.text);
}

#[tokio::test]
async fn a_page_of_batches_has_a_bound_on_their_lines() {
    let app = app().await;
    // No line of theirs has a run.
    let body = "[]\n".repeat(10_000);
    let mut ids = Vec::new();
    for key in ["a", "b", "c"] {
        ids.push(accepted(&send_batch(&app, key, &body).await));
    }
    let shown = |page: &Value| -> Vec<String> {
        let batches = page["data"].as_array().expect("batches").iter();
        batches
            .map(|batch| batch["id"].as_str().expect("an id").to_owned())
            .collect()
    };
    let first = app.get("/batches").await.json();
    assert_eq!(shown(&first), [&*ids[2], &*ids[1]]);
    let cursor = first["next_cursor"].as_str().expect("a cursor");
    let second = app.get(&format!("/batches?cursor={cursor}")).await.json();
    assert_eq!(shown(&second), [&*ids[0]]);
    assert_eq!(second["next_cursor"], Value::Null);
}

#[tokio::test]
async fn a_repeated_idempotency_key_returns_the_batch_of_the_first_request() {
    let app = app().await;
    let first = send_batch(&app, "k", &lines(3)).await;
    let id = accepted(&first);
    finished(&app, &id).await;
    let second = send_batch(&app, "k", &lines(3)).await;
    assert_eq!(
        (second.status, second.json()["id"].as_str()),
        (200, Some(&*id))
    );
    assert_eq!(second.header("idempotency-replayed"), "true");
    let why = send_batch(&app, "k", &lines(4)).await.problem(422);
    assert!(why.contains("another body"), "{why}");
    assert_ne!(accepted(&send_batch(&app, "k2", &lines(3)).await), id);
}

#[tokio::test]
async fn simultaneous_requests_with_one_key_leave_the_lines_of_one() {
    let app = app().await;
    let body = lines(300);
    let requests = (0..8).map(|_| send_batch(&app, "k", &body));
    let responses = join_all(requests).await;
    let ids = responses.iter().map(|it| it.json()["id"].to_string());
    assert_eq!(ids.collect::<BTreeSet<_>>().len(), 1);
    assert_eq!(app.database().count("batch_lines"), 300);
}

#[tokio::test]
async fn a_cancelled_batch_starts_no_more_runs_and_cancels_those_that_run() {
    let mut app = setup().spawn().await;
    app.provider.always("solo", |_| hangs());
    let id = accepted(&send_batch(&app, "k", &lines(80)).await);
    app.provider.wait_for_concurrency("solo", 50).await;
    let cancel = format!("/batches/{id}/cancel");
    let cancelled = app.post(&cancel, &json!({"reason": "enough"})).await;
    assert_eq!(cancelled.status, 202, "{}", cancelled.text);
    let batch = finished(&app, &id).await;
    assert_eq!(
        (&batch["status"], &batch["counts"]["cancelled"]),
        (&json!("cancelled"), &json!(80))
    );
    let results = results(&app, &id).await;
    assert!(results.iter().all(|it| it["status"] == "cancelled"));
    assert_eq!(results[0]["run"]["cancel_reason"], "enough");
    assert_eq!(results[79]["run"], Value::Null);
    app.restart().await;
    assert_eq!(finished(&app, &id).await, batch);
    assert_eq!(app.post(&cancel, &json!({})).await.status, 200);
    assert_eq!(app.provider.requests().len(), 50);
}

#[tokio::test]
async fn lines_wait_until_the_queue_has_space() {
    let limits = "[runs]\nmax_running = 2\nmax_queued = 2";
    let app = setup().config(limits).spawn().await;
    app.provider.always("solo", |_| says("done"));
    let id = accepted(&send_batch(&app, "k", &lines(30)).await);
    let batch = finished(&app, &id).await;
    assert_eq!(batch["counts"]["completed"], 30, "{batch}");
    assert!(app.provider.max_concurrency("solo") <= 2);
}

#[tokio::test]
async fn deleted_runs_are_named_in_the_results() {
    let app = app().await;
    let id = accepted(&send_batch(&app, "k", &lines(2)).await);
    finished(&app, &id).await;
    let run = results(&app, &id).await[1]["run"]["id"].clone();
    let run = run.as_str().expect("an id");
    assert_eq!(app.delete(&format!("/runs/{run}")).await.status, 204);
    let results = results(&app, &id).await;
    assert_eq!(
        (&results[0]["status"], &results[1]["status"]),
        (&json!("completed"), &json!("deleted"))
    );
}

#[tokio::test]
async fn a_key_sees_only_its_own_batches() {
    let keys = ["ada", "bob", "root"].map(|name| {
        let sha256 = KeyHash::digest(name.as_bytes());
        let scopes = if name == "root" {
            "[\"admin\"]"
        } else {
            "[\"run\", \"read\", \"cancel\"]"
        };
        format!("[auth.keys.{name}]\nsha256 = \"{sha256}\"\nscopes = {scopes}\n")
    });
    let app = setup().config(&keys.concat()).spawn().await;
    app.provider.always("solo", |_| says("done"));
    let send_as = async |key, method, path: String, body: String| -> ApiResponse {
        send(app.request(method, &path).bearer_auth(key).body(body)).await
    };
    let path = "/agents/solo/runs:batch".to_owned();
    let id = accepted(&send_as("ada", Method::POST, path, lines(1)).await);
    for path in ["", "/results"] {
        let path = format!("/batches/{id}{path}");
        for (key, status) in [("ada", 200), ("root", 200), ("bob", 404)] {
            let got = send_as(key, Method::GET, path.clone(), String::new()).await;
            assert_eq!(got.status, status, "{key} {path}");
        }
    }
    let cancel = format!("/batches/{id}/cancel");
    send_as("bob", Method::POST, cancel, String::new())
        .await
        .problem(404);
    let list = send_as("bob", Method::GET, "/batches".to_owned(), String::new()).await;
    assert_eq!(list.json()["data"], json!([]));
}

#[tokio::test]
async fn the_command_prints_results_and_fails_if_a_line_does() {
    let app = app().await;
    let run = async |body: &str| {
        app.write("lines.jsonl", body);
        let home = app.path("");
        let arguments = ["batch", "solo", "lines.jsonl", "--server", &app.daemon.url];
        let mut command: Command = axed_command(&home, &arguments);
        let output = within_timeout("the command", command.output()).await;
        output.expect("an output")
    };
    let good = run(&lines(3)).await;
    let text = String::from_utf8_lossy(&good.stdout);
    assert!(
        good.status.success(),
        "{text}{}",
        String::from_utf8_lossy(&good.stderr)
    );
    let last: Value = serde_json::from_str(text.lines().nth(2).expect("a line")).expect("JSON");
    assert_eq!(
        (&last["index"], &last["run"]["content"]),
        (&json!(2), &json!("reply to line 2"))
    );
    let bad = run("{}\nno json\n").await;
    assert_eq!(bad.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&bad.stderr).contains("1 rejected"));
}

#[tokio::test]
async fn results_that_break_off_are_printed_once() {
    let app = app().await;
    let relay = Relay::start(&app.daemon.url).await;
    app.write("lines.jsonl", &lines(50));
    relay.break_after("reply to line 3");
    let home = app.path("");
    let arguments = ["batch", "solo", "lines.jsonl", "--server", &relay.url];
    let mut command: Command = axed_command(&home, &arguments);
    let output = within_timeout("the command", command.output()).await;
    let output = output.expect("an output");
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{err}");
    assert_eq!(err.matches("; connecting again").count(), 1, "{err}");
    let printed = String::from_utf8_lossy(&output.stdout);
    let printed = printed.lines().map(|line| {
        let result: Value = serde_json::from_str(line).expect("JSON");
        result["index"].as_u64().expect("an index")
    });
    assert_eq!(printed.collect::<Vec<_>>(), Vec::from_iter(0..50));
}

#[tokio::test]
async fn a_client_waits_for_the_end_of_a_batch() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    let gate = Gate::closed();
    let answer = says("done").after_gate(&gate);
    app.provider.always("solo", move |_| answer.clone());
    let id = accepted(&send_batch(&app, "k", &lines(3)).await);
    app.provider.wait_for_request("solo", 3).await;
    let path = format!("/batches/{id}");
    let early = app.get(&format!("{path}?wait=0.1s")).await.json();
    assert_eq!(early["status"], "running");
    let late = format!("{path}?wait=180");
    let (waited, ()) = tokio::join!(app.get(&late), async { gate.open() });
    let waited = waited.json();
    assert_eq!(waited["status"], "completed", "{waited}");
    assert_eq!(waited["counts"]["completed"], 3);
    let refused = app.get(&format!("{path}?wait=soon")).await;
    assert!(refused.problem(400).contains("use seconds"));
}
