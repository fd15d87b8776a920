//! The turn loop: when it ends, what it sends, what it refuses, and how it guards itself.

use serde_json::json;

use crate::support::app::TestApp;
use crate::support::events::kinds;
use crate::support::provider::answer::{calls, delegates, says};

#[tokio::test]
async fn a_reply_without_calls_is_the_runs_content() {
    let app = TestApp::setup()
        .agent("solo", "system_prompt = \"Be brief.\"")
        .spawn()
        .await;
    app.provider.will(
        "solo",
        [says("hello")
            .with_usage(7, 3)
            .with_stop_reason("end_turn")
            .with_model("solo-2026")],
    );

    let run = app.run("solo", "greet me").await;

    assert_eq!(run.output(), "hello");
    assert_eq!(run["model"], "solo-2026");
    assert_eq!(run["stop_reason"], "end_turn");
    assert_eq!(run["turns"], 1);
    assert_eq!(run.usage(), (7, 3, 0));
    let sent_request = app.provider.wait_for_request("solo", 1).await;
    assert_eq!(sent_request.system(), "Be brief.");
    assert_eq!(sent_request.user_messages(), ["greet me"]);
    assert!(
        sent_request.body.get("tools").is_none(),
        "{:?}",
        sent_request.body
    );
    assert_eq!(
        kinds(&run.events().await),
        [
            "run.queued",
            "run.started",
            "turn.started",
            "turn.completed",
            "run.completed"
        ]
    );
}

#[tokio::test]
async fn a_reply_cut_by_the_token_limit_completes_with_that_reason() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider
        .will("solo", [says("half a sent").with_stop_reason("max_tokens")]);

    let run = app.run("solo", "go").await;

    assert_eq!(run.output(), "half a sent");
    assert_eq!(run["stop_reason"], "max_tokens");
}

#[tokio::test]
async fn tool_calls_are_executed_whatever_the_stop_reason() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .spawn()
        .await;
    app.provider.will(
        "planner",
        [
            delegates([("reader", "read")]).with_stop_reason("end_turn"),
            says("done"),
        ],
    );
    app.provider.will("reader", [says("read")]);

    let run = app.run("planner", "go").await;

    assert_eq!(run.output(), "done");
    assert_eq!(run["tree"]["runs"], 2);
}

#[tokio::test]
async fn a_run_out_of_turns_fails_and_keeps_its_last_text() {
    let app = TestApp::setup()
        .agent(
            "planner",
            "sub_agents = [\"reader\"]\n[limits]\nmax_turns = 2",
        )
        .agent("reader", "")
        .spawn()
        .await;
    app.provider.will(
        "planner",
        [
            delegates([("reader", "one")]).with_text("first"),
            delegates([("reader", "two")]).with_text("second"),
        ],
    );
    app.provider.always("reader", |_| says("read"));

    let run = app.run("planner", "go").await;

    assert_eq!(
        run.failure(),
        ("max_turns", "agent exceeded maximum conversation turns (2)")
    );
    assert_eq!(run["error"]["category"], "agent");
    assert_eq!(run["partial_content"], "second");
    assert_eq!(run["content"], json!(null));
    assert_eq!(run["turns"], 2);
    assert_eq!(
        run["tool_calls"], 1,
        "the last turn's calls are not performed"
    );
    assert_eq!(app.provider.requests_for("reader").len(), 1);
}

#[tokio::test]
async fn a_tool_that_is_not_offered_is_unknown() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .spawn()
        .await;
    app.provider.will(
        "planner",
        [
            calls([
                ("fly", json!({"to": "the moon"})),
                ("read_file", json!({"path": "x"})),
            ]),
            says("done"),
        ],
    );

    let run = app.run("planner", "go").await;

    assert_eq!(run.output(), "done");
    let reported = app.provider.wait_for_request("planner", 2).await;
    assert_eq!(
        reported.tool_results(),
        ["Unknown tool: \"fly\"", "Unknown tool: \"read_file\""]
    );
    assert_eq!(reported.tool_result_errors(), [true, true]);
    assert_eq!(run["tool_calls"], 2);
}

