//! The turn loop: when it ends, what it sends, what it refuses, and how it guards itself.

use serde_json::json;

use crate::support::app::TestApp;
use crate::support::events::kinds;
use crate::support::provider::answer::{asks, calls, says};

#[tokio::test]
async fn a_reply_without_calls_is_the_runs_content() {
    let app = TestApp::with()
        .agent("solo", "system_prompt = \"Be brief.\"")
        .spawn()
        .await;
    app.provider.will(
        "solo",
        [says("hello")
            .using(7, 3)
            .stopped_by("end_turn")
            .calling_itself("solo-2026")],
    );

    let run = app.run("solo", "greet me").await;

    assert_eq!(run.output(), "hello");
    assert_eq!(run["model"], "solo-2026");
    assert_eq!(run["stop_reason"], "end_turn");
    assert_eq!(run["turns"], 1);
    assert_eq!(run.usage(), (7, 3, 0));
    let asked = app.provider.asked("solo", 1).await;
    assert_eq!(asked.system(), "Be brief.");
    assert_eq!(asked.user(), ["greet me"]);
    assert!(asked.body.get("tools").is_none(), "{:?}", asked.body);
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
    let app = TestApp::with().agent("solo", "").spawn().await;
    app.provider
        .will("solo", [says("half a sent").stopped_by("max_tokens")]);

    let run = app.run("solo", "go").await;

    assert_eq!(run.output(), "half a sent");
    assert_eq!(run["stop_reason"], "max_tokens");
}

#[tokio::test]
async fn calls_count_whatever_the_stop_reason_says() {
    let app = TestApp::with()
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .spawn()
        .await;
    app.provider.will(
        "planner",
        [
            asks([("reader", "read")]).stopped_by("end_turn"),
            says("done"),
        ],
    );
    app.provider.will("reader", [says("read")]);

    let run = app.run("planner", "go").await;

    assert_eq!(run.output(), "done");
    assert_eq!(run["tree"]["runs"], 2);
}

#[tokio::test]
async fn when_no_turn_is_left_the_run_fails_and_keeps_its_last_text() {
    let app = TestApp::with()
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
            asks([("reader", "one")]).saying("first"),
            asks([("reader", "two")]).saying("second"),
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
    assert_eq!(app.provider.seen_by("reader").len(), 1);
}

#[tokio::test]
async fn a_tool_that_is_not_offered_is_unknown() {
    let app = TestApp::with()
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
    let told = app.provider.asked("planner", 2).await;
    assert_eq!(
        told.results(),
        ["Unknown tool: \"fly\"", "Unknown tool: \"read_file\""]
    );
    assert_eq!(told.errors(), [true, true]);
    assert_eq!(run["tool_calls"], 2);
}

#[tokio::test]
async fn calls_to_an_agent_without_tools_are_ignored() {
    let app = TestApp::with().agent("solo", "").spawn().await;
    app.provider
        .will("solo", [calls([("fly", json!({}))]).saying("I would fly.")]);

    let run = app.run("solo", "go").await;

    assert_eq!(run.output(), "I would fly.");
    assert_eq!(run["tool_calls"], 0);
    assert_eq!(app.provider.seen().len(), 1);
}

#[tokio::test]
async fn only_parameters_that_are_set_are_sent() {
    let app = TestApp::with()
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

    let plain = app.provider.asked("plain", 1).await;
    for key in ["temperature", "top_p", "stop_sequences", "system"] {
        assert!(plain.body.get(key).is_none(), "{key} in {}", plain.body);
    }
    assert_eq!(plain.body["max_tokens"], 8192);
    let tuned = app.provider.asked("tuned", 1).await;
    assert_eq!(tuned.body["temperature"], 0.0);
    assert_eq!(tuned.body["top_p"], 0.5);
    assert_eq!(tuned.body["max_tokens"], 99);
    assert_eq!(tuned.body["stop_sequences"], json!(["END"]));
}

const LOOPER: &str = "sub_agents = [\"reader\"]";

#[tokio::test]
async fn the_same_call_again_and_again_is_hinted_at_and_then_stopped() {
    let app = TestApp::with().agent("looper", LOOPER).spawn().await;
    app.provider
        .always("looper", |_| calls([("fly", json!({"to": "the moon"}))]));

    let run = app.run("looper", "go").await;

    assert_eq!(run.failure().0, "loop_detected");
    assert_eq!(run["error"]["category"], "agent");
    assert_eq!(run["turns"], 6);
    let results = app.provider.asked("looper", 6).await.results();
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
async fn other_arguments_are_no_loop() {
    let app = TestApp::with().agent("looper", LOOPER).spawn().await;
    app.provider.always("looper", |seen| {
        let tries = seen.results().len();
        if tries < 8 {
            calls([("fly", json!({"to": tries}))])
        } else {
            says("enough")
        }
    });

    let run = app.run("looper", "go").await;

    assert_eq!(run.output(), "enough");
    let results = app.provider.asked("looper", 9).await.results();
    assert_eq!(results, ["Unknown tool: \"fly\""; 8]);
}

#[tokio::test]
async fn the_loop_guard_can_be_set_and_turned_off() {
    let strict = TestApp::with()
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
    let results = strict.provider.asked("looper", 3).await.results();
    assert!(results[1].len() > results[0].len(), "{results:?}");

    let lax = TestApp::with()
        .config("[limits]\nloop_warn = 0\nloop_stop = 0")
        .agent("looper", &format!("{LOOPER}\n[limits]\nmax_turns = 10"))
        .spawn()
        .await;
    lax.provider
        .always("looper", |_| calls([("fly", json!({}))]));
    let run = lax.run("looper", "go").await;
    assert_eq!(run.failure().0, "max_turns");
    let results = lax.provider.asked("looper", 10).await.results();
    assert_eq!(results, ["Unknown tool: \"fly\""; 9]);
}
