//! Who is let in and when: limits of an agent and of a key, turns between keys, and what outlives a crash.

use std::fs;

use axed::config::key_hash::KeyHash;
use reqwest::Method;
use serde_json::{Value, json};

use crate::support::app::{ApiResponse, Setup, TestApp, send};
use crate::support::eventually;
use crate::support::gate::Gate;
use crate::support::provider::answer::{ScriptedAnswer, calls, delegates, hangs, says};

/// A daemon with two keys, their own names, and an agent.
fn of_ada_and_bob(runs: &str) -> Setup {
    let key = |name: &str| {
        let sha256 = KeyHash::digest(name.as_bytes());
        format!("[auth.keys.{name}]\nsha256 = \"{sha256}\"\nscopes = [\"admin\"]\n")
    };
    TestApp::setup()
        .config(&format!("[runs]\n{runs}\n{}{}", key("ada"), key("bob")))
        .agent("solo", "")
}

async fn post(app: &TestApp, key: &str, path: &str, body: &Value) -> ApiResponse {
    send(app.request(Method::POST, path).bearer_auth(key).json(body)).await
}

async fn get(app: &TestApp, key: &str, path: &str) -> ApiResponse {
    send(app.request(Method::GET, path).bearer_auth(key)).await
}

/// Starts a run with a key; its record as accepted.
async fn start(app: &TestApp, key: &str, input: &str) -> Value {
    let accepted = post(app, key, "/agents/solo/runs", &json!({"input": input})).await;
    assert_eq!(accepted.status, 202, "{}", accepted.text);
    accepted.json()
}

/// Waits for a run's end; its final text.
async fn ended(app: &TestApp, key: &str, run: &Value) -> Value {
    let path = format!("/runs/{}?wait=180", run["id"].as_str().expect("an id"));
    get(app, key, &path).await.json()["content"].clone()
}

/// The requests to the provider, in order.
fn sent(app: &TestApp) -> Vec<String> {
    let seen = app.provider.requests();
    seen.iter()
        .map(|seen| seen.user_messages()[0].clone())
        .collect()
}

/// Says "done" once the gate is open.
fn behind(gate: &Gate) -> impl Fn() -> ScriptedAnswer + Send + Sync + 'static {
    let gate = gate.clone();
    move || says("done").after_gate(&gate)
}

/// A series of the metrics.
async fn metric(app: &TestApp, name: &str) -> String {
    let page = app.get("/metrics").await.text;
    let found = page
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    found.unwrap_or_default().to_owned()
}

/// The requests of one key to a provider do not wait for all those of another one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_take_turns_at_a_provider() {
    let small = "[providers.small]\nkind = \"anthropic\"\nbase_url = \"{provider}\"\napi_key = \"k\"\nmax_concurrent = 1";
    let setup = of_ada_and_bob("").config(small);
    let app = setup.agent("solo", "model = \"small/model\"").spawn().await;
    let gate = Gate::closed();
    let answer = behind(&gate);
    app.provider.always("model", move |_| answer());
    let mut runs = vec![("ada", start(&app, "ada", "ada 0").await)];
    app.provider.wait_for_requests(1).await;
    for n in 1..9 {
        runs.push(("ada", start(&app, "ada", &format!("ada {n}")).await));
    }
    runs.push(("bob", start(&app, "bob", "bob").await));
    for (key, run) in &runs {
        let path = format!("/runs/{}", run["id"].as_str().expect("an id"));
        let is_running = async || {
            let run = get(&app, key, &path).await.json();
            (run["status"] == "running").then_some(())
        };
        eventually("a running run", is_running).await;
    }
    gate.open();
    for (key, run) in &runs {
        assert_eq!(ended(&app, key, run).await, "done");
    }
    let sent = sent(&app);
    assert_ne!(sent.last().map(String::as_str), Some("bob"), "{sent:?}");
}

