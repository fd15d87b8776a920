//! More tools than a model is offered: it searches for them and calls what it found.

use std::fs;

use axed::config::environment::process_environment;
use serde_json::{Value, json};

use crate::support::app::{Setup, TestApp};
use crate::support::events::Event;
use crate::support::eventually;
use crate::support::provider::answer::{ScriptedAnswer, calls, says};
use crate::tools::mcp::UNATTENDED;

const SERVER: &str = include_str!("mcp/many.py");

/// A daemon with the agent `a`, whose server `s` has 400 tools.
fn with_many(more: &str) -> Setup {
    let agent = format!(
        "{more}\n[[mcp_servers]]\nname = \"s\"\ntransport = \"stdio\"\ncommand = \"python3\"\nargs = [\"server.py\"]\nopen_timeout = 120"
    );
    let path = process_environment().remove("PATH").expect("a PATH");
    TestApp::setup()
        .file("server.py", SERVER)
        .agent("a", &agent)
        .environment("PATH", &path)
}

fn search(query: &str) -> ScriptedAnswer {
    calls([("tool_search", json!({"query": query, "limit": 2}))])
}

fn call(name: &str, arguments: Value) -> ScriptedAnswer {
    calls([("tool_call", json!({"name": name, "arguments": arguments}))])
}

/// Waits until the server has that many calls, and returns them.
async fn called(app: &TestApp, many: usize) -> Vec<String> {
    eventually("calls", async || {
        let text = fs::read_to_string(app.path("calls")).unwrap_or_default();
        let lines: Vec<String> = text.lines().map(str::to_owned).collect();
        (lines.len() >= many && text.ends_with('\n')).then_some(lines)
    })
    .await
}

fn tools_of(events: &[Event], kind: &str) -> Vec<String> {
    let of = events.iter().filter(|event| event.kind() == kind);
    of.map(|event| event["tool"].as_str().unwrap_or_default().to_owned())
        .collect()
}

#[tokio::test]
async fn tools_are_found_and_called_under_their_own_names() {
    let app = with_many("tools = [\"grep\"]\n[subagent]\nenabled = true")
        .spawn()
        .await;
    app.provider.will(
        "a",
        [
            search("create an Invoice"),
            call("s__create_invoice", json!({"id": "i7"})),
            call("s__create_invoice", json!({"ident": "i7"})),
            call("s__make_invoice", json!({"id": "i7"})),
            search("zeppelin"),
            says("done"),
        ],
    );

    let run = app.run("a", "go").await;

    assert_eq!(run.output(), "done");
    assert_eq!(called(&app, 1).await, ["create_invoice"]);
    let requests = app.provider.requests_for("a");
    for request in &requests {
        let offered = ["grep", "subagent", "tool_search", "tool_call"];
        assert_eq!(request.tool_names(), offered);
        assert_eq!(request.body["tools"], requests[0].body["tools"]);
    }
    let bytes = requests[0].body.to_string().len();
    assert!(bytes < 4 * 6000, "{bytes}");
    let results = requests[5].tool_results();
    let found: Value = serde_json::from_str(&results[0]).expect("JSON");
    let first = &found["tools"][0];
    assert_eq!(first["name"], "s__create_invoice");
    assert_eq!(first["parameters"]["required"], json!(["id"]));
    assert!(
        first["description"]
            .as_str()
            .expect("a text")
            .contains("with one invoice")
    );
    assert_eq!(found["tools"].as_array().map(Vec::len), Some(2));
    assert!(found["more"].as_u64() > Some(10), "{found}");
    assert_eq!(results[1], "create_invoice of i7");
    let misfit = "The arguments of s__create_invoice do not fit its schema: ";
    assert!(results[2].starts_with(misfit), "{}", results[2]);
    let near = &results[3];
    assert!(
        near.starts_with("Unknown tool: \"s__make_invoice\". "),
        "{near}"
    );
    assert!(near.contains("_invoice,"), "{near}");
    assert!(results[4].contains("400 tools of s"), "{}", results[4]);

    let events = run.events().await;
    let own = [
        "tool_search",
        "s__create_invoice",
        "s__create_invoice",
        "tool_call",
        "tool_search",
    ];
    assert_eq!(tools_of(&events, "tool.started"), own);
    assert_eq!(tools_of(&events, "tool.completed"), own);
    let turns = events
        .iter()
        .filter(|event| event.kind() == "turn.completed");
    let names = turns.filter_map(|turn| turn["tool_calls"][0]["name"].as_str());
    assert_eq!(names.collect::<Vec<_>>(), own);
    assert_eq!(run.usage().2, 5);
}

