//! Conversations over several runs: earlier messages in a request, and sessions that remember them.

use std::time::Duration;

use axed::config::auth::KeyHash;
use futures_util::future::join_all;
use reqwest::Method;
use rusqlite::Connection;
use serde_json::{Value, json};

use crate::support::app::{ApiResponse, Setup, TestApp, send};
use crate::support::gate::Gate;
use crate::support::provider::answer::{ScriptedAnswer, calls, fails, hangs, says};
use crate::support::provider::recorded_request::{RecordedRequest, Wire};

/// A body of the session `talk`.
fn talk(input: &str) -> Value {
    json!({"input": input, "session": "talk"})
}

/// As [`talk`], where it is busy.
fn busy(input: &str, on_busy: &str) -> Value {
    json!({"input": input, "session": "talk", "on_busy": on_busy})
}

async fn solo() -> TestApp {
    TestApp::setup().agent("solo", "").spawn().await
}

/// Answers with how many messages of a user it was sent, behind the gate.
fn counts(gate: &Gate) -> impl Fn(&RecordedRequest) -> ScriptedAnswer + Send + Sync + 'static {
    let gate = gate.clone();
    move |seen: &RecordedRequest| {
        says(format!("got {}", seen.user_messages().len())).after_gate(&gate)
    }
}

/// The last message of a user in each request, in order.
fn sent_request(app: &TestApp) -> Vec<String> {
    let seen = app.provider.requests();
    let last = |seen: &std::sync::Arc<RecordedRequest>| {
        seen.user_messages().last().cloned().unwrap_or_default()
    };
    seen.iter().map(last).collect()
}

