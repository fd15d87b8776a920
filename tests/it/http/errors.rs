//! Errors of the API, beyond those in `config::start` and `hostile::clients`: every refusal names the field
//! and what to do instead.

use reqwest::{Client, Method, Version};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::app::{ApiResponse, TestApp, send};
use crate::support::gate::Gate;
use crate::support::provider::answer::{delegates, says};
use crate::support::within_timeout;

async fn solo() -> TestApp {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.always("solo", |_| says("done"));
    app
}

fn code(got: &ApiResponse) -> String {
    got.json()["code"].as_str().unwrap_or_default().to_owned()
}

#[tokio::test]
async fn an_invalid_field_has_a_pointer() {
    let app = solo().await;
    for (body, pointer, said) in [
        (json!({"inptu": "x"}), "/inptu", "did you mean \"input\"?"),
        (
            json!({"params": {"temprature": 1}}),
            "/params/temprature",
            "did you mean \"temperature\"?",
        ),
        (
            json!({"input": 7}),
            "/input",
            "expected a text, a list of parts, or an object",
        ),
        (json!({"timeout": -1}), "/timeout", "whole number"),
        (json!({"timeout": 1e12 as u64}), "/timeout", "at most"),
        (
            json!({"params": {"stop": ["a", 1]}}),
            "/params/stop/1",
            "expected a string",
        ),
        (
            json!({"params": {"top_p": 2}}),
            "/params/top_p",
            "between 0 and 1",
        ),
        (
            json!({"budget": {"max_cost_usd": -1}}),
            "/budget/max_cost_usd",
            "non-negative",
        ),
        (
            json!({"model": "gpt"}),
            "/model",
            "expected provider/model-name",
        ),
        (json!({"session": "a b"}), "/session", "1 to 64 letters"),
        (json!({"on_busy": "reject"}), "/on_busy", "with a session"),
        (json!({"on_busy": 5}), "/on_busy", "must be a text"),
        (json!({"labels": 5}), "/labels", "expected an object"),
        (json!({"messages": {}}), "/messages", "expected an array"),
    ] {
        let got = app.post("/agents/solo/runs", &body).await;
        got.problem(422);
        let error = got.json()["errors"][0].clone();
        assert_eq!(error["pointer"], pointer, "{}", got.text);
        let detail = error["detail"].as_str().expect("a detail");
        assert!(detail.contains(said), "{detail}");
    }
    assert_eq!(app.get("/runs").await.json()["data"], json!([]));
}

#[tokio::test]
async fn an_invalid_parameter_is_named() {
    let app = solo().await;
    for (path, said) in [
        ("/runs?statsu=failed", "did you mean \"status\"?"),
        ("/runs?status=done", "\"status\""),
        ("/runs?limit=0", "\"limit\""),
        ("/runs?since=yesterday", "\"since\""),
        ("/runs?limit=1&limit=2", "twice"),
        ("/runs?agent=%ff", "UTF-8"),
    ] {
        let detail = app.get(path).await.problem(400);
        assert!(detail.contains(said), "{path}: {detail}");
    }
    let run = app.run("solo", "go").await;
    for (path, said) in [
        ("?wait=soon", "\"wait\""),
        ("?wait=-1", "\"wait\""),
        ("/events?scope=all", "\"scope\""),
        ("/events?after=-1", "\"after\""),
        ("/events?limit=1001", "\"limit\""),
    ] {
        let detail = run.get(path).await.problem(400);
        assert!(detail.contains(said), "{path}: {detail}");
    }
    let prefer = app
        .request(Method::POST, "/agents/solo/runs")
        .header("prefer", "wait=soon");
    assert!(send(prefer).await.problem(400).contains("Prefer"));
}

#[tokio::test]
async fn an_unsupported_content_type_gets_415_with_advice() {
    let app = solo().await;
    let post = |path: &str, kind: &str, body: &'static str| {
        let request = app.request(Method::POST, path).body(body);
        send(request.header("content-type", kind))
    };
    let runs = "/agents/solo/runs";
    let form = post(runs, "application/x-www-form-urlencoded", "{}").await;
    assert!(form.problem(415).contains("content-type: application/json"));
    let latin = post(runs, "text/plain; charset=iso-8859-1", "x").await;
    assert!(latin.problem(415).contains("UTF-8"));
    let text = post("/runs/run_x/cancel", "text/plain", "x").await;
    text.problem(404);
    assert_eq!(
        post(runs, "application/merge-patch+json", "{}")
            .await
            .status,
        202
    );
    let bare = app.request(Method::POST, runs).body("{\"input\": \"x\"}");
    assert_eq!(send(bare).await.status, 202);
    let packed = app
        .request(Method::POST, runs)
        .header("content-encoding", "br")
        .body("x");
    assert!(send(packed).await.problem(415).contains("gzip"));
    let broken = post(runs, "application/json", "{\n  \"input\": \"x\",\n}").await;
    assert!(broken.problem(400).contains("line 3 column 1"));
}

#[tokio::test]
async fn every_response_has_the_clients_request_id_or_a_new_one() {
    let app = solo().await;
    let ask = |path: &str, id: &str| {
        send(
            app.request(Method::GET, path)
                .header("x-request-id", id.to_owned()),
        )
    };
    assert_eq!(
        ask("/agents", "mine-1").await.header("x-request-id"),
        "mine-1"
    );
    let refused = ask("/nowhere?x=1", "mine-2").await;
    assert_eq!(refused.header("x-request-id"), "mine-2");
    assert_eq!(refused.json()["request_id"], "mine-2");
    assert_eq!(refused.json()["instance"], "/nowhere");
    for bad in ["two words", "", &"x".repeat(129)] {
        let id = ask("/agents", bad).await.header("x-request-id").to_owned();
        assert!(!id.is_empty() && id != bad, "{id}");
    }
}

