//! `axed runs save` and `axed test`: a run becomes a test of its agents.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::cli::home::{Ended, ended};
use crate::forks::fork;
use crate::support::app::{ApiResponse, TestApp};
use crate::support::daemon::axed_command;
use crate::support::provider::answer::{calls, delegates, fails, says};
use crate::tools::approvals::{decide, requests};

/// Runs a command in the directory of the app.
pub async fn axed(app: &TestApp, arguments: &[&str]) -> Ended {
    ended(axed_command(&app.path("."), arguments)).await
}

pub async fn save(app: &TestApp, run: &str, file: &str) {
    let arguments = ["runs", "save", run, file, "--server", &app.daemon.url];
    let saved = axed(app, &arguments).await;
    assert!(
        saved.with(0).contains(&format!("axed test {file}")),
        "{}",
        saved.out
    );
}

pub fn read(app: &TestApp, file: &str) -> String {
    fs::read_to_string(app.path(file)).expect("a file")
}

/// Replaces a part of a file that occurs in it.
pub fn edit(app: &TestApp, file: &str, from: &str, to: &str) {
    let text = read(app, file);
    assert!(text.contains(from), "{from} is not in {text}");
    app.write(file, &text.replacen(from, to, 1));
}

/// The only test of `axed test --json`.
pub async fn tested(app: &TestApp, code: i32, arguments: &[&str]) -> Value {
    let arguments = [&["test", "--json"], arguments].concat();
    let ended = axed(app, &arguments).await;
    let report: Value = serde_json::from_str(ended.with(code)).expect("JSON");
    let tests = report["tests"].as_array().expect("tests");
    assert_eq!(tests.len(), 1, "{report}");
    tests[0].clone()
}

const PLANNER: &str = "sub_agents = [\"reader\"]\nsystem_prompt = \"Plan.\"";

/// A saved tree: a planner that calls a reader twice, one of which reads a file.
async fn saved_tree() -> TestApp {
    let app = TestApp::setup()
        .agent("planner", PLANNER)
        .agent(
            "reader",
            "tools = [\"read_file\"]\nsystem_prompt = \"Read.\"",
        )
        .file("notes.txt", "buy milk\n")
        .spawn()
        .await;
    app.provider.always("reader", |request| {
        let asks_for_notes = request.user_messages()[0].contains("notes");
        match request.turn() == 1 && asks_for_notes {
            true => calls([("read_file", json!({"path": "notes.txt"}))]),
            false => says("I have read it"),
        }
    });
    let first = delegates([("reader", "Read notes.txt"), ("reader", "Read the sky")]);
    app.provider
        .will("planner", [first, says("Buy milk first")]);
    let run = app.run("planner", "What now?").await.id().to_owned();
    save(&app, &run, "tests/plan.toml").await;
    app
}

#[tokio::test]
async fn a_saved_run_is_a_test_of_its_agents() {
    let app = saved_tree().await;
    let recording = read(&app, "tests/plan.toml");
    for part in [
        "path = \"planner/1.1:reader\"",
        "path = \"planner/1.2:reader\"",
        "arguments = { path = \"notes.txt\" }",
        "text = \"1: buy milk\"",
        "[expect]\ncompleted = true",
    ] {
        assert!(recording.contains(part), "{part} is not in {recording}");
    }
    assert!(!recording.contains("key-of-anthropic"), "{recording}");
    let run = recording.split_whitespace().nth(3).expect("an id");
    let again = [
        "runs",
        "save",
        run,
        "tests/plan.toml",
        "--server",
        &app.daemon.url,
    ];
    assert!(axed(&app, &again).await.err.contains("--force"));

    // Neither the provider nor the file is needed.
    let requests = app.provider.requests().len();
    fs::remove_file(app.path("notes.txt")).expect("a file");
    let passed = axed(&app, &["test"]).await;
    assert!(
        passed.with(0).starts_with("ok     tests/plan.toml"),
        "{}",
        passed.out
    );
    assert!(passed.err.contains("1 passed, 0 failed"), "{}", passed.err);
    assert_eq!(app.provider.requests().len(), requests);
}

