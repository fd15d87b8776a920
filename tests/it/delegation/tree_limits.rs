//! Limits that hold by default: runs of one tree, active runs, delegations and calls of one reply.

use std::fs;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::app::TestApp;
use crate::support::events::kinds;
use crate::support::provider::answer::{ScriptedAnswer, calls, delegates, hangs, says};

/// As many delegations of one reply to this agent, all different.
fn many(agent: &str, turn: usize, count: usize) -> ScriptedAnswer {
    calls((0..count).map(|at| {
        let task = format!("task {turn}.{at}");
        ("call_agent", json!({"agent": agent, "task": task}))
    }))
}

/// A line of the daemon's status in KiB.
fn memory(app: &TestApp, what: &str) -> usize {
    let status =
        fs::read_to_string(format!("/proc/{}/status", app.daemon.pid())).expect("a status");
    let line = status.lines().find(|line| line.starts_with(what));
    let number = line.and_then(|line| line.split_whitespace().nth(1));
    number.expect("a number").parse().expect("a number")
}

#[tokio::test]
async fn a_hostile_model_stays_within_the_bounds_and_is_cancelled_promptly() {
    let app = TestApp::setup()
        .environment("AXED_PROVIDERS__ANTHROPIC__MAX_CONCURRENT", "16")
        .agent("worm", "sub_agents = [\"worm\"]")
        .spawn()
        .await;
    // A thousand children a reply, three levels deep, never the same twice, and none ends.
    app.provider
        .always("worm", |seen| match seen.tool_names().is_empty() {
            true => says("done"),
            false => many("worm", seen.turn(), 1000),
        });
    let start = Instant::now();
    let run = app.start("worm", "go").await;
    let path = format!("/runs/{}", run.id());
    let full = app
        .get_until(&path, |got| got.json()["tree"]["runs"] == 1000)
        .await;
    assert_eq!(full.json()["status"], "running");
    assert!(memory(&app, "VmHWM:") < 1 << 20, "more than 1 GiB");
    let filled = start.elapsed();

    let sent = Instant::now();
    let accepted = app.post(&format!("{path}/cancel"), &json!({})).await;
    assert!(accepted.status == 202 || accepted.status == 200);
    let took = sent.elapsed();
    let most = filled.max(Duration::from_secs(20));
    assert!(took < most, "{took:?} after {filled:?}");
    let ended = run.wait_for_end().await;
    assert_eq!(ended.status(), "cancelled");
    assert_eq!(ended["tree"]["runs"], 1000);
}

#[tokio::test]
async fn delegations_of_one_reply_above_the_bound_are_error_results() {
    let app = TestApp::setup()
        .config("[runs]\nmax_delegations = 2")
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .spawn()
        .await;
    app.provider
        .will("planner", [many("reader", 1, 4), says("done")]);
    app.provider.always("reader", |_| says("read"));

    let run = app.run("planner", "go").await;

    assert_eq!(run.output(), "done");
    let sent = app.provider.wait_for_request("planner", 2).await;
    assert_eq!(sent.tool_result_errors(), [false, false, true, true]);
    let refused = "Error: a reply may make at most 2 calls that start sub-agents. This call exceeds the limit and was \
                   not executed. Make fewer calls per reply, and the rest in later replies.";
    assert_eq!(sent.tool_results()[2..], [refused, refused]);
    assert_eq!(
        (&run["tree"]["runs"], &run["tool_calls"]),
        (&json!(3), &json!(2))
    );
    let events = run.events().await;
    let reported = kinds(&events);
    let count = |kind: &str| reported.iter().filter(|it| **it == kind).count();
    assert_eq!((count("tool.started"), count("tool.completed")), (4, 4));
}

