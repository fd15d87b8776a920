//! A model's thinking is sent back to that model only, while nothing before it has changed; event streams show it live.

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::app::TestApp;
use crate::support::events::{Event, Events};
use crate::support::provider::answer::{ScriptedAnswer, calls, fails, raw, says};
use crate::support::provider::recorded_request::{RecordedRequest, Wire};
use crate::support::within_timeout;

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
fn thinks(text: &str) -> ScriptedAnswer {
    calls([("fly", json!({"n": 1}))]).with_thought(text)
}

fn thoughts_in(seen: &RecordedRequest) -> Vec<&'static str> {
    let body = seen.body.to_string();
    let all = ["first thought", "second thought", "third thought"];
    all.into_iter().filter(|text| body.contains(text)).collect()
}

#[tokio::test]
async fn a_session_keeps_thinking_while_nothing_before_it_changes() {
    for wire in Wire::ALL {
        let app = TestApp::setup()
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
        let second = app.provider.wait_for_request("solo", 4).await;
        assert_eq!(
            thoughts_in(&second),
            ["first thought", "second thought"],
            "{wire:?}"
        );

        app.write_agent("solo", &solo(wire, "system_prompt = \"New.\""));
        app.get_until("/agents/solo", |got| got.text.contains("New."))
            .await;
        app.run_with("solo", talk("3")).await;

        let third = app.provider.wait_for_request("solo", 5).await;
        assert!(thoughts_in(&third).is_empty(), "{wire:?}: {}", third.body);
        assert_eq!(third.tool_results().len(), 2, "{wire:?}");
    }
}

#[tokio::test]
async fn changed_tools_drop_earlier_thinking_and_keep_new_thinking() {
    let app = TestApp::setup()
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
    let second = app.provider.wait_for_request("solo", 4).await;
    assert_eq!(thoughts_in(&second), ["second thought"]);

    // The first run's tools are back: what it thought is as it was, but what came after it is not.
    app.write_agent("solo", &solo(Wire::Anthropic, ""));
    app.get_until("/agents/solo", |got| !got.text.contains("grep"))
        .await;
    app.run_with("solo", talk("3")).await;
    let third = app.provider.wait_for_request("solo", 6).await;
    assert_eq!(thoughts_in(&third), ["first thought", "third thought"]);
}

#[tokio::test]
async fn another_model_of_the_same_provider_gets_no_thinking() {
    for wire in Wire::ALL {
        let app = TestApp::setup()
            .agent("solo", &solo(wire, ""))
            .spawn()
            .await;
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

        let other = app.provider.wait_for_request("other", 1).await;
        assert!(thoughts_in(&other).is_empty(), "{wire:?}: {}", other.body);
        assert_eq!(other.tool_results().len(), 1, "{wire:?}");
        // Its own model gets it back: nothing before it changed.
        let own = app.provider.wait_for_request("solo", 3).await;
        assert_eq!(thoughts_in(&own), ["first thought"], "{wire:?}");
    }
}

#[tokio::test]
async fn a_fallback_of_the_same_provider_gets_no_thinking() {
    for wire in Wire::ALL {
        let name = wire.name();
        let app = TestApp::setup()
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

        let own = app.provider.wait_for_request("solo", 2).await;
        assert_eq!(thoughts_in(&own), ["first thought"], "{wire:?}");
        let other = app.provider.wait_for_request("other", 1).await;
        assert!(thoughts_in(&other).is_empty(), "{wire:?}: {}", other.body);
        assert_eq!(other.tool_results().len(), 1, "{wire:?}");
    }
}

#[tokio::test]
async fn a_trimmed_conversation_is_sent_without_thinking() {
    let app = TestApp::setup()
        .config("[limits]\nsession_messages = 5")
        .agent("solo", &solo(Wire::Anthropic, ""))
        .spawn()
        .await;
    app.provider.will(
        "solo",
        [
            says("one").with_hidden_thought(),
            thinks("second thought"),
            says("two"),
            says("three"),
        ],
    );
    for input in ["1", "2", "3"] {
        app.run_with("solo", talk(input)).await;
    }

    let second = app.provider.wait_for_request("solo", 3).await;
    assert_eq!(thoughts_in(&second), ["second thought"]);
    assert_eq!(second.messages()[1]["content"][0]["signature"], "c2VjcmV00");
    let third = app.provider.wait_for_request("solo", 4).await;
    assert!(
        !third.body.to_string().contains("signature"),
        "{}",
        third.body
    );
    assert_eq!(third.tool_results().len(), 1);
}

