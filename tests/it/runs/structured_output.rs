//! Final texts that must be JSON: validated, requested once more with their errors, and rejected with the text kept.

use serde_json::{Value, json};

use crate::support::app::TestApp;
use crate::support::events::{assert_complete, count, kinds};
use crate::support::provider::answer::{delegates, hangs, says};
use crate::support::provider::recorded_request::Wire;

const SCHEMA: &str = r#"
[params.response_format]
type = "json_schema"
schema = { type = "object", properties = { n = { type = "integer" } }, required = ["n"], additionalProperties = false }
"#;

#[tokio::test]
async fn a_valid_answer_is_parsed_on_every_wire() {
    for wire in Wire::ALL {
        let name = wire.name();
        let app = TestApp::setup()
            .agent("solo", &format!("model = \"{name}/solo\"\n{SCHEMA}"))
            .spawn()
            .await;
        let thought = "<think>\n{\"n\": 1}?\n</think>\n\nHere it is:\n```json\n{\"n\": 8}\n```";
        app.provider
            .will("solo", [says("{\"n\": 7}"), says(thought)]);

        let bare = app.run("solo", "go").await;
        let wrapped = app.run("solo", "go").await;

        assert_eq!(bare["structured"], json!({"n": 7}), "{wire:?}");
        assert_eq!(bare.output(), "{\"n\": 7}");
        assert_eq!(wrapped["structured"], json!({"n": 8}));
        assert_eq!(wrapped.output(), "{\"n\": 8}");
        assert_eq!(wrapped.messages().await["data"][1]["content"], thought);
        assert_eq!(
            app.provider.requests().len(),
            2,
            "nothing was requested again"
        );
    }
}

#[tokio::test]
async fn an_invalid_answer_is_requested_once_more_with_its_errors() {
    for wire in Wire::ALL {
        let name = wire.name();
        let app = TestApp::setup()
            .agent("solo", &format!("model = \"{name}/solo\"\n{SCHEMA}"))
            .spawn()
            .await;
        app.provider.will(
            "solo",
            [
                says("{\"n\": \"seven\", \"m\": 1}").with_usage(10, 5),
                says("{\"n\": 7}").with_usage(20, 5),
            ],
        );

        let run = app.run("solo", "go").await;

        assert_eq!(run["structured"], json!({"n": 7}), "{wire:?}");
        assert_eq!(run["turns"], 2);
        assert_eq!(run.usage(), (30, 10, 0));
        let again = app.provider.wait_for_request("solo", 2).await;
        let reported = again.user_messages().pop().expect("a message");
        assert!(
            reported.contains("- /n: \"seven\" is not of type \"integer\"\n"),
            "{reported}"
        );
        assert!(reported.contains("'m' was unexpected"), "{reported}");
        let messages = run.messages().await;
        let roles: Vec<&str> = messages["data"]
            .as_array()
            .expect("data")
            .iter()
            .map(|message| message["role"].as_str().expect("a role"))
            .collect();
        assert_eq!(roles, ["user", "assistant", "user", "assistant"]);
        assert_eq!(messages["data"][2]["content"], reported);
        assert_complete(&run.events().await);
    }
}

#[tokio::test]
async fn a_second_invalid_answer_fails_the_run_and_is_kept() {
    let app = TestApp::setup().agent("solo", SCHEMA).spawn().await;
    app.provider.will(
        "solo",
        [says("no JSON"), says("{\"n\": 1.5}"), says("{\"n\": 7}")],
    );

    let run = app.run("solo", "go").await;

    let (code, message) = run.failure();
    assert_eq!(code, "output_invalid");
    assert!(
        message.ends_with("/n: 1.5 is not of type \"integer\""),
        "{message}"
    );
    assert_eq!(run["error"]["category"], "agent");
    assert_eq!(run["partial_content"], "{\"n\": 1.5}");
    assert_eq!(
        (&run["content"], &run["structured"]),
        (&Value::Null, &Value::Null)
    );
    assert_eq!(app.provider.requests().len(), 2, "only one repair");
}

#[tokio::test]
async fn no_repair_is_requested_without_a_turn() {
    let agent = format!("{SCHEMA}\n[limits]\nmax_turns = 1");
    let app = TestApp::setup().agent("solo", &agent).spawn().await;
    app.provider.will("solo", [says("no JSON")]);

    let run = app.run("solo", "go").await;

    assert_eq!(run.failure().0, "output_invalid");
    assert_eq!(run["partial_content"], "no JSON");
}