#[tokio::test]
async fn the_first_difference_is_shown_and_can_be_accepted() {
    let app = saved_tree().await;
    app.write_agent(
        "reader",
        "tools = [\"read_file\"]\nsystem_prompt = \"Read aloud.\"",
    );
    let failed = axed(&app, &["test"]).await;
    for line in [
        "FAILED tests/plan.toml",
        "  planner/1.1:reader\n  turn 1, system (- recorded, + now):\n",
        "  - Read.\n  + Read aloud.\n",
    ] {
        assert!(
            failed.with(1).contains(line),
            "{line:?} is not in {}",
            failed.out
        );
    }
    edit(
        &app,
        "tests/plan.toml",
        "[expect]",
        "# Why it is here.\n[expect]",
    );
    let accepted = tested(&app, 0, &["--accept"]).await;
    assert_eq!(
        (&accepted["status"], &accepted["accepted"]),
        (&json!("passed"), &json!(true))
    );
    let recording = read(&app, "tests/plan.toml");
    assert!(
        recording.contains("# Why it is here.\n[expect]\ncompleted = true"),
        "{recording}"
    );
    assert_eq!(
        recording.matches("system = \"Read aloud.\"").count(),
        2,
        "{recording}"
    );
    assert_eq!(tested(&app, 0, &[]).await["accepted"], json!(false));

    // Another tool, another model, another prompt: each is found.
    let difference = async |toml: &str| {
        app.write_agent("planner", toml);
        tested(&app, 1, &[]).await["attempts"][0]["divergence"].clone()
    };
    let found = difference(&format!("{PLANNER}\nmodel = \"anthropic/other\"")).await;
    assert_eq!(
        (&found["field"], &found["now"]),
        (&json!("model"), &json!("anthropic/other"))
    );
    let found = difference(&format!("{PLANNER}\ntools = [\"grep\"]")).await;
    assert_eq!(found["field"], "tools");
    let found = difference(&format!("{PLANNER}\neffort = \"low\"")).await;
    assert_eq!(
        (&found["field"], &found["now"]),
        (&json!("effort"), &json!("low"))
    );
    let found = difference(&format!("{PLANNER}\n[params]\nmax_tokens = 7")).await;
    assert_eq!(found["field"], "params");
    let found = difference(&format!("{PLANNER}\n[limits]\nmax_turns = 1")).await;
    assert_eq!(
        (&found["field"], &found["path"]),
        (&json!("turn"), &json!("planner"))
    );
}

#[tokio::test]
async fn ignored_texts_may_differ() {
    let app = saved_tree().await;
    edit(
        &app,
        "tests/plan.toml",
        "text = \"I have read it\"",
        "text = \"I read it at 12:31\"",
    );
    let failed = tested(&app, 1, &[]).await;
    let divergence = &failed["attempts"][0]["divergence"];
    assert_eq!(divergence["field"], "messages[2].results[0]");
    assert_eq!(divergence["turn"], 2);
    let ignore = "ignore = ['(have )?read it( at \\d\\d:\\d\\d)?']";
    edit(&app, "tests/plan.toml", "ignore = []", ignore);
    tested(&app, 0, &[]).await;
}

#[tokio::test]
async fn a_limit_of_the_cost_needs_a_price() {
    let app = TestApp::setup()
        .agent("solo", "")
        .agent("local", "model = \"ollama/local\"")
        .spawn()
        .await;
    let limit = "completed = true\nmax_cost_usd = 1.0";
    for (agent, code) in [("local", 0), ("solo", 1)] {
        app.provider.will(agent, [says("done"), says("done")]);
        let run = app.run(agent, "go").await.id().to_owned();
        let file = format!("{agent}.toml");
        save(&app, &run, &file).await;
        edit(&app, &file, "completed = true", limit);
        let report = tested(&app, code, &[file.as_str()]).await;
        let failed = &report["attempts"][0]["failed"];
        if code == 0 {
            assert_eq!(failed, &json!([]));
            continue;
        }
        assert_eq!(failed[0]["assertion"], "max_cost_usd");
        let message = failed[0]["message"].as_str().expect("a message");
        assert!(message.contains("no price"), "{message}");
        let live = ["--live-models", file.as_str()];
        let report = tested(&app, code, &live).await;
        assert_eq!(report["attempts"][0]["failed"], *failed);
    }
}

