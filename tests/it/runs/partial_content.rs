//! Runs that end in the middle of a streamed reply: its text and its known tokens are kept.

use futures_util::future::join_all;
use reqwest::Method;
use serde_json::{Value, json};

use crate::support::app::{Setup, TestApp};
use crate::support::events::{Event, Events, kinds};
use crate::support::gate::Gate;
use crate::support::provider::answer::{delegates, hangs, says};
use crate::support::run::Run;
use crate::support::within_timeout;

/// Starts a run that streams, and comes back when its first text has been sent.
async fn streaming<'a>(app: &'a TestApp, agent: &str) -> (Run<'a>, Events, Vec<Event>) {
    let request = app
        .request(Method::POST, &format!("/agents/{agent}/runs"))
        .header("accept", "text/event-stream")
        .json(&json!({"input": "go"}));
    let response = within_timeout("the stream's head", request.send()).await;
    let mut events = Events::new(response.expect("a head"));
    let before = events.until("text.delta").await;
    let id = before[0]["run_id"].as_str().expect("an id");
    (app.find(id).await, events, before)
}

fn reported(events: &[Event]) -> String {
    let deltas = events.iter().filter(|event| event.kind() == "text.delta");
    deltas
        .map(|event| event["text"].as_str().expect("a text"))
        .collect()
}

fn wires(more: &str) -> Setup {
    TestApp::setup()
        .agent("anthropic", more)
        .agent("openai", &format!("model = \"openai/openai\"\n{more}"))
        .agent("ollama", &format!("model = \"ollama/ollama\"\n{more}"))
}

const WIRES: [(&str, (u64, u64, u64)); 3] = [
    // Only this one reports tokens before the reply's end.
    ("anthropic", (70, 1, 0)),
    ("openai", (0, 0, 0)),
    ("ollama", (0, 0, 0)),
];

#[tokio::test]
async fn a_cancelled_stream_keeps_its_text_and_its_known_tokens() {
    let app = wires("").spawn().await;
    for (wire, usage) in WIRES {
        let shut = Gate::closed();
        app.provider.will(
            wire,
            [says("first words").with_usage(70, 9).pausing_at(&shut)],
        );
        let (run, events, mut before) = streaming(&app, wire).await;

        let run = run.cancel("enough").await;

        assert_eq!(run["partial_content"], "first ", "{run:?}");
        assert_eq!(run.usage(), usage, "{wire}");
        assert_eq!(run["tree"]["complete"], false, "{wire}");
        before.extend(events.rest().await);
        assert_eq!(reported(&before), "first ");
        assert!(before.iter().all(|event| event.kind() != "text.withdrawn"));
    }
}

#[tokio::test]
async fn a_stream_past_its_deadline_keeps_its_text() {
    let app = &wires("timeout = 20").spawn().await;
    let stories = WIRES.map(|(wire, usage)| async move {
        let shut = Gate::closed();
        app.provider.will(
            wire,
            [says("first words").with_usage(70, 9).pausing_at(&shut)],
        );

        let (run, events, _) = streaming(app, wire).await;
        events.rest().await;

        let run = run.wait_for_end().await;
        assert_eq!(run.failure().0, "timeout");
        assert_eq!(run["partial_content"], "first ", "{run:?}");
        assert_eq!(run.usage(), usage, "{wire}");
    });
    join_all(stories).await;
}

#[tokio::test]
async fn a_stream_that_fails_after_its_retries_keeps_its_text() {
    let app = wires("[retry]\nmax_retries = 0").spawn().await;
    for (wire, usage) in WIRES {
        let gate = Gate::closed();
        app.provider.will(
            wire,
            [says("first words")
                .with_usage(70, 9)
                .pausing_at(&gate)
                .cut()],
        );
        let (run, events, mut before) = streaming(&app, wire).await;
        gate.open();
        before.extend(events.rest().await);

        let run = run.wait_for_end().await;
        assert_eq!(run.failure().0, "provider_server");
        assert_eq!(run["partial_content"], reported(&before), "{run:?}");
        assert!(before.iter().all(|event| event.kind() != "text.withdrawn"));
        assert_eq!(run.usage(), usage, "{wire}");
        assert_eq!(run["tree"]["complete"], false, "{wire}");
    }
}

#[tokio::test]
async fn withdrawn_text_is_dropped_but_its_tokens_count() {
    let app = TestApp::setup()
        .agent("solo", "[retry]\ninitial_delay_ms = 1")
        .spawn()
        .await;
    let gate = Gate::closed();
    let broken = says("first words")
        .with_usage(70, 9)
        .pausing_at(&gate)
        .cut();
    app.provider.will("solo", [broken, hangs()]);
    let (run, mut events, _) = streaming(&app, "solo").await;
    gate.open();
    let withdrawn = events.until("text.withdrawn").await;
    assert!(!kinds(&withdrawn).contains(&"run.failed"));
    app.provider.wait_for_request("solo", 2).await;

    let run = run.cancel("enough").await;

    assert_eq!(run["partial_content"], Value::Null, "{run:?}");
    assert_eq!(run.usage(), (70, 1, 0));
}

#[tokio::test]
async fn the_current_turns_text_replaces_the_previous_ones() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "stream = true")
        .spawn()
        .await;
    let shut = Gate::closed();
    app.provider.will(
        "planner",
        [
            delegates([("reader", "x")]).with_text("let me see"),
            says("I found it").pausing_at(&shut),
        ],
    );
    app.provider.will("reader", [says("read")]);
    let (run, mut events, before) = streaming(&app, "planner").await;
    let wanted = |events: &[Event]| reported(events).ends_with("I ");
    if !wanted(&before) {
        events.until_matches(wanted).await;
    }

    let run = run.cancel("enough").await;

    assert_eq!(run["partial_content"], "I ", "{run:?}");
}

#[tokio::test]
async fn a_child_keeps_its_text_too() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .spawn()
        .await;
    let shut = Gate::closed();
    app.provider.will("planner", [delegates([("reader", "x")])]);
    app.provider.will(
        "reader",
        [says("half read").with_usage(30, 3).pausing_at(&shut)],
    );
    let (run, _events, _) = streaming(&app, "planner").await;

    let run = run.cancel("enough").await;

    let child = run.children().await.remove(0);
    assert_eq!(child["partial_content"], "half ", "{child:?}");
    assert_eq!(run.tree_usage(), (10 + 30, 5 + 1, 1));
}

#[tokio::test]
async fn a_scripted_stream_keeps_its_text() {
    let text = "term ".repeat(1000);
    let app = TestApp::setup()
        .config("[providers.scripted]\nscripts = [\"scripts\"]")
        .agent("slow", "model = \"scripted/slow\"")
        .file(
            "config/scripts/slow.toml",
            &format!(
                "delay_ms = 60\n[[replies]]\ntext = \"{text}\"\ninput_tokens = 7\noutput_tokens = 1000\n"
            ),
        )
        .spawn()
        .await;
    let (run, _events, _) = streaming(&app, "slow").await;

    let run = run.cancel("enough").await;

    let partial = run["partial_content"].as_str().expect("a text");
    assert!(
        text.starts_with(partial) && !partial.is_empty(),
        "{partial}"
    );
    assert_eq!(run.usage(), (7, 0, 0));
    assert_eq!(run["tree"]["complete"], false);
}
