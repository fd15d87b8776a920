//! Conversations over several runs: earlier messages in a request, and sessions that remember them.

use crate::support::app::{ApiResponse, Setup, TestApp, send};
use crate::support::gate::Gate;
use crate::support::provider::answer::{ScriptedAnswer, calls, fails, hangs, says};
use crate::support::provider::recorded_request::{RecordedRequest, Wire};
use crate::support::run::Run;
use axed::config::key_hash::KeyHash;
use reqwest::Method;
use serde_json::{Value, json};

/// A body of the session `talk`.
pub fn talk(input: &str) -> Value {
    json!({"input": input, "session": "talk"})
}

/// As [`talk`], for a busy session.
pub fn busy(input: &str, on_busy: &str) -> Value {
    json!({"input": input, "session": "talk", "on_busy": on_busy})
}

pub async fn solo() -> TestApp {
    TestApp::setup().agent("solo", "").spawn().await
}

/// Answers with how many messages of a user it was sent, behind the gate.
pub fn counts(gate: &Gate) -> impl Fn(&RecordedRequest) -> ScriptedAnswer + Send + Sync + 'static {
    let gate = gate.clone();
    move |seen: &RecordedRequest| {
        says(format!("got {}", seen.user_messages().len())).after_gate(&gate)
    }
}

/// The last message of a user in each request, in order.
pub fn sent_request(app: &TestApp) -> Vec<String> {
    let seen = app.provider.requests();
    let last = |seen: &std::sync::Arc<RecordedRequest>| {
        seen.user_messages().last().cloned().unwrap_or_default()
    };
    seen.iter().map(last).collect()
}

#[tokio::test]
async fn a_session_continues_on_every_wire() {
    for wire in Wire::ALL {
        let name = wire.name();
        let app = TestApp::setup()
            .agent(
                "solo",
                &format!("model = \"{name}/solo\"\nsub_agents = [\"x\"]"),
            )
            .spawn()
            .await;
        app.provider.will(
            "solo",
            [
                calls([("fly", json!({"n": 1})), ("walk", json!({}))]).with_text("let me see"),
                says("one"),
                calls([("fly", json!({"n": 2}))]),
                says("two"),
                says("three"),
            ],
        );
        let first = app.run_with("solo", talk("1")).await;
        let second = app.run_with("solo", talk("2")).await;
        let third = app.run_with("solo", talk("3")).await;

        assert_eq!(third.output(), "three", "{wire:?}");
        let last = app.provider.wait_for_request("solo", 5).await;
        assert_eq!(last.user_messages(), ["1", "2", "3"], "{wire:?}");
        assert_eq!(last.tool_results().len(), 3, "{wire:?}");
        assert_eq!(last.turn(), 5, "{wire:?}");
        // The third run sends the second run's reply again, unchanged.
        let before = app.provider.wait_for_request("solo", 4).await;
        // Marks for a cache move on with the conversation.
        let unmarked = |seen: &RecordedRequest| {
            let mut messages = seen.messages().to_vec();
            let blocks = messages.iter_mut();
            let blocks = blocks.filter_map(|message| message["content"].as_array_mut());
            for block in blocks.flatten().filter_map(|block| block.as_object_mut()) {
                block.shift_remove("cache_control");
            }
            messages
        };
        let (before, after) = (unmarked(&before), unmarked(&last));
        assert_eq!(&after[..before.len()], before, "{wire:?}");
        assert_eq!(after.len(), before.len() + 2, "{wire:?}");
        // The record shows it too.
        let data = third.messages().await["data"].clone();
        let of_second = second.messages().await["data"].clone();
        let of_second = of_second.as_array().expect("data");
        assert_eq!(
            &data.as_array().expect("data")[..of_second.len()],
            &of_second[..]
        );
        let ids: Vec<&str> = of_second
            .iter()
            .filter_map(|message| message["tool_calls"].as_array())
            .flatten()
            .map(|call| call["id"].as_str().expect("an id"))
            .collect();
        let all: std::collections::BTreeSet<_> = ids.iter().collect();
        assert_eq!((ids.len(), all.len()), (3, 3), "{ids:?}");
        assert_eq!(
            first.messages().await["data"].as_array().map(Vec::len),
            Some(4)
        );
        let session = app.get("/sessions/talk").await.json();
        assert_eq!(session["messages"], 10, "{wire:?}");
    }
}

