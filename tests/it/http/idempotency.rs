//! A POST with an `Idempotency-Key`, sent again: one run, whatever happens in between.

use futures_util::future::join_all;
use reqwest::{Method, RequestBuilder};
use serde_json::json;

use crate::support::app::{ApiResponse, TestApp, send};
use crate::support::events::{Event, Events};
use crate::support::gate::Gate;
use crate::support::provider::answer::says;
use crate::support::within_timeout;

async fn solo() -> TestApp {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.always("solo", |_| says("done"));
    app
}

fn request(app: &TestApp, path: &str, key: &str, input: &str) -> RequestBuilder {
    app.request(Method::POST, path)
        .header("idempotency-key", key)
        .json(&json!({"input": input}))
}

async fn post(app: &TestApp, path: &str, key: &str, input: &str) -> ApiResponse {
    send(request(app, path, key, input)).await
}

fn id(got: &ApiResponse) -> String {
    got.json()["id"].as_str().expect("an id").to_owned()
}

fn is_replay(got: &ApiResponse) -> bool {
    got.header("idempotency-replayed") == "true"
}

async fn runs(app: &TestApp) -> usize {
    let page = app.get("/runs").await.json();
    page["data"].as_array().expect("data").len()
}

const RUNS: &str = "/agents/solo/runs";

#[tokio::test]
async fn a_repeated_request_returns_the_same_run() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    let gate = Gate::closed();
    app.provider.will("solo", [says("done").after_gate(&gate)]);

    let first = post(&app, RUNS, "k", "go").await;
    assert_eq!((first.status, is_replay(&first)), (202, false));
    app.provider.wait_for_concurrency("solo", 1).await;
    let again = post(&app, RUNS, "k", "go").await;
    assert_eq!((again.status, is_replay(&again)), (202, true));
    assert_eq!(again.json()["status"], "running");
    assert_eq!(
        (id(&again), again.location()),
        (id(&first), first.location())
    );

    let waits = post(&app, "/agents/solo/runs?wait=40", "k", "go");
    let opens = async { gate.open() };
    let (waited, ()) = tokio::join!(waits, opens);
    assert_eq!((waited.status, is_replay(&waited)), (200, true));
    assert_eq!(waited.json()["content"], "done");
    let late = post(&app, RUNS, "k", "go").await;
    assert_eq!((late.status, is_replay(&late)), (200, true));
    assert_eq!(id(&late), id(&first));
    assert_eq!((runs(&app).await, app.provider.requests().len()), (1, 1));
}

