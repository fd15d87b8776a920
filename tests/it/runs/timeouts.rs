//! Deadlines: a run's own, its caller's, and the one set for each call; also while a body is being read.

use serde_json::json;

use crate::support::app::TestApp;
use crate::support::gate::Gate;
use crate::support::provider::answer::{delegates, hangs, says};
use crate::support::provider::recorded_request::Wire;

/// A timeout after so many seconds, at least one of which the model took: on a slow machine not each one.
fn is_at_the_model(message: &str, seconds: u32) -> bool {
    let rest = message.strip_prefix(&format!("timeout after {seconds}s: "));
    let spent = rest.and_then(|rest| rest.strip_suffix("s at the model"));
    spent.is_some_and(|spent| spent.parse::<u32>().is_ok_and(|spent| spent > 0))
}

#[tokio::test]
async fn a_run_past_its_deadline_fails_and_closes_its_connection() {
    let app = TestApp::setup().agent("slow", "timeout = 10").spawn().await;
    app.provider.will("slow", [hangs()]);

    let run = app.run("slow", "go").await;

    let (code, message) = run.failure();
    assert_eq!(code, "timeout");
    assert!(is_at_the_model(message, 10), "{message}");
    assert_eq!(run["error"]["category"], "timeout");
    app.provider.wait_for_disconnects(1).await;
}

#[tokio::test]
async fn the_deadline_applies_while_a_body_is_read() {
    let mut setup = TestApp::setup();
    for wire in Wire::ALL {
        for stream in [false, true] {
            let agent = format!("{}-{stream}", wire.name());
            let model = format!("model = \"{}/{agent}\"", wire.name());
            setup = setup.agent(&agent, &format!("{model}\nstream = {stream}\ntimeout = 20"));
        }
    }
    let app = setup.spawn().await;
    let mut runs = Vec::new();
    for wire in Wire::ALL {
        for stream in [false, true] {
            let agent = format!("{}-{stream}", wire.name());
            app.provider.will(
                &agent,
                [says("never quite said").pausing_at(&Gate::closed())],
            );
            runs.push(app.start(&agent, "go").await);
        }
    }

    for run in runs {
        let run = run.wait_for_end().await;
        assert_eq!(run.failure().0, "timeout", "{run:?}");
    }
    app.provider.wait_for_disconnects(8).await;
}

/// The result of the call, as the caller's model reads it.
fn is_failure_of_slow(result: &str, seconds: u32) -> bool {
    let rest = result.strip_prefix("Error: sub-agent \"slow\" failed - ");
    let why =
        rest.and_then(|rest| rest.strip_suffix(". You may retry or proceed without this result."));
    why.is_some_and(|why| is_at_the_model(why, seconds))
}

#[tokio::test]
async fn each_call_has_the_callers_timeout() {
    let app = TestApp::setup()
        .agent(
            "planner",
            "sub_agents = [\"slow\", \"quick\"]\n[sub_agents_config]\ntimeout = 15",
        )
        .agent("slow", "")
        .agent("quick", "")
        .spawn()
        .await;
    app.provider.will(
        "planner",
        [delegates([("slow", "x"), ("quick", "y")]), says("done")],
    );
    app.provider.will("slow", [hangs()]);
    app.provider.will("quick", [says("quick")]);

    let run = app.run("planner", "go").await;

    assert_eq!(run.output(), "done");
    let reported = app.provider.wait_for_request("planner", 2).await;
    let results = reported.tool_results();
    assert!(is_failure_of_slow(&results[0], 15), "{results:?}");
    assert_eq!(results[1], "quick");
    assert_eq!(reported.tool_result_errors(), [true, false]);
    assert_eq!(run.children().await[0].failure().0, "timeout");
    app.provider.wait_for_disconnects(1).await;
}

#[tokio::test]
async fn a_child_has_its_own_files_timeout() {
    let app = TestApp::setup()
        .agent(
            "planner",
            "sub_agents = [\"slow\"]\n[sub_agents_config]\ntimeout = 60",
        )
        .agent("slow", "timeout = 10")
        .spawn()
        .await;
    app.provider
        .will("planner", [delegates([("slow", "x")]), says("done")]);
    app.provider.will("slow", [hangs()]);

    let run = app.run("planner", "go").await;

    assert_eq!(run.output(), "done");
    let reported = app.provider.wait_for_request("planner", 2).await;
    let results = reported.tool_results();
    assert!(is_failure_of_slow(&results[0], 10), "{results:?}");
}

#[tokio::test]
async fn a_child_never_outlives_its_parents_deadline() {
    let app = TestApp::setup()
        .agent(
            "root",
            "timeout = 20\nsub_agents = [\"middle\"]\n[sub_agents_config]\ntimeout = 60",
        )
        .agent("middle", "timeout = 60\nsub_agents = [\"leaf\"]")
        .agent("leaf", "timeout = 60")
        .spawn()
        .await;
    app.provider.will("root", [delegates([("middle", "x")])]);
    app.provider.will("middle", [delegates([("leaf", "y")])]);
    app.provider.will("leaf", [hangs()]);

    let run = app.run("root", "go").await;

    assert_eq!(run.failure().0, "timeout");
    app.provider.wait_for_disconnects(1).await;
    let middle = &run.children().await[0];
    assert_eq!(middle.failure().0, "timeout");
    assert_eq!(middle.children().await[0].failure().0, "timeout");
}

#[tokio::test]
async fn a_request_can_set_the_deadline() {
    let app = TestApp::setup().agent("slow", "").spawn().await;
    app.provider.will("slow", [hangs()]);

    let run = app.run_with("slow", json!({"timeout": 1})).await;

    assert_eq!(run.failure().0, "timeout");
}

#[tokio::test]
async fn the_server_has_a_default_and_a_maximum_timeout() {
    let app = TestApp::setup()
        .server("default_timeout = 1\nmax_timeout = 1")
        .agent("silent", "")
        .agent("patient", "timeout = 3600")
        .spawn()
        .await;
    app.provider.always("silent", |_| hangs());
    app.provider.always("patient", |_| hangs());

    let silent = app.start("silent", "go").await;
    let patient = app.start("patient", "go").await;

    assert_eq!(silent.wait_for_end().await.failure().0, "timeout");
    assert_eq!(patient.wait_for_end().await.failure().0, "timeout");
}

#[tokio::test]
async fn time_in_the_queue_does_not_count() {
    let app = TestApp::setup()
        .config("[runs]\nmax_running = 1")
        .agent("slow", "timeout = 15")
        .agent("next", "timeout = 15")
        .spawn()
        .await;
    app.provider.will("slow", [hangs()]);
    app.provider.will("next", [says("done")]);
    app.start("slow", "go").await;
    app.provider.wait_for_concurrency("slow", 1).await;

    // It waits for as long as its own deadline is, and still has all of it.
    let next = app.run("next", "go").await;

    assert_eq!(next.output(), "done");
}
