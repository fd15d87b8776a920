//! The events of a run contain its conversation: arguments, results and final texts, up to a size.

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::app::{TestApp, send};
use crate::support::events::{Event, assert_complete};
use crate::support::provider::answer::{ScriptedAnswer, calls, delegates, raw, says};
use crate::tools::approvals::{approve, requests};

const WORKER: &str = "workdir = \"work\"\ntools = [\"read_file\", \"write_file\"]\n";

fn of_type<'e>(events: &'e [Event], kind: &str) -> Vec<&'e Event> {
    let matching = events.iter().filter(|event| event.kind() == kind);
    matching.collect()
}

/// A reply that calls `write_file` with arguments on several lines.
fn writes_with_line_breaks() -> ScriptedAnswer {
    let input = "{\r\n  \"path\": \"a\",\n  \"content\": \"one\\ntwo\"\n}";
    let body = format!(
        r#"{{"id": "msg_1", "type": "message", "role": "assistant", "model": "careful", "content": [{{"type": "tool_use",
        "id": "call_1", "name": "write_file", "input": {input}}}], "stop_reason": "tool_use", "stop_sequence": null,
        "usage": {{"input_tokens": 1, "output_tokens": 1}}}}"#
    );
    raw(200, "application/json", body)
}

#[tokio::test]
async fn an_event_stream_contains_the_whole_conversation() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"worker\"]")
        .agent(
            "worker",
            &format!("{WORKER}[sub_agents_config]\nparallel = false\n"),
        )
        .file("work/a.md", "alpha")
        .spawn()
        .await;
    app.provider.will(
        "planner",
        [delegates([("worker", "read a.md")]), says("It says alpha.")],
    );
    app.provider.will(
        "worker",
        [
            calls([
                ("read_file", json!({"path": "a.md"})),
                ("read_file", json!({"path": "b.md"})),
            ]),
            says("alpha"),
        ],
    );
    let request = app
        .request(Method::POST, "/agents/planner/runs")
        .header("accept", "text/event-stream")
        .json(&json!({"input": "What does it say?"}));
    let stream = send(request).await;
    let data = stream
        .text
        .lines()
        .filter_map(|it| it.strip_prefix("data: "));
    let events = data.map(|data| serde_json::from_str(data).expect("JSON"));
    let events: Vec<Event> = events.map(Event::new).collect();

    let started = of_type(&events, "tool.started");
    let arguments: Vec<&Value> = started.iter().map(|event| &event["arguments"]).collect();
    assert_eq!(
        arguments,
        [
            &json!({"agent": "worker", "task": "read a.md"}),
            &json!({"path": "a.md"}),
            &json!({"path": "b.md"}),
        ]
    );
    let completed = of_type(&events, "tool.completed");
    let results: Vec<&Value> = completed.iter().map(|event| &event["result"]).collect();
    assert_eq!(results[0], "1: alpha");
    assert!(results[1].as_str().is_some_and(|it| it.contains("b.md")));
    assert_eq!(results[2], "alpha");
    let failed: Vec<&Value> = completed.iter().map(|event| &event["is_error"]).collect();
    assert_eq!(failed, [false, true, false]);
    let completed = of_type(&events, "run.completed");
    let contents: Vec<&Value> = completed.iter().map(|event| &event["content"]).collect();
    assert_eq!(contents, ["alpha", "It says alpha."]);
    let is_cut = |event: &&Event| !event["truncated"].is_null();
    assert_eq!(events.iter().filter(is_cut).count(), 0);
}

#[tokio::test]
async fn long_texts_in_events_are_cut_at_a_character() {
    let app = TestApp::setup()
        .agent("worker", WORKER)
        .file("work/long.md", &"ö".repeat(2_000))
        .spawn()
        .await;
    let (content, answer) = ("ä".repeat(2_000), "€".repeat(6_000));
    app.provider.will(
        "worker",
        [
            calls([("write_file", json!({"content": content, "path": "b.md"}))]),
            calls([("read_file", json!({"path": "long.md"}))]),
            says(&answer),
        ],
    );

    let run = app.run("worker", "go").await;
    let events = run.events().await;

    assert_eq!(run.output(), answer);
    let started = of_type(&events, "tool.started")[0];
    let arguments = started["arguments"].as_str().expect("a string");
    assert!(arguments.starts_with("{\"content\":\"ä"), "{arguments}");
    assert!((2_046..=2_048).contains(&arguments.len()));
    let read = of_type(&events, "tool.completed")[1];
    let result = read["result"].as_str().expect("a text");
    assert!(result.starts_with("1: ö") && (2_046..=2_048).contains(&result.len()));
    let completed = of_type(&events, "run.completed")[0];
    let shown = completed["content"].as_str().expect("a text");
    assert_eq!(shown, "€".repeat(16_384 / 3));
    assert_eq!(completed["characters"], 6_000);
    for event in [started, read, completed] {
        assert_eq!(event["truncated"], true);
    }
}

#[tokio::test]
async fn arguments_with_line_breaks_stay_one_event_also_after_a_restart() {
    let mut app = TestApp::setup()
        .agent("careful", &format!("{WORKER}approve = [\"write_file\"]\n"))
        .file("work/here", "")
        .spawn()
        .await;
    app.provider
        .will("careful", [writes_with_line_breaks(), says("done")]);
    let id = app.start("careful", "go").await.id().to_owned();
    let request = requests(&app, &id, 1).await.remove(0);
    let arguments = json!({"path": "a", "content": "one\ntwo"});
    assert_eq!(request["arguments"], arguments);

    app.crash_and_restart().await;
    approve(&app, &request).await;

    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "done");
    let events = run.events().await;
    assert_complete(&events);
    assert_eq!(of_type(&events, "tool.started")[0]["arguments"], arguments);
    let completed = of_type(&events, "tool.completed")[0];
    assert_eq!(completed["result"], "wrote 7 bytes to a");
    assert_eq!(of_type(&events, "run.completed")[0]["content"], "done");
}