#[tokio::test]
async fn a_session_remembers_on_every_wire() {
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
async fn calls_are_told_as_text_where_no_tools_are_offered_any_more() {
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

#[tokio::test]
async fn only_what_was_completed_is_gone_on_with() {
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

    // The session's runs, newest first, in pages.
    let page = app.get("/sessions/talk?limit=2").await.json();
    assert_eq!(page["data"][0]["id"], fourth.id());
    assert_eq!(
        (&page["messages"], &page["run"]),
        (&json!(4), &json!(fourth.id()))
    );
    let next = page["next_cursor"].as_str().expect("a cursor");
    let rest = app
        .get(&format!("/sessions/talk?cursor={next}"))
        .await
        .json();
    assert_eq!(rest["data"].as_array().map(Vec::len), Some(3));
    assert_eq!(rest["data"][2]["id"], first.id());
    assert_eq!(rest["next_cursor"], Value::Null);
    let others = app.get("/sessions/talk?agent=other").await.json();
    assert_eq!(
        (&others["messages"], &others["agent"]),
        (&json!(2), &json!("other"))
    );
    for unknown in [
        "/sessions/nobody",
        "/sessions/a%20b",
        "/sessions/talk?agent=nobody",
    ] {
        app.get(unknown).await.problem(404);
    }
    app.get("/sessions/talk?limit=0").await.problem(400);

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
async fn runs_of_a_busy_session_wait_in_their_order_and_hold_no_slot() {
    let app = TestApp::setup()
        .config("[runs]\nmax_running = 2\nmax_queued = 3")
        .agent("solo", "")
        .agent("free", "")
        .spawn()
        .await;
    let gate = Gate::closed();
    app.provider.always("solo", counts(&gate));
    app.provider.always("free", |_| says("passed"));
    let mut runs = Vec::new();
    for input in ["1", "2", "3", "4"] {
        runs.push(app.start_with("solo", talk(input)).await);
    }
    app.provider.wait_for_concurrency("solo", 1).await;
    for waiting in &runs[1..] {
        assert_eq!(waiting.reload().await.status(), "queued");
    }
    // They count as waiting, and the second slot is free.
    let refused = app.post("/agents/solo/runs", &talk("5")).await;
    refused.problem(429);
    assert_eq!(refused.json()["queued"], 3);
    assert_eq!(app.run("free", "go").await.output(), "passed");
    let other = app
        .start_with("solo", json!({"input": "other", "session": "other"}))
        .await;
    app.provider.wait_for_concurrency("solo", 2).await;
    gate.open();

    assert_eq!(other.wait_for_end().await.output(), "got 1");
    for (run, received) in runs.iter().zip(1..) {
        assert_eq!(run.wait_for_end().await.output(), format!("got {received}"));
    }
    let order: Vec<_> = sent_request(&app)
        .into_iter()
        .filter(|said| said.len() == 1)
        .collect();
    assert_eq!(order, ["1", "2", "3", "4"]);
    let all = runs[3].messages().await;
    assert_eq!(all["data"].as_array().map(Vec::len), Some(8));
}

#[tokio::test]
async fn a_run_that_is_cancelled_while_it_waits_lets_nobody_pass() {
    let app = solo().await;
    let gate = Gate::closed();
    app.provider.always("solo", counts(&gate));
    let first = app.start_with("solo", talk("1")).await;
    let second = app.start_with("solo", talk("2")).await;
    let third = app.start_with("solo", talk("3")).await;
    app.provider.wait_for_concurrency("solo", 1).await;

    assert_eq!(second.cancel("never mind").await.status(), "cancelled");
    assert_eq!(third.reload().await.status(), "queued");
    gate.open();

    assert_eq!(first.wait_for_end().await.output(), "got 1");
    assert_eq!(third.wait_for_end().await.output(), "got 2");
    assert_eq!(sent_request(&app), ["1", "3"]);
}

#[tokio::test]
async fn a_busy_session_refuses_no_repetition() {
    let app = solo().await;
    app.provider.always("solo", |_| says("done"));
    for number in 0..30 {
        let body = json!({"input": "1", "session": format!("s{number}"), "on_busy": "reject"});
        let posts = (0..8).map(|_| {
            let request = app.request(Method::POST, "/agents/solo/runs");
            let key = format!("k{number}");
            send(request.header("idempotency-key", key).json(&body))
        });
        let got = join_all(posts).await;
        for post in &got {
            assert!(post.status < 300, "{}", post.text);
            assert_eq!(post.json()["id"], got[0].json()["id"]);
        }
    }
}

#[tokio::test]
async fn a_busy_session_may_refuse() {
    let app = solo().await;
    let gate = Gate::closed();
    app.provider.always("solo", counts(&gate));
    let first = app.start_with("solo", talk("1")).await;

    let refused = app.post("/agents/solo/runs", &busy("2", "reject")).await;

    let detail = refused.problem(409);
    assert!(detail.contains(first.id()), "{detail}");
    assert_eq!(refused.json()["code"], "session_busy");
    gate.open();
    first.wait_for_end().await;
    // Who knows of the end finds the session free, however often.
    for received in 2..30 {
        let next = app.run_with("solo", busy("x", "reject")).await;
        assert_eq!(next.output(), format!("got {received}"));
    }
}

#[tokio::test]
async fn those_before_may_be_cancelled() {
    let app = solo().await;
    app.provider.will("solo", [says("zero"), hangs()]);
    app.provider.always("solo", |seen| {
        says(format!("got {}", seen.user_messages().len()))
    });
    app.run_with("solo", talk("0")).await;
    let first = app.start_with("solo", talk("1")).await;
    let second = app.start_with("solo", talk("2")).await;
    app.provider.wait_for_request("solo", 2).await;

    let third = app.run_with("solo", busy("3", "cancel_previous")).await;

    assert_eq!(third.output(), "got 2");
    for run in [&first, &second] {
        let ended = run.wait_for_end().await;
        assert_eq!(ended.status(), "cancelled");
        let reason = ended["cancel_reason"]
            .as_str()
            .expect("a reason")
            .to_owned();
        assert_eq!(
            reason,
            format!("{} takes its place in the session", third.id())
        );
    }
    assert_eq!(sent_request(&app), ["0", "1", "3"]);
    // A free session has nobody to cancel.
    let fourth = app.run_with("solo", busy("4", "cancel_previous")).await;
    assert_eq!(fourth.output(), "got 3");
}

#[tokio::test]
async fn a_run_that_cannot_cancel_those_before_is_not_accepted() {
    let app = solo().await;
    let gate = Gate::closed();
    app.provider.will("solo", [says("first").after_gate(&gate)]);
    let first = app.start_with("solo", talk("1")).await;
    app.provider.wait_for_request("solo", 1).await;
    let db = Connection::open(app.path("data/axed.db")).expect("the store");
    db.busy_timeout(Duration::from_secs(10)).expect("a timeout");
    db.execute_batch(
        "CREATE TRIGGER full BEFORE INSERT ON entries WHEN new.events LIKE '%run.cancelling%' \
         BEGIN SELECT RAISE(ABORT, 'the disk is full'); END",
    )
    .expect("a trigger");

    // Both are in one transaction: a daemon that dies between the two cannot lose one of them.
    let path = "/agents/solo/runs";
    let refused = app.post(path, &busy("2", "cancel_previous")).await;

    refused.problem(503);
    gate.open();
    assert_eq!(first.wait_for_end().await.output(), "first");
}

#[tokio::test]
async fn the_order_of_a_session_outlives_a_crash() {
    let mut app = solo().await;
    app.provider.will("solo", [says("zero"), hangs()]);
    app.provider.always("solo", |seen| {
        says(format!("got {}", seen.user_messages().len()))
    });
    app.run_with("solo", talk("0")).await;
    let mut runs = Vec::new();
    for input in ["1", "2", "3"] {
        let run = app.start_with("solo", talk(input)).await;
        runs.push(run.id().to_owned());
    }
    app.provider.wait_for_request("solo", 2).await;

    app.crash_and_restart().await;

    for (id, received) in runs.iter().zip(2..) {
        let ended = app.find(id).await.wait_for_end().await;
        assert_eq!(ended.output(), format!("got {received}"));
    }
    assert_eq!(sent_request(&app), ["0", "1", "1", "2", "3"]);
    assert_eq!(app.provider.max_concurrency("solo"), 1);
    assert_eq!(app.get("/sessions/talk").await.json()["messages"], 8);
}

#[tokio::test]
async fn a_stop_lets_no_run_of_a_session_overtake() {
    let mut app = TestApp::setup()
        .server("drain_timeout = 0")
        .agent("solo", "")
        .spawn()
        .await;
    app.provider.will("solo", [hangs()]);
    app.provider.always("solo", |seen| {
        says(format!("got {}", seen.user_messages().len()))
    });
    let mut runs = Vec::new();
    for input in ["1", "2", "3"] {
        let run = app.start_with("solo", talk(input)).await;
        runs.push(run.id().to_owned());
    }
    app.provider.wait_for_request("solo", 1).await;

    app.restart().await;

    for (id, received) in runs.iter().zip(1..) {
        let ended = app.find(id).await.wait_for_end().await;
        assert_eq!(ended.output(), format!("got {received}"));
    }
    assert_eq!(sent_request(&app), ["1", "1", "2", "3"]);
}

#[tokio::test]
async fn a_recovered_run_goes_on_with_the_conversation_that_it_began_with() {
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

fn of_ada_and_bob() -> Setup {
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

async fn by(
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
async fn keys_have_sessions_of_their_own() {
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
                "/agents/solo/runs?wait=30",
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
async fn an_idempotent_post_takes_one_place_in_its_session() {
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
    let path = format!("{}?wait=30", one.location());
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

#[tokio::test]
async fn earlier_messages_of_a_request_come_first_on_every_wire() {
    let earlier = json!([
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "hm", "tool_calls": [
            {"id": "a", "name": "fly", "arguments": {"n": 1}},
            {"id": "b.2", "name": "walk"},
        ]},
        {"role": "tool", "tool_results": [
            {"call_id": "b.2", "content": "walked", "is_error": true},
            {"call_id": "a", "content": "flown"},
        ]},
        {"role": "assistant", "content": "one"},
    ]);
    for wire in Wire::ALL {
        let name = wire.name();
        let app = TestApp::setup()
            .agent(
                "solo",
                &format!("model = \"{name}/solo\"\nsub_agents = [\"x\"]"),
            )
            .spawn()
            .await;
        app.provider
            .will("solo", [calls([("fly", json!({}))]), says("two")]);

        let run = app
            .run_with("solo", json!({"input": "2", "messages": earlier}))
            .await;

        assert_eq!(run.output(), "two");
        let first = app.provider.wait_for_request("solo", 1).await;
        assert_eq!(first.user_messages(), ["1", "2"], "{wire:?}");
        assert_eq!(first.tool_results(), ["flown", "walked"], "{wire:?}");
        let said = &first.body["messages"];
        match wire {
            Wire::Anthropic => {
                assert_eq!(said[1]["content"][1]["id"], "a");
                assert_eq!(said[1]["content"][2]["id"], "b_2");
                assert_eq!(said[2]["content"][1]["tool_use_id"], "b_2");
                assert_eq!(first.tool_result_errors(), [false, true]);
            }
            Wire::Openai => {
                assert_eq!(said[1]["tool_calls"][1]["id"], "b.2");
                assert_eq!(said[1]["tool_calls"][1]["function"]["arguments"], "{}");
                assert_eq!(said[3]["tool_call_id"], "b.2");
            }
            Wire::Responses => {
                let said = &first.body["input"];
                assert_eq!(said[2]["call_id"], "a");
                assert_eq!(said[3]["call_id"], "b_2");
                assert_eq!(said[3]["arguments"], "{}");
                assert_eq!(said[5]["call_id"], "b_2");
            }
            Wire::Ollama => assert_eq!(said[3]["tool_name"], "walk"),
        }
        // What is shown can be sent again.
        let shown = run.messages().await["data"].clone();
        assert_eq!(shown.as_array().map(Vec::len), Some(8));
        assert_eq!(shown[2]["tool_results"][0]["call_id"], "a");
        app.provider.will("solo", [says("three")]);
        let again = json!({"input": "3", "messages": shown});
        assert_eq!(app.run_with("solo", again).await.output(), "three");
        assert_eq!(
            app.provider
                .wait_for_request("solo", 3)
                .await
                .user_messages(),
            ["1", "2", "3"]
        );
    }
}

#[tokio::test]
async fn earlier_messages_of_a_queued_run_outlive_a_crash() {
    let mut app = TestApp::setup()
        .config("[runs]\nmax_running = 1")
        .agent("solo", "")
        .spawn()
        .await;
    app.provider.will("solo", [hangs()]);
    app.provider.always("solo", |seen| {
        says(format!("got {}", seen.user_messages().len()))
    });
    app.start("solo", "first").await;
    let body = json!({"input": "2", "messages": [{"role": "user", "content": "1"}]});
    let queued = app.start_with("solo", body).await;
    let shown = queued.messages().await["data"].clone();
    assert_eq!(shown.as_array().map(Vec::len), Some(2));
    let id = queued.id().to_owned();

    app.crash_and_restart().await;

    assert_eq!(app.find(&id).await.wait_for_end().await.output(), "got 2");
}

#[tokio::test]
async fn a_bad_order_is_refused_with_its_index() {
    let app = solo().await;
    let user = json!({"role": "user", "content": "go"});
    let said = json!({"role": "assistant", "content": "done"});
    let call = |ids: &[&str]| {
        let calls: Vec<Value> = ids
            .iter()
            .map(|id| json!({"id": id, "name": "t"}))
            .collect();
        json!({"role": "assistant", "tool_calls": calls})
    };
    let results = |ids: &[&str]| {
        let results: Vec<Value> = ids
            .iter()
            .map(|id| json!({"call_id": id, "content": ""}))
            .collect();
        json!({"role": "tool", "tool_results": results})
    };
    let bad_arguments = |arguments: Value| json!([user, {"role": "assistant", "tool_calls": [{"id": "a", "name": "t", "arguments": arguments}]}]);
    for (messages, at, why) in [
        (json!([said]), "0", "first message is a user's"),
        (json!([results(&["a"])]), "0", "does not follow a reply"),
        (json!([user, said, said]), "2", "follows another reply"),
        (
            json!([user, said, results(&["a"])]),
            "2",
            "does not follow a reply",
        ),
        (json!([user, call(&["a"])]), "1", "no result"),
        (
            json!([user, call(&["a"]), user]),
            "2",
            "before the result of the call \"a\"",
        ),
        (json!([user, call(&["a"]), said]), "2", "before the result"),
        (
            json!([user, call(&["a", "b"]), results(&["a"])]),
            "2",
            "no result for the call \"b\"",
        ),
        (
            json!([user, call(&["a"]), results(&["a", "a"])]),
            "2",
            "two results",
        ),
        (
            json!([user, call(&["a"]), results(&["a", "c"])]),
            "2",
            "answers \"c\"",
        ),
        (
            json!([user, call(&["a"]), results(&["a"]), results(&["a"])]),
            "3",
            "does not follow",
        ),
        (
            json!([user, call(&["a", "a"])]),
            "1",
            "two calls with the id",
        ),
        (json!([user, call(&[""])]), "1", "not empty"),
        (json!([user, {"role": "assistant"}]), "1", "needs a content"),
        (
            json!([{"role": "user", "content": " "}]),
            "0",
            "needs a content",
        ),
        (
            json!([{"role": "user", "content": "x", "tool_calls": []}]),
            "0",
            "no tool_calls",
        ),
        (
            json!([user, {"role": "assistant", "content": "x", "tool_results": []}]),
            "1",
            "no tool_results",
        ),
        (
            json!([user, call(&["a"]), {"role": "tool", "content": "x"}]),
            "2",
            "no content",
        ),
        (bad_arguments(json!([1])), "1", "no object"),
        (
            json!([user, {"role": "system", "content": "x"}]),
            "1/role",
            "unknown variant",
        ),
        (
            json!([user, {"role": "user", "text": "x"}]),
            "1/text",
            "unknown field",
        ),
        (json!([user, "go"]), "1", "expected"),
    ] {
        let got = app
            .post("/agents/solo/runs", &json!({"messages": messages}))
            .await;
        got.problem(422);
        let error = got.json()["errors"][0].clone();
        assert_eq!(error["pointer"], format!("/messages/{at}"), "{}", got.text);
        let detail = error["detail"].as_str().expect("a detail");
        assert!(detail.contains(why), "{detail}");
    }
    let body = json!({"messages": bad_arguments(json!("DEEP"))}).to_string();
    let deep = format!(
        "{}{}",
        "{\"a\":".repeat(200),
        "1".to_owned() + &"}".repeat(200)
    );
    let request = app.request(Method::POST, "/agents/solo/runs");
    let request = request.header("content-type", "application/json");
    let got = send(request.body(body.replace("\"DEEP\"", &deep))).await;
    assert!(got.problem(422).contains("128 levels"), "{}", got.text);
    let both = json!({"session": "talk", "messages": [user]});
    let got = app.post("/agents/solo/runs", &both).await;
    got.problem(422);
    assert_eq!(got.json()["errors"][0]["pointer"], "/messages");
    assert!(app.provider.requests().is_empty());
}