#[tokio::test]
async fn calls_become_text_if_tools_are_no_longer_offered() {
    let app = TestApp::setup()
        .agent("solo", "sub_agents = [\"x\"]")
        .spawn()
        .await;
    app.provider.will(
        "solo",
        [calls([("fly", json!({"n": 1}))]), says("one"), says("two")],
    );
    app.run_with("solo", talk("1")).await;
    app.write_agent("solo", "");
    app.get_until("/agents/solo", |got| got.json()["sub_agents"] == json!([]))
        .await;

    assert_eq!(app.run_with("solo", talk("2")).await.output(), "two");

    let body = app
        .provider
        .wait_for_request("solo", 3)
        .await
        .body
        .to_string();
    assert!(body.contains("[Calls fly with {\\\"n\\\":1}]"), "{body}");
    assert!(!body.contains("tool_use"), "{body}");
}

/// Checks the session's runs, newest first, in pages.
async fn is_listed_in_pages(app: &TestApp, newest: &Run<'_>, oldest: &Run<'_>) {
    let page = app.get("/sessions/talk?limit=2").await.json();
    assert_eq!(page["data"][0]["id"], newest.id());
    assert_eq!(
        (&page["messages"], &page["run"]),
        (&json!(4), &json!(newest.id()))
    );
    let next = page["next_cursor"].as_str().expect("a cursor");
    let rest = app
        .get(&format!("/sessions/talk?cursor={next}"))
        .await
        .json();
    assert_eq!(rest["data"].as_array().map(Vec::len), Some(3));
    assert_eq!(rest["data"][2]["id"], oldest.id());
    assert_eq!(rest["next_cursor"], Value::Null);
    let others = app.get("/sessions/talk?agent=other").await.json();
    assert_eq!(
        (&others["messages"], &others["agent"]),
        (&json!(2), &json!("other"))
    );
    for unknown in ["/sessions/nobody", "/sessions/a%20b"] {
        app.get(unknown).await.problem(404);
    }
    app.get("/sessions/talk?limit=0").await.problem(400);
}

#[tokio::test]
async fn only_completed_runs_are_continued() {
    let app = TestApp::setup()
        .agent("solo", "[retry]\nmax_retries = 0")
        .agent("other", "")
        .spawn()
        .await;
    app.provider.will(
        "solo",
        [
            says("one"),
            fails(400, "no"),
            hangs(),
            says("four"),
            says("five"),
        ],
    );
    app.provider.always("other", |_| says("else"));
    let first = app.run_with("solo", talk("1")).await;
    assert_eq!(app.run_with("solo", talk("2")).await.status(), "failed");
    let third = app.start_with("solo", talk("3")).await;
    app.provider.wait_for_request("solo", 3).await;
    assert_eq!(third.cancel("enough").await.status(), "cancelled");
    // Another agent's conversation of the session is its own, and so is another session's.
    app.run_with("other", talk("else")).await;
    let fourth = app.run_with("solo", talk("4")).await;
    app.run_with("solo", json!({"input": "5", "session": "second"}))
        .await;

    let seen = app.provider.requests_for("solo");
    assert_eq!(seen[3].user_messages(), ["1", "4"]);
    assert_eq!(seen[4].user_messages(), ["5"]);
    assert_eq!(
        app.provider.requests_for("other")[0].user_messages(),
        ["else"]
    );

    is_listed_in_pages(&app, &fourth, &first).await;

    // A run's earlier conversation is in its own record: earlier runs may be deleted.
    for gone in [&first, &third] {
        assert_eq!(
            app.delete(&format!("/runs/{}", gone.id())).await.status,
            204
        );
    }
    app.provider.always("solo", |_| says("six"));
    app.run_with("solo", talk("6")).await;
    assert_eq!(
        app.provider
            .wait_for_request("solo", 6)
            .await
            .user_messages(),
        ["1", "4", "6"]
    );
}

#[tokio::test]
async fn a_long_conversation_is_trimmed_with_a_notice() {
    let app = TestApp::setup()
        .config("[limits]\nsession_messages = 5")
        .agent("solo", "sub_agents = [\"x\"]")
        .spawn()
        .await;
    app.provider.will(
        "solo",
        [
            says("one"),
            calls([("fly", json!({}))]),
            says("two"),
            says("three"),
            says("four"),
        ],
    );
    for input in ["1", "2", "3", "4"] {
        app.run_with("solo", talk(input)).await;
    }

    let notice = "[Earlier messages of this conversation were left out.]\n\n";
    let third = app.provider.wait_for_request("solo", 4).await;
    assert_eq!(
        third.user_messages(),
        [format!("{notice}2"), "3".to_owned()]
    );
    assert_eq!(third.tool_results().len(), 1);
    // The calls of the second run do not fit any more, and nothing of them is left.
    let fourth = app.provider.wait_for_request("solo", 5).await;
    assert_eq!(
        fourth.user_messages(),
        [format!("{notice}3"), "4".to_owned()]
    );
    assert!(fourth.tool_results().is_empty());
    assert!(!fourth.body.to_string().contains("tool_use"));
}