#[tokio::test]
async fn the_first_lines_of_descriptions_are_searched() {
    let app = with_many("").spawn().await;
    app.provider.will(
        "a",
        [search("billing refund"), search("much"), says("done")],
    );
    assert_eq!(app.run("a", "go").await.output(), "done");
    let results = app.provider.wait_for_request("a", 3).await.tool_results();
    let found: Value = serde_json::from_str(&results[0]).expect("JSON");
    assert_eq!(found["tools"][0]["name"], "s__get_refund");
    // 20 of each of three nouns.
    assert_eq!(found["more"], 58);
    assert!(results[1].starts_with("No tool matches"), "{}", results[1]);
}

#[tokio::test]
async fn approval_applies_to_the_tool_itself() {
    let app = with_many("approve = [\"s__delete_order\"]").spawn().await;
    app.provider.will(
        "a",
        [
            call("s__get_order", json!({"id": "o1"})),
            call("s__delete_order", json!({"id": "o1"})),
            says("done"),
        ],
    );

    let run = app.start("a", "go").await;
    let mut events = app.events(&run).await;
    let received = events.until("approval.requested").await;
    let asks = received.last().expect("an event");
    assert_eq!(asks["tool"], "s__delete_order");
    assert_eq!(asks["arguments"], json!({"id": "o1"}));
    let id = asks["tool_call_id"].as_str().expect("an id");
    assert_eq!(called(&app, 1).await, ["get_order"]);
    let path = format!("/runs/{}/approvals/{id}", run.id());
    let decided = app.post(&path, &json!({"decision": "approve"})).await;
    assert_eq!(decided.status, 202, "{}", decided.text);

    assert_eq!(run.wait_for_end().await.output(), "done");
    assert_eq!(called(&app, 2).await, ["get_order", "delete_order"]);
}

#[tokio::test]
async fn after_a_crash_only_safe_calls_are_repeated() {
    for (tool, is_safe) in [("watch_order", true), ("send_order", false)] {
        let mut app = with_many("").config(UNATTENDED).spawn().await;
        let name = format!("s__{tool}");
        app.provider.will(
            "a",
            [
                search("order"),
                call(&name, json!({"id": "o1", "hang": true})),
                says("done"),
            ],
        );
        let run = app.start("a", "go").await;
        let id = run.id().to_owned();
        assert_eq!(called(&app, 1).await, [format!("{tool} hung")]);

        app.crash_and_restart().await;

        let run = app.find(&id).await.wait_for_end().await;
        let events = run.events().await;
        assert_eq!(tools_of(&events, "tool.started"), ["tool_search", &*name]);
        if is_safe {
            assert_eq!(run.output(), "done");
            assert_eq!(called(&app, 2).await[1], tool);
            let results = app.provider.wait_for_request("a", 3).await.tool_results();
            assert_eq!(results[1], "watch_order of o1");
            continue;
        }
        let (code, message) = run.failure();
        assert_eq!(code, "interrupted");
        assert!(message.contains("\"s__send_order\""), "{message}");
        assert_eq!(run["error"]["retryable"], false);
        assert_eq!(called(&app, 1).await.len(), 1);
    }
}

#[tokio::test]
async fn a_dry_run_lists_deferred_tools() {
    for (above, offered, deferred) in [
        ("", 2, 400),
        ("= 0", 400, 0),
        ("= 400", 400, 0),
        ("= 399", 2, 400),
    ] {
        let config = match above {
            "" => String::new(),
            above => format!("[tools]\ndeferred_above {above}"),
        };
        let app = with_many("").config(&config).spawn().await;
        let dry = app.post("/agents/a/dry-run", &json!({})).await.json();
        let count = |key: &str| dry[key].as_array().expect("a list").len();
        assert_eq!(
            (count("tools"), count("deferred_tools")),
            (offered, deferred),
            "{above}"
        );
        if deferred > 0 {
            assert_eq!(dry["tools"][0]["name"], "tool_search");
            assert_eq!(dry["deferred_tools"][0], "s__get_invoice");
        }
    }
}
