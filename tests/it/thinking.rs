//! A model's thinking goes back to it alone, and only while nothing before it has changed.

use serde_json::{Value, json};

use crate::support::app::TestApp;
use crate::support::provider::answer::{Answer, calls, fails, raw, says};
use crate::support::provider::seen::{Seen, Wire};

/// A body of the session `talk`.
fn talk(input: &str) -> Value {
    json!({"input": input, "session": "talk"})
}

/// An agent of that wire with something to call, which is never there.
fn solo(wire: Wire, more: &str) -> String {
    format!(
        "model = \"{}/solo\"\nsub_agents = [\"x\"]\n{more}",
        wire.name()
    )
}

/// Thinks, and calls something.
fn thinks(text: &str) -> Answer {
    calls([("fly", json!({"n": 1}))]).thinking(text)
}

fn thoughts_in(seen: &Seen) -> Vec<&'static str> {
    let body = seen.body.to_string();
    let all = ["first thought", "second thought", "third thought"];
    all.into_iter().filter(|text| body.contains(text)).collect()
}

#[tokio::test]
async fn a_session_keeps_thinking_while_nothing_before_it_changes() {
    for wire in Wire::ALL {
        let app = TestApp::with()
            .agent("solo", &solo(wire, "system_prompt = \"Old.\""))
            .spawn()
            .await;
        app.provider.will(
            "solo",
            [
                thinks("first thought"),
                says("one"),
                thinks("second thought"),
                says("two"),
                says("three"),
            ],
        );
        app.run_with("solo", talk("1")).await;
        app.run_with("solo", talk("2")).await;
        let second = app.provider.asked("solo", 4).await;
        assert_eq!(
            thoughts_in(&second),
            ["first thought", "second thought"],
            "{wire:?}"
        );

        app.write_agent("solo", &solo(wire, "system_prompt = \"New.\""));
        app.get_until("/agents/solo", |got| got.text.contains("New."))
            .await;
        app.run_with("solo", talk("3")).await;

        let third = app.provider.asked("solo", 5).await;
        assert!(thoughts_in(&third).is_empty(), "{wire:?}: {}", third.body);
        assert_eq!(third.results().len(), 2, "{wire:?}");
    }
}

#[tokio::test]
async fn other_tools_leave_all_thinking_out_and_new_thinking_stays() {
    let app = TestApp::with()
        .agent("solo", &solo(Wire::Anthropic, ""))
        .spawn()
        .await;
    app.provider.will(
        "solo",
        [
            thinks("first thought"),
            says("one"),
            thinks("second thought"),
            says("two"),
            thinks("third thought"),
            says("three"),
        ],
    );
    app.run_with("solo", talk("1")).await;
    app.write_agent("solo", &solo(Wire::Anthropic, "tools = [\"grep\"]"));
    app.get_until("/agents/solo", |got| got.text.contains("grep"))
        .await;
    app.run_with("solo", talk("2")).await;
    let second = app.provider.asked("solo", 4).await;
    assert_eq!(thoughts_in(&second), ["second thought"]);

    // The first run's tools are back: what it thought is as it was, but what came after it is not.
    app.write_agent("solo", &solo(Wire::Anthropic, ""));
    app.get_until("/agents/solo", |got| !got.text.contains("grep"))
        .await;
    app.run_with("solo", talk("3")).await;
    let third = app.provider.asked("solo", 6).await;
    assert_eq!(thoughts_in(&third), ["first thought", "third thought"]);
}

#[tokio::test]
async fn another_model_of_the_same_provider_gets_no_thinking() {
    for wire in Wire::ALL {
        let app = TestApp::with().agent("solo", &solo(wire, "")).spawn().await;
        app.provider.will(
            "solo",
            [thinks("first thought"), says("one"), says("three")],
        );
        app.provider.will("other", [says("two")]);
        app.run_with("solo", talk("1")).await;
        let mut body = talk("2");
        body["model"] = format!("{}/other", wire.name()).into();
        app.run_with("solo", body).await;
        app.run_with("solo", talk("3")).await;

        let other = app.provider.asked("other", 1).await;
        assert!(thoughts_in(&other).is_empty(), "{wire:?}: {}", other.body);
        assert_eq!(other.results().len(), 1, "{wire:?}");
        // Its own model gets it back: nothing before it changed.
        let own = app.provider.asked("solo", 3).await;
        assert_eq!(thoughts_in(&own), ["first thought"], "{wire:?}");
    }
}