#[tokio::test]
async fn calls_of_one_reply_above_the_bound_are_dropped_with_an_error_result() {
    let app = TestApp::setup()
        .config("[runs]\nmax_calls = 2")
        .agent("solo", "tools = [\"list_directory\"]")
        .spawn()
        .await;
    let look = || ("list_directory", json!({}));
    let flood = calls((0..1000).map(|_| look()));
    app.provider.will("solo", [flood, says("done")]);

    let run = app.run("solo", "go").await;

    assert_eq!(run.output(), "done");
    let sent = app.provider.wait_for_request("solo", 2).await;
    assert_eq!(sent.tool_result_errors(), [false, false, true]);
    assert!(
        sent.tool_results()[2].starts_with("Error: a reply may make at most 2 tool calls"),
        "{:?}",
        sent.tool_results()
    );
    assert_eq!(run["tool_calls"], 2);
}

#[tokio::test]
async fn a_tree_keeps_its_run_count_over_a_restart() {
    let mut app = TestApp::setup()
        .config("[runs]\nmax_tree = 3")
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .spawn()
        .await;
    app.provider.will(
        "planner",
        [delegates([("reader", "a")]), delegates([("reader", "b")])],
    );
    app.provider.will("reader", [says("a"), hangs()]);
    let id = app.start("planner", "go").await.id().to_owned();
    app.provider.wait_for_request("reader", 2).await;

    // The next process may send its requests before it is known to have started.
    app.provider.will("reader", [says("b")]);
    app.provider
        .will("planner", [delegates([("reader", "c")]), says("done")]);
    app.crash_and_restart().await;
    let run = app.find(&id).await.wait_for_end().await;

    assert_eq!(run.output(), "done");
    assert_eq!(run["tree"]["runs"], 3);
    let results = app
        .provider
        .requests_for("planner")
        .last()
        .expect("a request")
        .tool_results();
    assert_eq!(
        results.last().map(String::as_str),
        Some(
            "Error: sub-agent \"reader\" failed - the whole task has had 3 runs, the maximum that the server allows. \
             You may retry or proceed without this result."
        )
    );
}

#[tokio::test]
async fn roots_above_the_limit_of_active_runs_wait_and_children_are_error_results() {
    let app = TestApp::setup()
        .config("[runs]\nmax_live = 2")
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .agent("solo", "")
        .spawn()
        .await;
    let gate = crate::support::gate::Gate::closed();
    let first = gate.clone();
    app.provider
        .will("planner", [many("reader", 1, 2), says("done")]);
    app.provider
        .always("reader", move |_| says("read").after_gate(&first));
    app.provider.always("solo", |_| says("alone"));

    let planner = app.start("planner", "go").await;
    app.provider.wait_for_request("reader", 1).await;
    let solo = app.start("solo", "go").await;
    assert_eq!(solo.status(), "queued");
    gate.open();

    assert_eq!(planner.wait_for_end().await.output(), "done");
    assert_eq!(solo.wait_for_end().await.output(), "alone");
    let sent = app.provider.wait_for_request("planner", 2).await;
    let mut errors = sent.tool_result_errors();
    errors.sort_unstable();
    assert_eq!(errors, [false, true]);
    let refused = sent.tool_results().into_iter().find(|it| it != "read");
    assert_eq!(
        refused.as_deref(),
        Some(
            "Error: sub-agent \"reader\" failed - the server has 2 active runs, the maximum that it allows. You may \
             retry or proceed without this result."
        )
    );
}

#[tokio::test]
async fn a_budget_above_the_servers_bound_is_listed_with_a_warning() {
    let app = TestApp::setup()
        .config("[runs]\nmax_tree = 10")
        .agent("planner", "[budget]\nmax_runs = 11")
        .agent("solo", "[budget]\nmax_runs = 10")
        .spawn()
        .await;
    let listed = app.get("/agents").await.json();
    let warnings = |at: usize| listed["data"][at]["warnings"].clone();
    assert_eq!(
        warnings(0),
        json!(["budget.max_runs is 11, but the server lets a tree have 10 runs (runs.max_tree)"])
    );
    assert_eq!(warnings(1), Value::Array(Vec::new()));
}