#[tokio::test]
async fn calls_to_an_agent_without_tools_are_ignored() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.will(
        "solo",
        [calls([("fly", json!({}))]).with_text("I would fly.")],
    );

    let run = app.run("solo", "go").await;

    assert_eq!(run.output(), "I would fly.");
    assert_eq!(run["tool_calls"], 0);
    assert_eq!(app.provider.requests().len(), 1);
}

#[tokio::test]
async fn only_parameters_that_are_set_are_sent() {
    let app = TestApp::setup()
        .agent("plain", "")
        .agent(
            "tuned",
            "[params]\ntemperature = 0.0\ntop_p = 0.5\nmax_tokens = 99\nstop = [\"END\"]",
        )
        .spawn()
        .await;
    app.provider.will("plain", [says("done")]);
    app.provider.will("tuned", [says("done")]);

    app.run("plain", "go").await;
    app.run("tuned", "go").await;

    let plain = app.provider.wait_for_request("plain", 1).await;
    for key in ["temperature", "top_p", "stop_sequences", "system"] {
        assert!(plain.body.get(key).is_none(), "{key} in {}", plain.body);
    }
    assert_eq!(plain.body["max_tokens"], 8192);
    let tuned = app.provider.wait_for_request("tuned", 1).await;
    assert_eq!(tuned.body["temperature"], 0.0);
    assert_eq!(tuned.body["top_p"], 0.5);
    assert_eq!(tuned.body["max_tokens"], 99);
    assert_eq!(tuned.body["stop_sequences"], json!(["END"]));
}

const LOOPER: &str = "sub_agents = [\"reader\"]";

#[tokio::test]
async fn a_repeated_call_gets_a_hint_and_then_stops_the_run() {
    let app = TestApp::setup().agent("looper", LOOPER).spawn().await;
    app.provider
        .always("looper", |_| calls([("fly", json!({"to": "the moon"}))]));

    let run = app.run("looper", "go").await;

    assert_eq!(run.failure().0, "loop_detected");
    assert_eq!(run["error"]["category"], "agent");
    assert_eq!(run["turns"], 6);
    let results = app
        .provider
        .wait_for_request("looper", 6)
        .await
        .tool_results();
    let plain = "Unknown tool: \"fly\"";
    assert_eq!(results[..2], [plain, plain]);
    assert!(results[2].starts_with(plain), "{results:?}");
    assert!(
        results[2].len() > plain.len(),
        "the hint is missing: {results:?}"
    );
    let events = run.events().await;
    assert!(kinds(&events).contains(&"loop.warning"), "{events:?}");
}

#[tokio::test]
async fn calls_with_different_arguments_are_no_loop() {
    let app = TestApp::setup().agent("looper", LOOPER).spawn().await;
    app.provider.always("looper", |seen| {
        let tries = seen.tool_results().len();
        if tries < 8 {
            calls([("fly", json!({"to": tries}))])
        } else {
            says("enough")
        }
    });

    let run = app.run("looper", "go").await;

    assert_eq!(run.output(), "enough");
    let results = app
        .provider
        .wait_for_request("looper", 9)
        .await
        .tool_results();
    assert_eq!(results, ["Unknown tool: \"fly\""; 8]);
}

#[tokio::test]
async fn the_loop_guard_can_be_set_and_turned_off() {
    let strict = TestApp::setup()
        .config("[limits]\nloop_warn = 2\nloop_stop = 3")
        .agent("looper", LOOPER)
        .spawn()
        .await;
    strict
        .provider
        .always("looper", |_| calls([("fly", json!({}))]));
    let run = strict.run("looper", "go").await;
    assert_eq!(run.failure().0, "loop_detected");
    assert_eq!(run["turns"], 3);
    let results = strict
        .provider
        .wait_for_request("looper", 3)
        .await
        .tool_results();
    assert!(results[1].len() > results[0].len(), "{results:?}");

    let lax = TestApp::setup()
        .config("[limits]\nloop_warn = 0\nloop_stop = 0")
        .agent("looper", &format!("{LOOPER}\n[limits]\nmax_turns = 10"))
        .spawn()
        .await;
    lax.provider
        .always("looper", |_| calls([("fly", json!({}))]));
    let run = lax.run("looper", "go").await;
    assert_eq!(run.failure().0, "max_turns");
    let results = lax
        .provider
        .wait_for_request("looper", 10)
        .await
        .tool_results();
    assert_eq!(results, ["Unknown tool: \"fly\""; 9]);
}