#[tokio::test]
async fn another_body_is_refused_and_another_key_or_agent_starts_another_run() {
    let app = TestApp::setup()
        .agent("solo", "")
        .agent("other", "")
        .spawn()
        .await;
    app.provider.always("solo", |_| says("done"));
    app.provider.always("other", |_| says("done"));
    let first = post(&app, RUNS, "k", "go").await;

    let other = post(&app, RUNS, "k", "stop").await;
    assert!(other.problem(422).contains(&id(&first)), "{}", other.text);
    assert_eq!(other.json()["code"], "idempotency_mismatch");
    let text = app
        .request(Method::POST, RUNS)
        .header("idempotency-key", "k")
        .header("content-type", "text/plain")
        .body(r#"{"input":"go"}"#);
    send(text).await.problem(422);
    let none = app
        .request(Method::POST, RUNS)
        .header("idempotency-key", "k");
    send(none).await.problem(422);
    assert_eq!(runs(&app).await, 1);

    for (path, key) in [(RUNS, "K"), ("/agents/other/runs", "k")] {
        let got = post(&app, path, key, "go").await;
        assert_eq!((got.status, is_replay(&got)), (202, false), "{path} {key}");
        assert_ne!(id(&got), id(&first));
    }
    assert_eq!(runs(&app).await, 3);
}

#[tokio::test]
async fn another_spelling_of_the_content_type_is_the_same_request() {
    let app = solo().await;
    let json = [
        "application/json",
        "application/json; charset=utf-8",
        "Application/JSON",
        // Without a type it is JSON.
        "",
    ];
    let text = [
        "text/plain",
        "text/plain;charset=UTF-8",
        "Text/Plain",
        "text/plain; charset=\"utf-8\"",
    ];
    for (key, body, kinds) in [("json", r#"{"input":"go"}"#, json), ("text", "go", text)] {
        let mut first = None;
        for kind in kinds {
            let mut request = app.request(Method::POST, RUNS).body(body);
            if !kind.is_empty() {
                request = request.header("content-type", kind);
            }
            let got = send(request.header("idempotency-key", key)).await;
            assert!(matches!(got.status, 200 | 202), "{kind}: {}", got.text);
            assert_eq!(is_replay(&got), first.is_some(), "{kind}");
            assert_eq!(id(&got), *first.get_or_insert_with(|| id(&got)), "{kind}");
        }
    }
    assert_eq!(runs(&app).await, 2);
}

#[tokio::test]
async fn an_idempotency_key_survives_a_restart() {
    let mut app = solo().await;
    let first = post(&app, "/agents/solo/runs?wait=40", "k", "go").await;
    assert_eq!(first.status, 200, "{}", first.text);

    app.crash_and_restart().await;
    let again = post(&app, RUNS, "k", "go").await;
    assert_eq!((again.status, is_replay(&again)), (200, true));
    assert_eq!(again.json(), first.json());

    app.restart().await;
    let again = post(&app, RUNS, "k", "go").await;
    assert_eq!((again.status, is_replay(&again)), (200, true));
    post(&app, RUNS, "k", "stop").await.problem(422);
    assert_eq!((runs(&app).await, app.provider.requests().len()), (1, 1));
}

#[tokio::test]
async fn fifty_concurrent_requests_start_one_run() {
    let app = solo().await;

    let all = join_all((0..50).map(|_| post(&app, RUNS, "k", "go"))).await;

    for got in &all {
        assert!(matches!(got.status, 200 | 202), "{}", got.text);
        assert_eq!(id(got), id(&all[0]));
    }
    assert_eq!(all.iter().filter(|got| !is_replay(got)).count(), 1);
    app.find(&id(&all[0])).await.wait_for_end().await;
    assert_eq!((runs(&app).await, app.provider.requests().len()), (1, 1));
    // Losing a race is no fault of the daemon's.
    assert!(
        !app.daemon.log().contains("could not"),
        "{}",
        app.daemon.log()
    );
}

#[tokio::test]
async fn concurrent_forks_into_a_session_start_one_run() {
    let app = solo().await;
    let source = app.run("solo", "go").await;
    let path = format!("/runs/{}/fork", source.id());
    let body = json!({"at": {"turn": 1}, "session": "talk"});
    let fork = || {
        let request = app.request(Method::POST, &path);
        send(request.header("idempotency-key", "k").json(&body))
    };

    let all = join_all((0..50).map(|_| fork())).await;

    for got in &all {
        assert!(matches!(got.status, 200 | 202), "{}", got.text);
        assert_eq!(id(got), id(&all[0]));
    }
    assert_eq!(all.iter().filter(|got| !is_replay(got)).count(), 1);
    assert_eq!(runs(&app).await, 2);
}

#[tokio::test]
async fn fifty_concurrent_requests_queue_one_run() {
    let app = TestApp::setup()
        .config("[runs]\nmax_running = 1\nmax_queued = 50")
        .agent("solo", "")
        .spawn()
        .await;
    let gate = Gate::closed();
    app.provider
        .will("solo", [says("first").after_gate(&gate), says("second")]);
    app.start("solo", "before").await;
    app.provider.wait_for_concurrency("solo", 1).await;

    let all = join_all((0..50).map(|_| post(&app, RUNS, "k", "go"))).await;

    for got in &all {
        assert_eq!((got.status, id(got)), (202, id(&all[0])), "{}", got.text);
    }
    assert_eq!(all.iter().filter(|got| !is_replay(got)).count(), 1);
    assert_eq!(
        app.get("/runs?status=queued").await.json()["data"][0]["id"],
        id(&all[0])
    );
    gate.open();
    assert_eq!(
        app.find(&id(&all[0])).await.wait_for_end().await.output(),
        "second"
    );
    assert_eq!((runs(&app).await, app.provider.requests().len()), (2, 2));
}

#[tokio::test]
async fn a_refused_request_does_not_use_the_key() {
    let app = TestApp::setup()
        .config("[runs]\nmax_running = 1\nmax_queued = 1")
        .agent("solo", "")
        .spawn()
        .await;
    let gate = Gate::closed();
    let door = gate.clone();
    app.provider
        .always("solo", move |_| says("done").after_gate(&door));
    app.provider.always("late", |_| says("done"));

    post(&app, "/agents/late/runs", "k", "go")
        .await
        .problem(404);
    let wrong = request(&app, RUNS, "k", "").json(&json!({"inptu": "go"}));
    send(wrong).await.problem(422);
    let model = request(&app, RUNS, "k", "").json(&json!({"model": "nobody/x"}));
    send(model).await.problem(422);
    app.start("solo", "1").await;
    app.start("solo", "2").await;
    post(&app, RUNS, "k", "go").await.problem(429);
    gate.open();
    app.get_until("/runs?status=completed", |got| {
        got.json()["data"]
            .as_array()
            .is_some_and(|data| data.len() == 2)
    })
    .await;

    app.write_agent("late", "");
    app.get_until("/agents/late", |got| got.status == 200).await;
    for path in [RUNS, "/agents/late/runs"] {
        let got = post(&app, path, "k", "go").await;
        assert_eq!((got.status, is_replay(&got)), (202, false), "{}", got.text);
    }
}

#[tokio::test]
async fn a_repeated_request_succeeds_if_a_new_run_would_be_refused() {
    let mut app = TestApp::setup()
        .config("[runs]\nmax_running = 1\nmax_queued = 1")
        .agent("solo", "")
        .spawn()
        .await;
    let gate = Gate::closed();
    let door = gate.clone();
    app.provider
        .always("solo", move |_| says("done").after_gate(&door));
    let first = post(&app, RUNS, "k", "go").await;
    app.start("solo", "2").await;
    app.provider.wait_for_concurrency("solo", 1).await;

    // Full.
    post(&app, RUNS, "new", "go").await.problem(429);
    let again = post(&app, RUNS, "k", "go").await;
    assert_eq!((again.status, id(&again)), (202, id(&first)));

    // Without its agent.
    std::fs::remove_file(app.path("agents/solo.toml")).expect("remove the agent");
    app.get_until("/agents/solo", |got| got.status == 404).await;
    post(&app, RUNS, "new", "go").await.problem(404);
    let again = post(&app, RUNS, "k", "go").await;
    assert_eq!((again.status, id(&again)), (202, id(&first)));

    // Stopping.
    app.daemon.signal("TERM");
    app.get_until("/readyz", |got| got.status == 503).await;
    post(&app, RUNS, "new", "go").await.problem(503);
    let again = post(&app, RUNS, "k", "go").await;
    assert_eq!((again.status, id(&again)), (202, id(&first)));
    gate.open();
    app.daemon.wait_for_exit().await;
}

#[tokio::test]
async fn an_invalid_key_is_named() {
    let app = solo().await;
    for key in ["", "two words", &"k".repeat(256)] {
        let got = post(&app, RUNS, key, "go").await;
        assert!(got.problem(400).contains("Idempotency-Key"), "{}", got.text);
    }
    assert_eq!(runs(&app).await, 0);
    let longest = post(&app, RUNS, &"k".repeat(255), "go").await;
    assert_eq!(longest.status, 202);
}

#[tokio::test]
async fn a_repeated_streaming_request_starts_at_the_first_event() {
    let app = solo().await;
    let stream = || request(&app, RUNS, "k", "go").header("accept", "text/event-stream");
    let listen = async || {
        let response = within_timeout("the stream's head", stream().send())
            .await
            .expect("a head");
        let replayed = response.headers().contains_key("idempotency-replayed");
        let location = response.headers()["location"].clone();
        (replayed, location, Events::new(response).rest().await)
    };

    let (replayed, location, reported) = listen().await;
    let (replayed_again, location_again, told_again) = listen().await;

    assert_eq!((replayed, replayed_again), (false, true));
    assert_eq!(location, location_again);
    let numbered: Vec<Event> = reported
        .into_iter()
        .filter(|event| event.seq() > 0)
        .collect();
    assert_eq!(numbered, told_again);
    assert_eq!((runs(&app).await, app.provider.requests().len()), (1, 1));
}