#[tokio::test]
async fn a_summary_without_tools_is_requested_without_thinking() {
    let app = TestApp::setup()
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
            says("task done").with_thought("second thought"),
            says("summary"),
        ],
    );

    assert_eq!(app.run("solo", "go").await.output(), "done");

    let last = app.provider.wait_for_request("child", 2).await;
    assert_eq!(thoughts_in(&last), ["first thought"]);
    let summary = app.provider.wait_for_request("child", 3).await;
    assert!(thoughts_in(&summary).is_empty(), "{}", summary.body);
}

#[tokio::test]
async fn fields_that_a_service_requires_stay_beside_calls() {
    let app = TestApp::setup()
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

    let said = |seen: std::sync::Arc<RecordedRequest>| {
        let messages = seen.messages().iter();
        let mut said = messages.filter(|message| message["tool_calls"].is_array());
        said.next().cloned().unwrap_or_default()
    };
    // Gemini wants its signatures, and DeepSeek the field, whatever is in it.
    let changed = said(app.provider.wait_for_request("solo", 3).await);
    assert_eq!(changed["reasoning_content"], " ");
    assert_eq!(
        changed["tool_calls"][0]["extra_content"],
        call["extra_content"]
    );
    let other = said(app.provider.wait_for_request("other", 1).await);
    assert_eq!(other["reasoning_content"], " ");
    assert_eq!(other["tool_calls"][0]["extra_content"], Value::Null);
}

#[tokio::test]
async fn deepseek_gets_its_thinking_field_with_replies_of_other_services() {
    let app = TestApp::setup()
        .config("[providers.deepseek]\nbase_url = \"{provider}\"\napi_key = \"k\"")
        .agent("solo", "model = \"openai/solo\"\nfallback_models = [\"deepseek/deep\"]\ntools = [\"list_directory\"]\n[retry]\nmax_retries = 0")
        .spawn()
        .await;
    app.provider.will(
        "solo",
        [
            calls([("list_directory", json!({}))]),
            fails(529, "overloaded"),
            fails(529, "overloaded"),
        ],
    );
    // Its own replies come without thinking now and then.
    let calls_again = calls([("list_directory", json!({}))]);
    app.provider.will("deep", [calls_again, says("done")]);

    assert_eq!(app.run("solo", "go").await.output(), "done");

    let seen = app.provider.wait_for_request("deep", 2).await;
    let replies = seen
        .messages()
        .iter()
        .filter(|it| it["role"] == "assistant");
    let fields: Vec<_> = replies.map(|it| it["reasoning_content"].clone()).collect();
    assert_eq!(fields, [" ", " "], "without it DeepSeek answers 400");
    let seen = app.provider.wait_for_request("solo", 2).await;
    assert_eq!(seen.messages()[1]["reasoning_content"], Value::Null);
}

/// Runs `solo` with a stream, and returns what the stream brought.
async fn streamed(app: &TestApp) -> Vec<Event> {
    let request = app.request(Method::POST, "/agents/solo/runs");
    let request = request.header("accept", "text/event-stream");
    let response = within_timeout("the stream's head", request.send()).await;
    Events::new(response.expect("a head")).rest().await
}

fn text_of(events: &[Event], kind: &str) -> String {
    let of = events.iter().filter(|event| event.kind() == kind);
    of.filter_map(|event| event["text"].as_str()).collect()
}

fn kinds_without_repeats(events: &[Event]) -> Vec<&str> {
    let mut kinds: Vec<_> = events.iter().map(Event::kind).collect();
    kinds.dedup();
    kinds
}

#[tokio::test]
async fn a_stream_sends_thinking_before_text() {
    for wire in Wire::ALL {
        let app = TestApp::setup()
            .agent("solo", &solo(wire, ""))
            .spawn()
            .await;
        app.provider.will(
            "solo",
            [
                thinks("first thought of two"),
                says("the answer").with_thought("second thought"),
            ],
        );

        let events = streamed(&app).await;

        let thought = text_of(&events, "reasoning.delta");
        assert_eq!(thought, "first thought of twosecond thought", "{wire:?}");
        assert_eq!(text_of(&events, "text.delta"), "the answer");
        let mut kinds = kinds_without_repeats(&events);
        kinds.retain(|kind| *kind != "reasoning.started");
        let turn = |kinds: &[&str], with: &[&str]| kinds.windows(with.len()).any(|it| it == with);
        let first = ["turn.started", "reasoning.delta", "turn.completed"];
        assert!(turn(&kinds, &first), "{wire:?}: {kinds:?}");
        let second = [
            "turn.started",
            "reasoning.delta",
            "text.delta",
            "turn.completed",
        ];
        assert!(turn(&kinds, &second), "{wire:?}: {kinds:?}");
        let mut live = events
            .iter()
            .filter(|event| event.kind().starts_with("reasoning."));
        assert!(live.clone().all(|event| event.seq() == 0), "{wire:?}");
        assert_eq!(live.next_back().expect("a thought")["turn"], 2);
        let run = app.find(events[0]["run_id"].as_str().expect("an id")).await;
        assert_eq!(run.output(), "the answer");
        let stored = run.events().await;
        assert!(
            !stored
                .iter()
                .any(|event| event.kind().starts_with("reasoning."))
        );
    }
}

