//! Forks that are refused, and what the answer names.

use axed::config::key_hash::KeyHash;
use reqwest::Method;
use serde_json::{Value, json};

use crate::forks::root_runs::lists;
use crate::support::app::{ApiResponse, TestApp, send};
use crate::support::provider::answer::{calls, says};

async fn refuse(app: &TestApp, source: &str, body: &Value) -> Value {
    let response = app.post(&format!("/runs/{source}/fork"), body).await;
    assert!(response.status >= 400, "{}", response.text);
    response.json()
}

#[tokio::test]
async fn an_error_points_to_the_field() {
    let app = TestApp::setup()
        .agent("solo", "tools = [\"list_directory\"]")
        .agent("costly", "[budget]\nmax_cost_usd = 1")
        .config("[prices.\"anthropic/costly\"]\ninput = 1\noutput = 1")
        .spawn()
        .await;
    app.provider.will("solo", [lists("one"), says("two")]);
    app.provider.will("costly", [says("one")]);
    let source = app.run("solo", "go").await.id().to_owned();
    let costly = app.run("costly", "go").await.id().to_owned();
    let elsewhere = json!({"at": {"run": costly}});
    for (body, pointer) in [
        (json!({"at": {"turn": 3}}), "/at/turn"),
        (json!({"at": {"turn": 3, "after": "reply"}}), "/at/turn"),
        (json!({"at": {"turn": 0, "after": "reply"}}), "/at/turn"),
        (json!({"at": {"after": "reply"}}), "/at/turn"),
        (json!({"at": {"turn": -1}}), "/at/turn"),
        (json!({"at": {"after": "call"}}), "/at/after"),
        (json!({"at": {"run": "x"}}), "/at/run"),
        (elsewhere, "/at/run"),
        (
            json!({"edit": {"tool_results": {"a/b": "x"}}}),
            "/edit/tool_results/a~1b",
        ),
        (json!({"edit": {"model": "x"}}), "/edit/model"),
        (json!({"edit": {"max_turns": 51}}), "/edit/max_turns"),
        (json!({"edit": {"message": " "}}), "/edit/message"),
        (
            json!({"edit": {"params": {"top_p": 2}}}),
            "/edit/params/top_p",
        ),
        (json!({"edit": {"reply": {"content": "x"}}}), "/edit/reply"),
        (json!({"edit": {"reply": {}}}), "/edit/reply"),
        (json!({"edit": {"prompt": "x"}}), "/edit/prompt"),
        (json!({"definition": "old"}), "/definition"),
        (json!({"timeout": 1_000_000_000}), "/timeout"),
        (json!({"session": "a/b"}), "/session"),
        (json!({"labels": {"": "x"}}), "/labels"),
        (json!({"webhook": {}}), "/webhook/url"),
        (json!({"input": "go"}), "/input"),
    ] {
        let problem = refuse(&app, &source, &body).await;
        assert_eq!(problem["errors"][0]["pointer"], pointer, "{body} {problem}");
        assert_eq!(problem["status"], 422, "{problem}");
    }
    let body = json!({"at": {"turn": 1}, "edit": {"model": "anthropic/unpriced"}});
    let problem = refuse(&app, &costly, &body).await;
    assert_eq!(problem["errors"][0]["pointer"], "/edit/model");
    assert_eq!(problem["code"], "unpriced_model");
    let body = json!({"edit": {"model": "x"}});
    let problem = refuse(&app, &source, &body).await;
    assert_eq!(problem["code"], "invalid_model");
    assert_eq!(
        app.get("/runs").await.json()["data"]
            .as_array()
            .map(Vec::len),
        Some(2)
    );
}

/// A key's section; the key itself is its name.
fn key(name: &str, rest: &str) -> String {
    let sha256 = KeyHash::digest(name.as_bytes());
    format!("[auth.keys.{name}]\nsha256 = \"{sha256}\"\n{rest}\n")
}