#[tokio::test]
async fn a_recovered_run_keeps_its_initial_conversation() {
    let mut app = TestApp::setup()
        .agent("solo", "sub_agents = [\"x\"]")
        .spawn()
        .await;
    app.provider
        .will("solo", [says("one"), calls([("fly", json!({}))]), hangs()]);
    app.provider.always("solo", |_| says("two"));
    let first = app.run_with("solo", talk("1")).await.id().to_owned();
    let second = app.start_with("solo", talk("2")).await.id().to_owned();
    app.provider.wait_for_request("solo", 3).await;
    let deleted = app.delete(&format!("/runs/{first}")).await;
    assert_eq!(deleted.status, 204);

    app.crash_and_restart().await;

    assert_eq!(app.find(&second).await.wait_for_end().await.output(), "two");
    let before = app.provider.wait_for_request("solo", 3).await.body.clone();
    let after = app.provider.wait_for_request("solo", 4).await;
    assert_eq!(after.user_messages(), ["1", "2"]);
    assert_eq!(after.body, before);
}

pub fn of_ada_and_bob() -> Setup {
    let key = |name: &str, scopes: &str| {
        let sha256 = KeyHash::digest(name.as_bytes());
        format!("[auth.keys.{name}]\nsha256 = \"{sha256}\"\nscopes = [{scopes}]\n")
    };
    let usual = "\"run\", \"read\"";
    TestApp::setup()
        .config(&format!(
            "{}{}{}",
            key("ada", usual),
            key("bob", usual),
            key("root", "\"admin\"")
        ))
        .agent("solo", "")
}

pub async fn by(
    app: &TestApp,
    key: &str,
    method: Method,
    path: &str,
    body: Option<&Value>,
) -> ApiResponse {
    let request = app.request(method, path).bearer_auth(key);
    send(match body {
        Some(body) => request.json(body),
        None => request,
    })
    .await
}

#[tokio::test]
async fn each_key_has_its_own_sessions() {
    let app = of_ada_and_bob().spawn().await;
    app.provider
        .will("solo", [says("hi ada"), hangs(), says("hi bob")]);
    let post = |key: &'static str, body: Value| {
        let app = &app;
        async move {
            by(
                app,
                key,
                Method::POST,
                "/agents/solo/runs?wait=180",
                Some(&body),
            )
            .await
        }
    };
    assert_eq!(post("ada", talk("1")).await.json()["content"], "hi ada");
    for other in ["bob", "root"] {
        by(&app, other, Method::GET, "/sessions/talk", None)
            .await
            .problem(404);
    }
    let path = "/agents/solo/runs";
    by(&app, "ada", Method::POST, path, Some(&talk("2"))).await;
    app.provider.wait_for_request("solo", 2).await;

    // Ada's is busy, Bob's is free and empty.
    let bob = post("bob", busy("bob", "reject")).await;

    assert_eq!(bob.json()["content"], "hi bob");
    assert_eq!(
        app.provider
            .wait_for_request("solo", 3)
            .await
            .user_messages(),
        ["bob"]
    );
    let session = by(&app, "bob", Method::GET, "/sessions/talk", None)
        .await
        .json();
    assert_eq!(session["data"].as_array().map(Vec::len), Some(1));
    post("ada", busy("3", "reject")).await.problem(409);
}

#[tokio::test]
async fn an_idempotent_post_is_queued_once_in_its_session() {
    let app = solo().await;
    let gate = Gate::closed();
    app.provider.always("solo", counts(&gate));
    app.start_with("solo", talk("1")).await;
    let post = |on_busy: &'static str| {
        let request = app.request(Method::POST, "/agents/solo/runs");
        let body = busy("2", on_busy);
        send(
            request
                .header("idempotency-key", format!("k-{on_busy}"))
                .json(&body),
        )
    };
    let (one, two) = tokio::join!(post("queue"), post("queue"));
    assert_eq!(one.json()["id"], two.json()["id"]);
    post("reject").await.problem(409);
    gate.open();
    let path = format!("{}?wait=180", one.location());
    assert_eq!(app.get(&path).await.json()["content"], "got 2");
    // A refused request used no key up.
    let accepted = post("reject").await;
    assert_eq!(accepted.status, 202, "{}", accepted.text);
    assert_eq!(
        app.get("/sessions/talk").await.json()["data"]
            .as_array()
            .map(Vec::len),
        Some(3)
    );
}