#[tokio::test]
async fn a_fallback_of_the_same_provider_gets_no_thinking() {
    for wire in Wire::ALL {
        let name = wire.name();
        let app = TestApp::with()
            .agent(
                "solo",
                &solo(
                    wire,
                    &format!("fallback_models = [\"{name}/other\"]\n[retry]\nmax_retries = 0"),
                ),
            )
            .spawn()
            .await;
        app.provider
            .will("solo", [thinks("first thought"), fails(529, "busy")]);
        app.provider.will("other", [says("done")]);

        assert_eq!(app.run("solo", "go").await.output(), "done");

        let own = app.provider.asked("solo", 2).await;
        assert_eq!(thoughts_in(&own), ["first thought"], "{wire:?}");
        let other = app.provider.asked("other", 1).await;
        assert!(thoughts_in(&other).is_empty(), "{wire:?}: {}", other.body);
        assert_eq!(other.results().len(), 1, "{wire:?}");
    }
}

#[tokio::test]
async fn a_trimmed_conversation_is_sent_without_thinking() {
    let app = TestApp::with()
        .config("[limits]\nsession_messages = 5")
        .agent("solo", &solo(Wire::Anthropic, ""))
        .spawn()
        .await;
    app.provider.will(
        "solo",
        [
            says("one").thinking_in_secret(),
            thinks("second thought"),
            says("two"),
            says("three"),
        ],
    );
    for input in ["1", "2", "3"] {
        app.run_with("solo", talk(input)).await;
    }

    let second = app.provider.asked("solo", 3).await;
    assert_eq!(thoughts_in(&second), ["second thought"]);
    assert_eq!(second.messages()[1]["content"][0]["signature"], "c2VjcmV00");
    let third = app.provider.asked("solo", 4).await;
    assert!(
        !third.body.to_string().contains("signature"),
        "{}",
        third.body
    );
    assert_eq!(third.results().len(), 1);
}

#[tokio::test]
async fn a_summary_without_tools_is_asked_for_without_thinking() {
    let app = TestApp::with()
        .agent(
            "solo",
            "model = \"anthropic/solo\"\ntools = [\"list_directory\"]\n[subagent]\nenabled = true\nsummary = \"always\"\nmodel = \"anthropic/child\"",
        )
        .spawn()
        .await;
    let task = json!({"label": "look", "task_prompt": "Look."});
    app.provider
        .will("solo", [calls([("subagent", task)]), says("done")]);
    app.provider.will(
        "child",
        [
            thinks("first thought"),
            says("task done").thinking("second thought"),
            says("summary"),
        ],
    );

    assert_eq!(app.run("solo", "go").await.output(), "done");

    let last = app.provider.asked("child", 2).await;
    assert_eq!(thoughts_in(&last), ["first thought"]);
    let summary = app.provider.asked("child", 3).await;
    assert!(thoughts_in(&summary).is_empty(), "{}", summary.body);
}

#[tokio::test]
async fn what_a_service_refuses_calls_without_stays_beside_them() {
    let app = TestApp::with()
        .agent("solo", &solo(Wire::Openai, "system_prompt = \"Old.\""))
        .spawn()
        .await;
    let call = json!({
        "id": "call_1", "type": "function", "function": {"name": "fly", "arguments": "{}"},
        "extra_content": {"google": {"thought_signature": "c2lnbmVk"}},
    });
    let reply = json!({
        "id": "1", "object": "chat.completion", "created": 0, "model": "solo",
        "choices": [{"index": 0, "finish_reason": "tool_calls", "message":
            {"role": "assistant", "content": null, "reasoning_content": "first thought", "tool_calls": [call]}}],
    });
    let reply = raw(200, "application/json", reply.to_string());
    app.provider
        .will("solo", [reply, says("one"), says("two"), says("three")]);
    app.provider.will("other", [says("other")]);
    app.run_with("solo", talk("1")).await;
    let mut to_other = talk("2");
    to_other["model"] = "openai/other".into();
    app.run_with("solo", to_other).await;
    app.write_agent("solo", &solo(Wire::Openai, "system_prompt = \"New.\""));
    app.get_until("/agents/solo", |got| got.text.contains("New."))
        .await;
    app.run_with("solo", talk("3")).await;

    let said = |seen: std::sync::Arc<Seen>| {
        let messages = seen.messages().iter();
        let mut said = messages.filter(|message| message["tool_calls"].is_array());
        said.next().cloned().unwrap_or_default()
    };
    // Gemini wants its signatures, and DeepSeek the field, whatever is in it.
    let changed = said(app.provider.asked("solo", 3).await);
    assert_eq!(changed["reasoning_content"], " ");
    assert_eq!(
        changed["tool_calls"][0]["extra_content"],
        call["extra_content"]
    );
    let other = said(app.provider.asked("other", 1).await);
    assert_eq!(other["reasoning_content"], " ");
    assert_eq!(other["tool_calls"][0]["extra_content"], Value::Null);
}
