//! Agents with `[input_schema]`: objects as input, checked, recorded, and shown to the model as JSON or through a template.

use serde_json::{Value, json};

use crate::support::app::TestApp;
use crate::support::provider::answer::{calls, says};

const SORTER: &str = r#"
input_template = "Sort ticket {ticket.id}: {ticket.text} {{urgent: {urgent}}}"

[input_schema]
type = "object"
required = ["ticket"]
additionalProperties = false

[input_schema.properties.urgent]
type = "boolean"

[input_schema.properties.ticket]
type = "object"
required = ["id", "text"]
properties = { id = { type = "integer" }, text = { type = "string", pattern = "\\S" } }
"#;

fn ticket() -> Value {
    json!({ "ticket": { "id": 7, "text": "It {burns}" }, "urgent": true })
}

#[tokio::test]
async fn an_object_reaches_the_model_through_the_template() {
    let app = TestApp::setup().agent("sorter", SORTER).spawn().await;
    app.provider.always("sorter", |_| says("fire"));
    let body = json!({ "input": ticket(), "context": "Night shift." });

    let run = app.run_with("sorter", body).await;

    assert_eq!(run.output(), "fire");
    let sent = app.provider.wait_for_request("sorter", 1).await;
    let message = "Sort ticket 7: It {burns} {urgent: true}\n\nContext:\nNight shift.";
    assert_eq!(sent.user_messages(), [message]);
    let recorded: Value = serde_json::from_str(run["input"].as_str().expect("text")).expect("JSON");
    assert_eq!(recorded, ticket());
    // What is recorded can be sent again as it is.
    let again = app
        .run("sorter", run["input"].as_str().expect("text"))
        .await;
    assert_eq!(again["input"], run["input"]);
    let sent = app.provider.wait_for_request("sorter", 2).await;
    assert_eq!(
        sent.user_messages(),
        ["Sort ticket 7: It {burns} {urgent: true}"]
    );
}