#[tokio::test]
async fn assertions_are_checked() {
    let app = saved_tree().await;
    let expect = r#"completed = true
contains = ["milk", "first"]
matches = '^Buy \w+'
calls = ["call_agent", { tool = "read_file", arguments = { path = "notes.txt" }, agent = "reader" }, "call_agent"]
no_call = ["write_file", { tool = "read_file", arguments = { path = "/etc/passwd" } }]
max_tokens = 100000
max_cost_usd = 1.0
max_turns = 2"#;
    edit(&app, "tests/plan.toml", "completed = true", expect);
    let price = "[prices.\"anthropic/planner\"]\ninput = 1.0\noutput = 0.0\n[server]";
    edit(&app, "config/axed.toml", "[server]", price);
    tested(&app, 0, &[]).await;
    let failing = r#"completed = false
contains = "bread"
matches = "^milk"
schema = { type = "object" }
calls = ["read_file", "read_file"]
no_call = [{ tool = "call_agent", arguments = { agent = "reader" } }]
max_tokens = 1
max_turns = 1"#;
    edit(&app, "tests/plan.toml", expect, failing);
    let failed = tested(&app, 1, &["--junit", "junit.xml"]).await;
    let failed = failed["attempts"][0]["failed"]
        .as_array()
        .expect("assertions");
    let names: Vec<_> = failed.iter().map(|it| it["assertion"].as_str()).collect();
    let all = [
        "completed",
        "contains",
        "matches",
        "schema",
        "calls",
        "no_call",
        "max_tokens",
        "max_turns",
    ];
    assert_eq!(names, all.map(Some));
    let xml = read(&app, "junit.xml");
    assert!(xml.contains("failures=\"1\""), "{xml}");
    assert!(
        xml.contains("expect.contains: &quot;bread&quot; is missing"),
        "{xml}"
    );

    edit(
        &app,
        "tests/plan.toml",
        "completed = false",
        "complete = false",
    );
    let invalid = axed(&app, &["test"]).await;
    assert!(
        invalid
            .with(2)
            .contains("tests/plan.toml:9: unknown field `complete`"),
        "{}",
        invalid.out
    );
    let missing = axed(&app, &["test", "none.toml"]).await;
    assert_eq!(missing.code, 2, "{}", missing.err);
    fs::remove_file(app.path("agents/planner.toml")).expect("a file");
    edit(
        &app,
        "tests/plan.toml",
        "complete = false",
        "completed = false",
    );
    assert_eq!(tested(&app, 2, &[]).await["status"], "invalid");
}

#[tokio::test]
async fn decisions_failures_and_repairs_are_played_back() {
    let app = TestApp::setup()
        .agent(
            "writer",
            "tools = [\"write_file\"]\napprove = [\"write_file\"]\nsub_agents = [\"lost\"]",
        )
        .agent("lost", "[retry]\nmax_retries = 0")
        .agent("json", "[params.response_format]\ntype = \"json_object\"")
        .spawn()
        .await;
    app.provider.will("lost", [fails(400, "no such thing")]);
    app.provider.will(
        "writer",
        [
            calls([
                ("write_file", json!({"path": "a.txt", "content": "a"})),
                ("call_agent", json!({"agent": "lost", "task": "find it"})),
            ]),
            says("not written"),
        ],
    );
    app.provider
        .will("json", [says("no JSON"), says("{\"ok\": true}")]);
    let run = app.start("writer", "write").await;
    let waiting = app
        .get_until(&format!("/runs/{}", run.id()), |run| {
            run.json()["pending_approvals"][0].is_object()
        })
        .await
        .json();
    let call = waiting["pending_approvals"][0]["tool_call_id"]
        .as_str()
        .expect("a call");
    let url = format!("/runs/{}/approvals/{call}", run.id());
    app.post(&url, &json!({"decision": "deny", "reason": "not today"}))
        .await;
    app.get_until(&format!("/runs/{}", run.id()), |run| {
        run.json()["status"] == "completed"
    })
    .await;
    save(&app, run.id(), "tests/denied.toml").await;
    let repaired = app.run("json", "go").await.id().to_owned();
    save(&app, &repaired, "tests/repaired.toml").await;
    assert!(read(&app, "tests/denied.toml").contains("decision = \"denied\""));

    let passed = axed(&app, &["test"]).await;
    assert_eq!(passed.with(0).lines().count(), 2, "{}", passed.out);
    assert!(!app.path("a.txt").exists());
    app.write_agent(
        "writer",
        "tools = [\"write_file\"]\nsub_agents = [\"lost\"]",
    );
    let failed = tested(&app, 1, &["tests/denied.toml"]).await;
    let divergence = &failed["attempts"][0]["divergence"];
    assert_eq!(divergence["field"], "approval of write_file");
    assert_eq!(divergence["now"], "not needed");
}