#[tokio::test]
async fn a_request_can_require_an_object_and_text_stays_text() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.always("solo", |_| says("{\"a\": [1]}"));
    let sent = json!({"input": "go", "response_format": {"type": "json_object"}});

    let object = app.run_with("solo", sent).await;
    let text = app.run("solo", "go").await;

    assert_eq!(object["structured"], json!({"a": [1]}));
    assert_eq!(text["structured"], Value::Null);
}

#[tokio::test]
async fn an_invalid_schema_is_refused_at_once() {
    let broken = "[params.response_format]\ntype = \"json_schema\"\nschema = { type = \"thing\" }";
    let app = TestApp::setup()
        .agent("solo", "")
        .agent("broken", broken)
        .spawn()
        .await;
    let sent =
        |schema: Value| json!({"response_format": {"type": "json_schema", "schema": schema}});

    let got = app
        .post("/agents/solo/runs", &sent(json!({"type": "thing"})))
        .await;
    assert!(
        got.problem(422).contains("is no JSON Schema"),
        "{}",
        got.text
    );
    assert_eq!(
        got.json()["errors"][0]["pointer"],
        "/response_format/schema"
    );
    let outside = sent(json!({"$ref": "http://127.0.0.1:9/x.json"}));
    let got = app.post("/agents/solo/runs", &outside).await;
    assert!(
        got.problem(422).contains("is no JSON Schema"),
        "{}",
        got.text
    );
    let got = app.post("/agents/broken/runs", &json!({})).await;
    let why = got.problem(422);
    assert!(
        why.contains("params.response_format.schema is no JSON Schema"),
        "{why}"
    );
}

#[tokio::test]
async fn an_expensive_schema_fails_only_its_own_run() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider
        .will("solo", [says("{\"a\": 1}"), says("{\"a\": 1}")]);
    // Each step asks the next one twice: 2^64 looks at one small object.
    let mut steps = serde_json::Map::new();
    for step in 0..64 {
        let next = json!({"$ref": format!("#/$defs/{}", step + 1)});
        let ask = |more: u32| json!({"allOf": [next, {"minProperties": more}]});
        steps.insert(step.to_string(), json!({"anyOf": [ask(1), ask(2)]}));
    }
    steps.insert("64".to_owned(), json!({"maxProperties": 0}));
    let schema = json!({"$defs": steps, "$ref": "#/$defs/0"});
    let format = json!({"type": "json_schema", "schema": schema});

    let body = json!({"input": "go", "response_format": format});
    let run = app.run_with("solo", body).await;

    assert_eq!(run["status"], "failed");
    assert_eq!(run["error"]["code"], "output_invalid");
    let why = run["error"]["message"].as_str().expect("a message");
    assert!(why.contains("takes too long to check"), "{why}");
    assert_eq!(run["partial_content"], "{\"a\": 1}");
}

#[tokio::test]
async fn a_childs_answer_is_checked_against_its_own_schema() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", SCHEMA)
        .spawn()
        .await;
    app.provider
        .will("planner", [delegates([("reader", "x")]), says("done")]);
    app.provider.will("reader", [says("no"), says("no")]);

    let run = app.run("planner", "go").await;

    assert_eq!(run.output(), "done");
    let reported = app
        .provider
        .wait_for_request("planner", 2)
        .await
        .tool_results()
        .remove(0);
    assert!(
        reported.starts_with(
            "Error: sub-agent \"reader\" failed - the final text does not match the requested format: "
        ),
        "{reported}"
    );
}

#[tokio::test]
async fn a_repair_continues_after_a_kill_and_is_not_repeated() {
    let mut app = TestApp::setup().agent("solo", SCHEMA).spawn().await;
    app.provider
        .will("solo", [says("no JSON"), hangs(), says("still none")]);
    let id = app.start("solo", "go").await.id().to_owned();
    let mut events = app.events(&app.find(&id).await).await;
    events
        .until_matches(|events| count(events, "turn.started") == 2)
        .await;
    app.provider.wait_for_request("solo", 2).await;

    app.crash_and_restart().await;

    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.failure().0, "output_invalid");
    assert_eq!(run["partial_content"], "still none");
    let seen = app.provider.requests();
    assert_eq!(seen.len(), 3);
    assert_eq!(seen[1].body["messages"], seen[2].body["messages"]);
    let events = run.events().await;
    assert_complete(&events);
    assert_eq!(kinds(&events).last(), Some(&"run.failed"));
}