#[tokio::test]
async fn a_stream_announces_unreadable_thinking() {
    for wire in [Wire::Anthropic, Wire::Openai, Wire::Responses] {
        let app = TestApp::setup()
            .agent("solo", &solo(wire, ""))
            .spawn()
            .await;
        app.provider
            .will("solo", [says("the answer").with_hidden_thought()]);

        let events = streamed(&app).await;

        assert_eq!(
            kinds_without_repeats(&events),
            [
                "run.queued",
                "run.started",
                "turn.started",
                "reasoning.started",
                "text.delta",
                "turn.completed",
                "run.completed",
            ],
            "{wire:?}"
        );
    }
}

#[tokio::test]
async fn thinking_of_a_retried_request_is_withdrawn() {
    let app = TestApp::setup()
        .agent("solo", "[retry]\ninitial_delay_ms = 0")
        .spawn()
        .await;
    let cut = says("never").with_thought("one two three four").cut();
    app.provider
        .will("solo", [cut, says("the answer").with_thought("again")]);

    let events = streamed(&app).await;

    let kinds = kinds_without_repeats(&events);
    let withdrawn = kinds.iter().position(|kind| *kind == "text.withdrawn");
    let withdrawn = withdrawn.unwrap_or_else(|| panic!("{kinds:?}"));
    assert!(kinds[..withdrawn].contains(&"reasoning.delta"), "{kinds:?}");
    assert!(kinds[withdrawn..].contains(&"reasoning.delta"), "{kinds:?}");
    assert_eq!(text_of(&events, "text.delta"), "the answer");
}

#[tokio::test]
async fn a_reasoning_summary_is_requested_only_if_configured() {
    for (wire, sent) in [
        (
            Wire::Responses,
            json!({"reasoning": {"summary": "concise"}}),
        ),
        (
            Wire::Responses,
            json!({"reasoning": {"effort": "high", "summary": "concise"}}),
        ),
        (
            Wire::Anthropic,
            json!({"thinking": {"type": "adaptive", "display": "summarized"}}),
        ),
    ] {
        let effort = match sent["reasoning"]["effort"].as_str() {
            Some(effort) => format!("effort = \"{effort}\"\n"),
            None => String::new(),
        };
        let app = TestApp::setup()
            .agent(
                "solo",
                &format!("model = \"{}/solo\"\n{effort}", wire.name()),
            )
            .agent(
                "asks",
                &format!(
                    "model = \"{}/asks\"\n{effort}reasoning_summary = \"concise\"",
                    wire.name()
                ),
            )
            .spawn()
            .await;
        for agent in ["solo", "asks"] {
            app.provider.will(agent, [says("done")]);
            assert_eq!(app.run(agent, "go").await.output(), "done");
        }
        let (field, value) = sent
            .as_object()
            .and_then(|it| it.iter().next())
            .expect("a field");
        assert_eq!(
            &app.provider.wait_for_request("asks", 1).await.body[field],
            value
        );
        let plain = &app.provider.wait_for_request("solo", 1).await.body[field];
        assert_eq!(
            (&plain["summary"], &plain["display"]),
            (&Value::Null, &Value::Null)
        );
    }
    let app = TestApp::setup()
        .agent("solo", "reasoning_summary = \"long\"")
        .spawn()
        .await;
    let refused = app.post("/agents/solo/runs", &json!({})).await.problem(422);
    assert!(
        refused.contains("must be one of: auto, concise, detailed"),
        "{refused}"
    );
}

#[tokio::test]
async fn thinking_tokens_of_anthropics_models_are_counted() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    let body = json!({
        "id": "m", "type": "message", "role": "assistant", "model": "solo", "stop_reason": "end_turn",
        "stop_sequence": null, "content": [{"type": "text", "text": "done"}],
        "usage": {"input_tokens": 3, "output_tokens": 9, "output_tokens_details": {"thinking_tokens": 7}},
    });
    app.provider
        .will("solo", [raw(200, "application/json", body.to_string())]);

    let run = app.run("solo", "go").await;

    let events = run.events().await;
    let turn = events.iter().find(|event| event.kind() == "turn.completed");
    assert_eq!(turn.expect("a turn")["reasoning_tokens"], 7);
    let metrics = app.get("/metrics").await.text;
    let sample = "axed_tokens_total{model=\"anthropic/solo\",kind=\"reasoning\"} 7";
    assert!(metrics.contains(sample), "{metrics}");
}