#[tokio::test]
async fn an_object_without_a_template_reaches_the_model_as_json() {
    let schema = "[input_schema]\ntype = \"object\"\nproperties = { a = { type = \"array\" } }";
    let app = TestApp::setup().agent("solo", schema).spawn().await;
    app.provider.always("solo", |_| says("done"));
    app.run_with("solo", json!({ "input": { "a": [1, "x"] } }))
        .await;
    let none = app.run_with("solo", json!({})).await;
    assert_eq!(none["input"], "{}");
    let sent: Vec<_> = app.provider.requests_for("solo");
    let sent: Vec<String> = sent.iter().flat_map(|it| it.user_messages()).collect();
    assert_eq!(sent, [r#"{"a":[1,"x"]}"#, "{}"]);
}

#[tokio::test]
async fn an_input_that_does_not_fit_is_rejected_with_its_place() {
    let app = TestApp::setup()
        .agent("sorter", SORTER)
        .agent("plain", "")
        .spawn()
        .await;
    let parts = json!([{ "type": "text", "text": "go" }]);
    for (agent, input, pointer) in [
        (
            "sorter",
            json!({ "ticket": { "id": "x", "text": "y" } }),
            "/input/ticket/id",
        ),
        (
            "sorter",
            json!({ "ticket": { "id": 1, "text": " " } }),
            "/input/ticket/text",
        ),
        ("sorter", json!({ "tickets": [] }), "/input"),
        ("sorter", json!("Sort this."), "/input"),
        ("sorter", json!("[1]"), "/input"),
        ("sorter", parts, "/input"),
        ("sorter", json!(null), "/input"),
        ("plain", ticket(), "/input"),
    ] {
        for route in ["runs", "dry-run"] {
            let path = format!("/agents/{agent}/{route}");
            let answer = app.post(&path, &json!({ "input": input })).await;
            let detail = answer.problem(422);
            assert!(detail.starts_with(pointer), "{input}: {detail}");
            assert_eq!(answer.json()["errors"][0]["pointer"], pointer, "{input}");
            assert_eq!(answer.json()["code"], "invalid_field");
        }
    }
    assert!(app.provider.requests().is_empty());
    let runs = app.get("/runs").await.json();
    assert_eq!(runs["data"], json!([]), "no run was recorded");
}

#[tokio::test]
async fn another_agent_passes_the_fields_as_arguments() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"sorter\", \"plain\"]")
        .agent("sorter", SORTER)
        .agent("plain", "")
        .spawn()
        .await;
    let call = |arguments: Value| {
        let arguments = json!({ "agent": "sorter", "arguments": arguments, "context": "c" });
        calls([("call_agent", arguments)])
    };
    let text = ticket().to_string();
    app.provider.will(
        "planner",
        [
            call(json!({ "ticket": { "id": "x" } })),
            call(ticket()),
            calls([("call_agent", json!({ "agent": "sorter", "task": text }))]),
            says("done"),
        ],
    );
    app.provider.always("sorter", |_| says("fire"));

    let run = app.run("planner", "go").await;

    assert_eq!(run.output(), "done");
    let last = app.provider.wait_for_request("planner", 4).await;
    let results = last.tool_results();
    assert!(
        results[0].starts_with(
            "Error: sub-agent \"sorter\" failed - its input does not fit its schema: "
        ),
        "{results:?}"
    );
    assert!(
        results[0].contains("/ticket/id: \"x\" is not of type \"integer\""),
        "{results:?}"
    );
    assert_eq!(results[1..], ["fire", "fire"]);
    let offered = &last.tools()[0];
    let text = offered.to_string();
    assert!(
        text.contains("sorter takes no task, but arguments that fit this JSON Schema"),
        "{text}"
    );
    assert!(text.contains("additionalProperties"), "{text}");
    let sent = app.provider.wait_for_request("sorter", 1).await;
    let message = "Sort ticket 7: It {burns} {urgent: true}\n\nContext:\nc";
    assert_eq!(sent.user_messages(), [message]);
    let children = run.tree().await["children"].clone();
    assert_eq!(children.as_array().map(Vec::len), Some(2));
    let task = children[0]["task"].as_str().expect("a task");
    let task: Value = serde_json::from_str(task).expect("JSON");
    assert_eq!(task, ticket());
}

#[tokio::test]
async fn the_schema_is_shown_and_its_errors_have_a_place() {
    let wrong = [
        (
            "a",
            "input_template = \"{x}\"",
            "input_template needs [input_schema]",
        ),
        (
            "b",
            "input_template = \"{x}\"\n[input_schema]\ntype = \"object\"\nproperties = { y = {} }",
            "input_template has {x}, but the schema has no property \"x\"; it has: y",
        ),
        (
            "c",
            "input_template = \"{x\"",
            "input_template has a single brace",
        ),
        (
            "d",
            "[input_schema]\ntype = \"array\"",
            "input_schema must have type = \"object\"",
        ),
        (
            "e",
            "[input_schema]\ntype = \"object\"\nproperties = { y = { type = \"z\" } }",
            "input_schema is no JSON Schema",
        ),
    ];
    let setup = TestApp::setup().agent("sorter", SORTER);
    let setup = wrong
        .iter()
        .fold(setup, |setup, (name, toml, _)| setup.agent(name, toml));
    let app = setup.spawn().await;
    let agent = app.get("/agents/sorter").await.json();
    let definition = &agent;
    assert_eq!(definition["input_schema"]["required"], json!(["ticket"]));
    let template = definition["input_template"].as_str();
    assert!(
        template.is_some_and(|it| it.starts_with("Sort ticket {")),
        "{definition}"
    );
    for (name, _, expected) in wrong {
        let answer = app.post(&format!("/agents/{name}/runs"), &json!({})).await;
        let detail = answer.problem(422);
        assert!(detail.contains(expected), "{detail}");
    }
}