#[tokio::test]
async fn only_whole_trees_that_have_ended_are_saved() {
    let app = saved_tree().await;
    let roots = app.get("/runs").await.json();
    let root = roots["data"][0]["id"].as_str().expect("an id").to_owned();
    let children = app.get(&format!("/runs/{root}/children")).await.json();
    let child = children["data"][0]["id"].as_str().expect("an id");
    let refused = app.get(&format!("/runs/{child}/recording")).await;
    refused.problem(409);
    assert_eq!(refused.json()["code"], "not_a_root");
    let unknown = "run_019a2b3c-0000-7000-8000-000000000000";
    let missing = app.get(&format!("/runs/{unknown}/recording")).await;
    missing.problem(404);
    let found = app.get(&format!("/runs/{root}/recording")).await;
    assert_eq!(found.header("content-type"), "application/toml");
}

#[tokio::test]
async fn the_shipped_agents_pass_their_tests() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let passed = ended(axed_command(root, &["test"])).await;
    for name in [
        "planner",
        "planner-scripted",
        "coordinator-scripted",
        "fixer",
        "librarian",
        "reviewer",
        "scout",
        "vision",
    ] {
        let line = format!("ok     tests/agents/{name}.toml");
        assert!(
            passed.with(0).contains(&line),
            "{line} is not in {}",
            passed.out
        );
    }
}

#[tokio::test]
async fn secrets_of_the_operator_are_left_out() {
    let config = "[data]\nredact = ['pin-\\d+']";
    let app = TestApp::setup()
        .agent("solo", "")
        .config(config)
        .spawn()
        .await;
    app.provider.will("solo", [says("it is pin-1234")]);
    let run = app.run("solo", "My code is pin-1234").await.id().to_owned();
    save(&app, &run, "tests/pin.toml").await;
    let recording = read(&app, "tests/pin.toml");
    assert!(!recording.contains("pin-1234"), "{recording}");

    let off = "[data]\nrequests = \"off\"";
    let app = TestApp::setup().agent("solo", "").config(off).spawn().await;
    app.provider.will("solo", [says("done")]);
    let run = app.run("solo", "go").await.id().to_owned();
    let refused = app.get(&format!("/runs/{run}/recording")).await;
    assert!(
        refused.problem(409).contains("requests = \"full\""),
        "{}",
        refused.text
    );
    assert_eq!(refused.json()["code"], "not_recorded");
}

