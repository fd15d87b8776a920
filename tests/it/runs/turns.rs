//! The turns of a run: what was sent and what came back.

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::app::{TestApp, send};
use crate::support::attachments::{base64, picture_part, png_with_suffix};
use crate::support::gate::Gate;
use crate::support::provider::answer::{calls, fails, hangs, says};
use crate::support::provider::recorded_request::Wire;
use crate::support::run::Run;

#[tokio::test]
async fn a_turn_has_the_pictures_that_were_sent() {
    for wire in [Wire::Anthropic, Wire::Openai, Wire::Responses] {
        let app = TestApp::setup()
            .agent(
                "solo",
                &format!(
                    "model = \"{}/solo\"\ntools = [\"find_path\"]\nworkdir = \"work\"",
                    wire.name()
                ),
            )
            .file("work/a.md", "a")
            .spawn()
            .await;
        let first = calls([("find_path", json!({"pattern": "*"}))]);
        app.provider.will("solo", [first, says("A grey pixel.")]);
        let picture = png_with_suffix("of a turn");
        let input = json!([{"type": "text", "text": "look"}, picture_part(&picture)]);
        let run = app.run_with("solo", json!({"input": input})).await;
        for (number, seen) in (1..).zip(app.provider.requests()) {
            let turn = run.get(&format!("/turns/{number}")).await;
            let sent = std::str::from_utf8(&seen.bytes).expect("UTF-8");
            assert!(sent.contains(&base64(&picture)), "{sent}");
            let body = format!("\"body\":{sent}");
            assert!(turn.text.contains(&body), "{number} {}", turn.text);
        }
    }
}

const QUICK: &str = "[retry]\nmax_retries = 1\ninitial_delay_ms = 1\nmax_delay_ms = 2";

async fn turns(run: &Run<'_>) -> Vec<Value> {
    let list = run.get("/turns").await.json();
    list["data"].as_array().expect("a list").clone()
}

/// Two turns on a wire, compared with what the provider got, byte for byte.
async fn both_turns_are_as_sent(wire: Wire, stream: bool) {
    let name = wire.name();
    let settings = format!(
        "model = \"{name}/solo\"\nstream = {stream}\ntools = [\"find_path\"]\nworkdir = \"work\"\nsystem_prompt = \"Work well, and say \\\"é\\\".\""
    );
    let app = TestApp::setup()
        .agent("solo", &settings)
        .file("work/a.md", "a");
    let app = app.spawn().await;
    let first = calls([("fly", json!({"to": "the moon", "n": 1.50}))]).with_text("I try.");
    let first = first.with_usage(100, 20);
    app.provider
        .will("solo", [first, says("It is done.").with_usage(150, 10)]);

    let run = app.run("solo", "fly to the \"moon\"").await;

    let listed = turns(&run).await;
    assert_eq!(listed.len(), 2, "{name}");
    for (number, seen) in (1..).zip(app.provider.requests()) {
        let response = run.get(&format!("/turns/{number}")).await;
        let sent = String::from_utf8(seen.bytes.to_vec()).expect("UTF-8");
        assert!(
            response.text.contains(&format!("\"body\":{sent}")),
            "{}",
            response.text
        );
        assert!(!response.text.contains("key-of"), "{}", response.text);
        let turn = response.json();
        let request = &turn["request"];
        assert_eq!(request["method"], "POST");
        let url = request["url"].as_str().expect("a URL");
        assert!(url.starts_with(&app.provider.url()), "{url}");
        assert_eq!(request["headers"]["content-type"], "application/json");
        let key = &request["headers"][if wire == Wire::Anthropic {
            "x-api-key"
        } else {
            "authorization"
        }];
        match wire {
            Wire::Ollama => assert!(key.is_null(), "{key}"),
            Wire::Anthropic => assert_eq!(key, "[redacted]"),
            Wire::Openai | Wire::Responses => assert_eq!(key, "Bearer [redacted]"),
        }
        let summary = &listed[number - 1];
        for (field, value) in summary.as_object().expect("an object") {
            assert_eq!(&turn[field], value, "{field}");
        }
        assert_eq!(summary["request_bytes"], sent.len());
        assert_eq!(
            (&summary["provider"], &summary["model"]),
            (&json!(name), &json!("solo"))
        );
        assert_eq!(summary["attempts"][0]["status"], 200);
        assert!(summary["first_token_ms"].as_u64() <= summary["duration_ms"].as_u64());
    }
    let replies = [
        &run.get("/turns/1").await.json()["reply"],
        &run.get("/turns/2").await.json()["reply"],
    ];
    assert_eq!(replies[0]["content"], "I try.");
    assert_eq!(
        replies[0]["tool_calls"][0]["arguments"],
        json!({"to": "the moon", "n": 1.5})
    );
    assert_eq!(replies[1]["content"], "It is done.");
    assert_eq!(listed[0]["usage"]["input_tokens"], 100);
    assert_eq!(listed[1]["usage"]["output_tokens"], 10);
    assert_eq!(
        (&listed[0]["tool_calls"], &listed[1]["tool_calls"]),
        (&json!(1), &json!(0))
    );
    assert!(listed[0]["stop_reason"].is_string());
}

#[tokio::test]
async fn a_turn_has_the_request_as_sent_on_every_wire() {
    for wire in [Wire::Anthropic, Wire::Openai, Wire::Responses, Wire::Ollama] {
        for stream in [false, true] {
            both_turns_are_as_sent(wire, stream).await;
        }
    }
}