#[tokio::test]
async fn a_limited_agent_waits_and_others_pass() {
    let app = TestApp::setup()
        .config("[runs]\nmax_running = 2\nmax_queued = 2\n[runs.per_agent]\nplanner = 1")
        .agent("planner", "")
        .agent("solo", "")
        .spawn()
        .await;
    let gate = Gate::closed();
    let answer = behind(&gate);
    app.provider.always("planner", move |_| answer());
    app.provider.always("solo", |_| says("passed"));

    let first = app.start("planner", "1").await;
    let second = app.start("planner", "2").await;
    let third = app.start("planner", "3").await;
    assert_eq!(second.status(), "queued");
    app.provider.wait_for_concurrency("planner", 1).await;
    let refused = app.post("/agents/planner/runs", &json!({})).await;
    refused.problem(429);
    // The queue is full of runs that cannot start; one that can is let in.
    assert_eq!(app.run("solo", "go").await.output(), "passed");

    assert_eq!(second.reload().await.status(), "queued");
    // A run that has ended may be counted for a moment.
    app.get_until("/metrics", |got| got.text.contains("axed_runs_running 1\n"))
        .await;
    assert_eq!(metric(&app, "axed_runs_queued").await, "2");
    assert_eq!(metric(&app, "axed_queue_wait_seconds_count").await, "2");
    gate.open();
    for run in [first, second, third] {
        assert_eq!(run.wait_for_end().await.output(), "done");
    }
    assert_eq!(app.provider.max_concurrency("planner"), 1);
    assert_eq!(metric(&app, "axed_runs_queued").await, "0");
    assert_eq!(metric(&app, "axed_queue_wait_seconds_count").await, "4");
}

#[tokio::test]
async fn an_agents_limit_does_not_apply_to_child_runs() {
    let app = TestApp::setup()
        .config("[runs.per_agent]\nreader = 1")
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .spawn()
        .await;
    app.provider.will("reader", [hangs()]);
    app.provider.always("reader", |_| says("read"));
    app.provider.will(
        "planner",
        [delegates([("reader", "a"), ("reader", "b")]), says("done")],
    );
    let root = app.start("reader", "go").await;
    app.provider.wait_for_concurrency("reader", 1).await;

    assert_eq!(app.run("planner", "go").await.output(), "done");
    assert_eq!(root.cancel("enough").await.status(), "cancelled");
}

#[tokio::test]
async fn a_key_at_its_limit_waits_and_others_pass() {
    let app = of_ada_and_bob("per_key = 1").spawn().await;
    let gate = Gate::closed();
    let answer = behind(&gate);
    app.provider
        .always("solo", move |seen| match seen.user_messages()[0].as_str() {
            "bob" => says("passed"),
            _ => answer(),
        });

    let first = start(&app, "ada", "1").await;
    let second = start(&app, "ada", "2").await;
    app.provider.wait_for_concurrency("solo", 1).await;
    let bob = start(&app, "bob", "bob").await;

    assert_eq!(ended(&app, "bob", &bob).await, "passed");
    let path = format!("/runs/{}", second["id"].as_str().expect("an id"));
    assert_eq!(get(&app, "ada", &path).await.json()["status"], "queued");
    gate.open();
    assert_eq!(ended(&app, "ada", &first).await, "done");
    assert_eq!(ended(&app, "ada", &second).await, "done");
    assert_eq!(sent(&app), ["1", "bob", "2"]);
}

#[tokio::test]
async fn one_keys_backlog_does_not_delay_another_key() {
    let app = of_ada_and_bob("max_running = 1").spawn().await;
    let gate = Gate::closed();
    let answer = behind(&gate);
    app.provider.always("solo", move |_| answer());
    let mut runs = Vec::new();
    for number in 0..=50 {
        runs.push(start(&app, "ada", &number.to_string()).await);
    }
    let bob = start(&app, "bob", "bob").await;
    app.provider.wait_for_concurrency("solo", 1).await;
    gate.open();

    assert_eq!(ended(&app, "bob", &bob).await, "done");
    for run in &runs {
        assert_eq!(ended(&app, "ada", run).await, "done");
    }
    let mut order: Vec<String> = (0..=50).map(|number| number.to_string()).collect();
    order.insert(1, "bob".to_owned());
    assert_eq!(sent(&app), order);
    assert_eq!(app.provider.max_concurrency("solo"), 1);
}