#[tokio::test]
async fn a_fork_with_copied_approvals_is_a_test() {
    let agent =
        "tools = [\"write_file\", \"grep\"]\napprove = [\"write_file\"]\nworkdir = \"work\"";
    let app = TestApp::setup()
        .agent("careful", agent)
        .file("work/x", "")
        .spawn()
        .await;
    let writes = |path: &str| {
        let arguments = json!({"path": path, "content": "new"});
        calls([("write_file", arguments)])
    };
    let last = [writes("c"), says("done")];
    app.provider.will("careful", [writes("a"), writes("b")]);
    app.provider.will("careful", last);
    let id = app.start("careful", "go").await.id().to_owned();
    for (number, decision) in [(1, "approve"), (2, "deny"), (3, "approve")] {
        let request = requests(&app, &id, number).await.remove(number - 1);
        decide(&app, &request, json!({"decision": decision})).await;
    }
    app.find(&id).await.wait_for_end().await;
    app.provider.will("careful", [says("ended otherwise")]);
    let forked = fork(&app, &id, &json!({"at": {"turn": 4}})).await;
    assert_eq!(forked.output(), "ended otherwise");
    save(&app, forked.id(), "tests/fork.toml").await;
    let recording = read(&app, "tests/fork.toml");
    assert_eq!(recording.matches("\"approved\"").count(), 2, "{recording}");
    tested(&app, 0, &[]).await;
    // An approval that is not needed any more is a difference.
    app.write_agent(
        "careful",
        &agent.replace("approve = [\"write_file\"]\n", ""),
    );
    let failed = tested(&app, 1, &[]).await;
    let divergence = &failed["attempts"][0]["divergence"];
    assert_eq!(divergence["field"], "approval of write_file", "{failed}");
}

/// A chat completion with instructions and a tool of the client.
async fn chat(app: &TestApp, messages: &[Value]) -> ApiResponse {
    let body = json!({
        "model": "solo", "messages": messages, "tool_choice": "required",
        "tools": [{"type": "function", "function": {
            "name": "weather", "description": "The weather.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        }}],
    });
    let response = app.post("/v1/chat/completions", &body).await;
    assert_eq!(response.status, 200, "{}", response.text);
    response
}

#[tokio::test]
async fn what_a_client_adds_to_an_agent_is_played_back() {
    let agent = "system_prompt = \"Be kind.\"\n[memory]\nenabled = true";
    let app = TestApp::setup().agent("solo", agent).spawn().await;
    let weather = calls([("weather", json!({"city": "Bonn"}))]);
    app.provider
        .will("solo", [says("Hello"), weather, says("It rains")]);
    app.run("solo", "I am Ada").await;
    let mut messages = vec![
        json!({"role": "system", "content": "Be brief."}),
        json!({"role": "user", "content": "How is it?"}),
    ];
    let waiting = chat(&app, &messages).await.json();
    let reply = waiting["choices"][0]["message"].clone();
    let call = reply["tool_calls"][0]["id"].clone();
    let result = json!({"role": "tool", "tool_call_id": call, "content": "rain"});
    messages.extend([reply, result]);
    let ended = chat(&app, &messages).await;
    let run = app.find(ended.header("x-run-id")).await;
    assert_eq!(run.output(), "It rains");
    save(&app, run.id(), "tests/chat.toml").await;
    let recording = read(&app, "tests/chat.toml");
    for part in ["client = {", "**Task:** I am Ada", "id = \"weather\""] {
        assert!(recording.contains(part), "{part} is not in {recording}");
    }

    tested(&app, 0, &[]).await;
    // There is no client that could execute its tool.
    tested(&app, 0, &["--live-tools"]).await;
    edit(&app, "tests/chat.toml", "Be brief.", "Be exact.");
    let failed = tested(&app, 1, &[]).await;
    assert_eq!(failed["attempts"][0]["divergence"]["field"], "system");
    edit(&app, "tests/chat.toml", "[\"weather\"]", "[\"climate\"]");
    let invalid = tested(&app, 2, &[]).await;
    let error = invalid["error"].as_str().expect("an error");
    assert!(error.contains("has the id \"climate\""), "{error}");
}

#[tokio::test]
async fn a_request_that_is_not_recorded_is_not_saved() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.will("solo", [says("done")]);
    let request = json!({"input": "go", "context": "x".repeat(70_000)});
    let run = app.run_with("solo", request).await;
    let refused = app.get(&format!("/runs/{}/recording", run.id())).await;
    let why = refused.problem(409);
    assert!(why.contains("above 64 KiB"), "{why}");
    assert_eq!(refused.json()["code"], "not_recorded");
}