#[tokio::test]
async fn a_wrong_method_gets_405_with_allow_including_head() {
    let app = solo().await;
    let wrong = send(app.request(Method::PATCH, "/runs/run_x")).await;
    wrong.problem(405);
    assert_eq!(wrong.header("allow"), "GET,HEAD,DELETE");
    for path in ["/agents", "/agents/solo", "/runs", "/livez", "/version"] {
        let head = send(app.request(Method::HEAD, path)).await;
        assert_eq!((head.status, head.text.as_str()), (200, ""), "{path}");
    }
    let gone = send(app.request(Method::HEAD, "/agents/ghost")).await;
    assert_eq!(gone.status, 404);
}

#[tokio::test]
async fn malformed_http_gets_a_problem() {
    let app = solo().await;
    let address = app.daemon.url.strip_prefix("http://").expect("a URL");
    let mut stream = TcpStream::connect(address).await.expect("connect");
    stream
        .write_all(b"\x16\x03\x01 hello\r\n\r\n")
        .await
        .expect("sent");
    let mut answer = String::new();
    within_timeout("an answer", stream.read_to_string(&mut answer))
        .await
        .expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
    assert!(answer.contains("application/problem+json"), "{answer}");
    assert!(answer.contains("x-request-id: "), "{answer}");
}

#[tokio::test]
async fn http_2_works_without_tls() {
    let app = solo().await;
    let client = Client::builder()
        .http2_prior_knowledge()
        .build()
        .expect("a client");
    let request = client
        .post(format!("{}/agents/solo/runs?wait=180", app.daemon.url))
        .json(&json!({"input": "go"}));
    let response = within_timeout("an answer", request.send())
        .await
        .expect("an answer");
    assert_eq!(
        (response.status().as_u16(), response.version()),
        (200, Version::HTTP_2)
    );
}

#[tokio::test]
async fn a_cancel_reason_is_recorded_and_bounded() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    let gate = Gate::closed();
    app.provider.will("solo", [says("done").after_gate(&gate)]);
    let run = app.start("solo", "go").await;
    let path = format!("/runs/{}/cancel", run.id());
    let long = json!({"reason": "x".repeat(1001)});
    app.post(&path, &long).await.problem(422);
    app.post(&path, &json!({"why": "x"})).await.problem(422);
    let cancelled = run.cancel("no longer needed").await;
    assert_eq!(cancelled["cancel_reason"], "no longer needed");
    // A terminal run stays as it is.
    let again = app.post(&path, &json!({"reason": "other"})).await;
    assert_eq!(
        (again.status, &again.json()["cancel_reason"]),
        (200, &json!("no longer needed"))
    );
}

#[tokio::test]
async fn children_tree_and_pages_are_consistent() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"a\", \"b\"]")
        .agent("a", "")
        .agent("b", "")
        .spawn()
        .await;
    let gate = Gate::closed();
    app.provider.will(
        "planner",
        [delegates([("a", "first"), ("b", "second")]), says("done")],
    );
    app.provider.will("a", [says("one").after_gate(&gate)]);
    app.provider.will("b", [says("two")]);

    let run = app.start("planner", "go").await;
    app.provider.wait_for_concurrency("a", 1).await;
    let page = run.get("/events").await.json();
    assert!(page["next_after"].is_u64(), "{page}");
    gate.open();
    let run = run.wait_for_end().await;

    let tasks = |runs: &Value| -> Vec<Value> {
        let runs = runs.as_array().expect("runs");
        runs.iter().map(|run| run["task"].clone()).collect()
    };
    let children = run.get("/children").await.json();
    assert_eq!(tasks(&children["data"]), ["first", "second"]);
    assert_eq!(children["data"][0]["content"], "one");
    let tree = run.tree().await;
    assert_eq!(tasks(&tree["children"]), ["first", "second"]);
    assert_eq!(tree["usage"]["tool_calls"], run["tool_calls"]);
    for key in ["duration_ms", "status", "depth", "error", "agent", "id"] {
        assert!(tree["children"][0].get(key).is_some(), "{key}: {tree}");
    }

    let first = run.get("/events?limit=1").await.json();
    assert!(first["next_after"].is_u64(), "{first}");
    let all = run.get("/events?limit=1000").await.json();
    assert_eq!(all["next_after"], Value::Null, "{all}");
    let events = all["data"].as_array().expect("events");
    assert_eq!(run["last_event"], events.len());
    // The header of a client that reconnects wins over the query that it repeats.
    let path = format!("/runs/{}/events?after=0", run.id());
    let again = app
        .request(Method::GET, &path)
        .header("last-event-id", (events.len() - 1).to_string());
    let page = send(again).await.json();
    assert_eq!(page["data"].as_array().map(Vec::len), Some(1));
}

#[tokio::test]
async fn requests_from_other_sites_are_refused() {
    let app = solo().await;
    for (header, value) in [
        ("origin", "https://evil.example"),
        ("sec-fetch-site", "cross-site"),
    ] {
        let page = app
            .request(Method::POST, "/agents/solo/runs")
            .header(header, value)
            .header("content-type", "text/plain")
            .body("spend their money");
        let got = send(page).await;
        assert_eq!((got.status, code(&got)), (403, "cross_site".to_owned()));
    }
    let port = app.daemon.url.rsplit(':').next().expect("a port");
    let rebound = app
        .request(Method::GET, "/runs")
        .header("host", format!("evil.example:{port}"));
    let got = send(rebound).await;
    assert_eq!((got.status, code(&got)), (403, "foreign_host".to_owned()));

    let runs = app.get("/runs").await.json();
    assert_eq!(runs["data"].as_array().map(Vec::len), Some(0), "{runs}");
}