#[tokio::test]
async fn a_key_forks_its_own_runs_only_and_what_an_operator_wrote_is_for_admins() {
    let keys = key("ada", "scopes = [\"run\", \"read\"]")
        + &key("bob", "scopes = [\"run\", \"read\"]")
        + &key("eve", "scopes = [\"read\"]")
        + &key("root", "scopes = [\"admin\", \"run\", \"read\"]");
    let app = TestApp::setup()
        .config(&keys)
        .agent("solo", "")
        .spawn()
        .await;
    app.provider.always("solo", |_| says("ok"));
    let post = async |key: &str, path: &str, body: Value| -> ApiResponse {
        let request = app.request(Method::POST, path);
        send(request.bearer_auth(key).json(&body)).await
    };
    let run = post("ada", "/agents/solo/runs?wait=30", json!({"input": "go"})).await;
    let run = run.json();
    let path = format!("/runs/{}/fork?wait=30", run["id"].as_str().expect("an id"));
    let at = json!({"turn": 1});
    let plain = || json!({"at": at});
    let system = || json!({"at": at, "edit": {"system": "Obey."}});
    let reply =
        || json!({"at": {"turn": 1, "after": "reply"}, "edit": {"reply": {"content": "x"}}});
    for (key, body, status) in [
        ("ada", plain(), 200),
        ("ada", system(), 403),
        ("ada", reply(), 403),
        ("bob", plain(), 404),
        ("eve", plain(), 403),
        ("root", system(), 200),
        ("root", reply(), 200),
    ] {
        let response = post(key, &path, body).await;
        assert_eq!(response.status, status, "{key} {}", response.text);
    }
    let id = run["id"].as_str().expect("an id");
    for path in ["turns", "turns/1", "recording"] {
        for (key, status) in [("ada", 200), ("eve", 404), ("root", 200)] {
            let request = app.request(Method::GET, &format!("/runs/{id}/{path}"));
            let response = send(request.bearer_auth(key)).await;
            assert_eq!(response.status, status, "{key} {path} {}", response.text);
        }
    }
}

#[tokio::test]
async fn a_call_that_had_begun_and_is_not_safe_to_repeat_is_not_forked() {
    let app = TestApp::setup()
        .agent("solo", "tools = [\"run_command\"]\nworkdir = \"work\"")
        .file("work/x", "")
        .config("[tools]\nallow_commands = true")
        .spawn()
        .await;
    let sleeps = calls([("run_command", json!({"command": "sleep 60"}))]);
    app.provider.will("solo", [sleeps, says("other")]);
    let source = app.start("solo", "go").await;
    let mut events = app.events(&source).await;
    events.until("tool.started").await;
    let problem = refuse(&app, source.id(), &json!({})).await;
    assert_eq!(
        (&problem["status"], &problem["code"]),
        (&json!(409), &json!("not_forkable"))
    );
    let detail = problem["detail"].as_str().unwrap_or_default();
    assert!(detail.contains("run_command"), "{detail}");
    // Its result can be given, and an earlier turn can be requested anew.
    let forked = crate::forks::fork(&app, source.id(), &json!({"at": {"turn": 1}})).await;
    assert_eq!(forked.output(), "other");
    source.cancel("enough").await.wait_for_end().await;
}

#[tokio::test]
async fn a_deleted_run_cannot_be_forked() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.will("solo", [says("one")]);
    let run = app.run("solo", "go").await;
    app.delete(&format!("/runs/{}", run.id())).await;
    assert_eq!(refuse(&app, run.id(), &json!({})).await["status"], 404);
}

#[tokio::test]
async fn a_used_up_budget_refuses_forks() {
    let app = TestApp::setup()
        .config("[budgets.all]\ntokens = 50\nper = \"month\"\nalert_at = []")
        .agent("solo", "")
        .spawn()
        .await;
    app.provider.will("solo", [says("one").with_usage(40, 20)]);
    let run = app.run("solo", "go").await;
    let path = format!("/runs/{}/fork", run.id());
    let response = app.post(&path, &json!({"at": {"turn": 1}})).await;
    response.problem(429);
    assert_eq!(response.json()["code"], "budget_exhausted");
    let wait: u64 = response.header("retry-after").parse().expect("seconds");
    assert!(wait > 0);
    assert_eq!(app.provider.requests().len(), 1);
}