#[tokio::test]
async fn a_refusal_has_the_numbers_of_running_and_queued_runs() {
    let app = TestApp::setup()
        .config("[runs]\nmax_running = 1\nmax_queued = 2")
        .agent("solo", "")
        .spawn()
        .await;
    let gate = Gate::closed();
    let answer = behind(&gate);
    app.provider.always("solo", move |_| answer());
    for input in ["1", "2", "3"] {
        app.start("solo", input).await;
        app.provider.wait_for_concurrency("solo", 1).await;
    }

    let refused = app.post("/agents/solo/runs", &json!({})).await;

    refused.problem(429);
    let body = refused.json();
    assert_eq!(body["code"], "queue_full");
    assert_eq!((&body["running"], &body["queued"]), (&json!(1), &json!(2)));
    let wait = refused.header("retry-after").parse::<u64>();
    assert!(wait.is_ok_and(|wait| wait >= 1), "{:?}", refused.headers);
    gate.open();
}

#[tokio::test]
async fn cancelling_a_queued_run_leaves_no_gap() {
    let app = TestApp::setup()
        .config("[runs]\nmax_running = 1\nmax_queued = 2")
        .agent("solo", "")
        .spawn()
        .await;
    let gate = Gate::closed();
    let answer = behind(&gate);
    app.provider.always("solo", move |_| answer());
    app.start("solo", "1").await;
    let second = app.start("solo", "2").await;
    let third = app.start("solo", "3").await;

    assert_eq!(second.cancel("never mind").await.status(), "cancelled");
    // Its place is free.
    let fourth = app.start("solo", "4").await;
    app.provider.wait_for_concurrency("solo", 1).await;
    gate.open();

    assert_eq!(third.wait_for_end().await.output(), "done");
    assert_eq!(fourth.wait_for_end().await.output(), "done");
    assert_eq!(sent(&app), ["1", "3", "4"]);
}

#[tokio::test]
async fn the_queue_survives_a_crash() {
    let mut app = of_ada_and_bob("max_running = 1\nmax_queued = 4")
        .spawn()
        .await;
    let gate = Gate::closed();
    let answer = behind(&gate);
    app.provider.will("solo", [answer(), hangs()]);
    app.provider.always("solo", |_| says("done"));
    let first = start(&app, "ada", "ada 1").await;
    let mut runs = Vec::new();
    for (key, input) in [
        ("ada", "ada 2"),
        ("ada", "ada 3"),
        ("ada", "ada 4"),
        ("bob", "bob 1"),
    ] {
        runs.push((key, start(&app, key, input).await));
    }
    app.provider.wait_for_concurrency("solo", 1).await;
    gate.open();
    assert_eq!(ended(&app, "ada", &first).await, "done");
    // It was Bob's turn: his run is newer than Ada's and active.
    app.provider.wait_for_request("solo", 2).await;
    runs.push(("bob", start(&app, "bob", "bob 2").await));

    app.crash_and_restart().await;

    for (key, run) in &runs {
        assert_eq!(ended(&app, key, run).await, "done");
    }
    // It resumes first, and the turns continue after it.
    let order = [
        "ada 1", "bob 1", "bob 1", "ada 2", "bob 2", "ada 3", "ada 4",
    ];
    assert_eq!(sent(&app), order);
    assert_eq!(app.provider.max_concurrency("solo"), 1);
}