#[tokio::test]
async fn retries_and_fallbacks_are_attempts_of_one_turn() {
    let settings = format!("fallback_models = [\"openai/spare\"]\n{QUICK}");
    let app = TestApp::setup().agent("solo", &settings).spawn().await;
    app.provider
        .will("solo", [fails(529, "busy"), fails(500, "oops")]);
    app.provider.will("spare", [says("done")]);

    let run = app.run("solo", "go").await;

    let turn = run.get("/turns/1").await.json();
    let attempts = turn["attempts"].as_array().expect("attempts");
    let attempts: Vec<_> = attempts
        .iter()
        .map(|it| (&it["provider"], &it["model"], &it["status"], &it["error"]))
        .collect();
    let expected = [
        (
            json!("anthropic"),
            json!("solo"),
            json!(529),
            json!("overloaded: busy"),
        ),
        (
            json!("anthropic"),
            json!("solo"),
            json!(500),
            json!("server: oops"),
        ),
        (json!("openai"), json!("spare"), json!(200), json!(null)),
    ];
    let expected: Vec<_> = expected.iter().map(|(a, b, c, d)| (a, b, c, d)).collect();
    assert_eq!(attempts, expected);
    assert_eq!(
        (&turn["provider"], &turn["status"]),
        (&json!("openai"), &json!("completed"))
    );
    assert_eq!(turn["request"]["body"]["model"], "spare");
    assert_eq!(turns(&run).await.len(), 1);
}

#[tokio::test]
async fn a_turn_without_a_reply_has_its_last_request() {
    let app = TestApp::setup().agent("solo", QUICK).spawn().await;
    app.provider
        .will("solo", [fails(500, "first"), fails(400, "second")]);

    let run = app.run("solo", "go").await;

    assert_eq!(run.status(), "failed");
    let turn = run.get("/turns/1").await.json();
    assert_eq!(turn["status"], "failed");
    assert_eq!(turn["attempts"][1]["error"], "bad_request: second");
    assert_eq!(turn["request"]["body"]["model"], "solo");
    assert_eq!(
        (&turn["reply"], &turn["usage"]),
        (&json!(null), &json!(null))
    );
}

#[tokio::test]
async fn a_cancelled_turn_is_recorded() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.will("solo", [hangs()]);
    let run = app.start("solo", "go").await;
    app.provider.wait_for_request("solo", 1).await;

    let run = run.cancel("enough").await.wait_for_end().await;

    let turn = run.get("/turns/1").await.json();
    assert_eq!(turn["status"], "cancelled");
    assert_eq!(turn["attempts"][0]["status"], Value::Null);
    assert_eq!(turn["attempts"][0]["error"], "the run was cancelled");
    assert_eq!(turn["request"]["body"]["model"], "solo");
}

#[tokio::test]
async fn reasoning_is_in_the_reply() {
    for wire in [Wire::Anthropic, Wire::Openai, Wire::Responses, Wire::Ollama] {
        let settings = format!(
            "model = \"{}/solo\"\neffort = \"high\"\ntools = [\"find_path\"]\nworkdir = \"work\"",
            wire.name()
        );
        let app = TestApp::setup()
            .agent("solo", &settings)
            .file("work/a.md", "a");
        let app = app.spawn().await;
        let first = calls([("fly", json!({}))]).with_thought("Birds can fly.");
        app.provider.will("solo", [first, says("done")]);

        let run = app.run("solo", "go").await;

        let turn = run.get("/turns/1").await.json();
        assert_eq!(
            turn["reply"]["reasoning"], "Birds can fly.",
            "{wire:?}: {turn:#}"
        );
        assert!(!turn["reply"]["raw"].is_null(), "{wire:?}");
        let second = run.get("/turns/2").await.json();
        assert_eq!(
            (&second["reply"]["reasoning"], &second["reply"]["raw"]),
            (&json!(null), &json!(null))
        );
    }
}

#[tokio::test]
async fn a_missing_turn_is_named() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    let gate = Gate::closed();
    app.provider.will("solo", [says("done").after_gate(&gate)]);
    let run = app.start("solo", "go").await;
    app.provider.wait_for_request("solo", 1).await;
    assert!(turns(&run).await.is_empty());
    let problem = run.get("/turns/1").await.problem(404);
    assert!(
        problem.contains("no turn of it is recorded yet"),
        "{problem}"
    );
    gate.open();
    let run = run.wait_for_end().await;

    for number in ["2", "0", "x", "-1", "99999999999999999999"] {
        let response = run.get(&format!("/turns/{number}")).await;
        assert_eq!(response.json()["code"], "turn_not_found", "{number}");
        let problem = response.problem(404);
        let expected = format!("{} has no turn \"{number}\": it has turn 1", run.id());
        assert!(problem.contains(&expected), "{problem}");
    }
    let nobody = "/runs/run_00000000-0000-7000-8000-000000000000/turns";
    for path in [nobody.to_owned(), format!("{nobody}/1")] {
        assert_eq!(app.get(&path).await.json()["code"], "run_not_found");
    }
    let deleted = send(app.request(Method::DELETE, &format!("/runs/{}", run.id()))).await;
    assert_eq!(deleted.status, 204);
    assert_eq!(run.get("/turns/1").await.json()["code"], "run_not_found");
}