#[tokio::test]
async fn one_keys_children_leave_other_keys_their_share_of_active_runs() {
    let app = of_ada_and_bob("max_live = 8")
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .spawn()
        .await;
    let gate = Gate::closed();
    let answer = behind(&gate);
    app.provider.will(
        "planner",
        [delegates([("reader", "read"); 9]), says("done")],
    );
    app.provider.always("reader", move |_| answer());
    app.provider.always("solo", |_| says("done"));

    let path = "/agents/planner/runs";
    let planner = post(&app, "ada", path, &json!({"input": "go"})).await;
    // With its root, the shared half and its part of the other half.
    app.provider.wait_for_concurrency("reader", 5).await;
    let waits = start(&app, "ada", "waits").await;
    assert_eq!(waits["status"], "queued");
    let bob = start(&app, "bob", "bob").await;
    assert_eq!(ended(&app, "bob", &bob).await, "done");
    gate.open();

    assert_eq!(ended(&app, "ada", &planner.json()).await, "done");
    assert_eq!(ended(&app, "ada", &waits).await, "done");
    let results = app.provider.requests_for("planner")[1].tool_results();
    let refused = results
        .iter()
        .filter(|it| it.contains("this task's API key is at its current limit"));
    assert_eq!(refused.count(), 4);
}

#[tokio::test]
async fn one_keys_backlog_leaves_other_keys_their_share_of_the_queue() {
    let app = of_ada_and_bob("max_running = 1\nmax_queued = 4")
        .spawn()
        .await;
    let gate = Gate::closed();
    let answer = behind(&gate);
    app.provider.always("solo", move |_| answer());
    let path = "/agents/solo/runs";

    let mut runs = vec![start(&app, "ada", "ada 0").await];
    app.provider.wait_for_concurrency("solo", 1).await;
    for n in 1..4 {
        runs.push(start(&app, "ada", &format!("ada {n}")).await);
    }
    // The shared half, and a part of the other half.
    post(&app, "ada", path, &json!({})).await.problem(429);
    runs.push(start(&app, "bob", "bob").await);
    post(&app, "bob", path, &json!({})).await.problem(429);
    gate.open();

    for run in &runs[..4] {
        assert_eq!(ended(&app, "ada", run).await, "done");
    }
    assert_eq!(ended(&app, "bob", &runs[4]).await, "done");
    assert_eq!(sent(&app)[1], "bob");
}

#[tokio::test]
async fn one_keys_hanging_commands_leave_other_keys_their_share() {
    let app =
        of_ada_and_bob("max_running = 10\n[tools]\nallow_commands = true\nallow_unconfined = true")
            .agent("worker", "workdir = \"work\"\ntools = [\"run_command\"]")
            .file("work/none", "")
            .spawn()
            .await;
    let command = |text: &str| ("run_command", json!({"command": text, "timeout": 600}));
    // Not by `$$`: commands may have process ids of their own.
    let hanging = command("mktemp on-XXXXXX; sleep 600");
    app.provider.will(
        "worker",
        [
            calls(vec![hanging; 80]),
            calls([command("echo ok")]),
            says("done"),
        ],
    );
    let path = "/agents/worker/runs";
    let of_ada = post(&app, "ada", path, &json!({})).await.json();
    // Half of 64, and half of the other half.
    let started = || {
        let entries = fs::read_dir(app.path("work"))
            .expect("a directory")
            .flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        names.filter(|name| name.starts_with("on-")).count()
    };
    eventually("48 running commands", async || {
        (started() >= 48).then_some(())
    })
    .await;

    let of_bob = post(&app, "bob", &format!("{path}?wait=180"), &json!({})).await;

    assert_eq!(of_bob.json()["content"], "done", "{}", of_bob.text);
    assert_eq!(started(), 48);
    let id = of_ada["id"].as_str().expect("an id");
    post(&app, "ada", &format!("/runs/{id}/cancel"), &json!({})).await;
}
