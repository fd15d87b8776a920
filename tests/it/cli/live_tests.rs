//! `axed test` with live models and tools, and with what a run had beside its agents: a conversation, a memory, MCP servers.

use std::fs;

use axed::config::environment::process_environment;
use serde_json::{Value, json};

use crate::cli::recordings::{axed, edit, read, save, tested};
use crate::support::app::TestApp;
use crate::support::provider::answer::{calls, fails, says};

/// A saved run whose agent reads a file, and a judge.
async fn saved_reader() -> TestApp {
    let app = TestApp::setup()
        .agent("reader", "tools = [\"read_file\"]")
        .agent("judge", "")
        .file("notes.txt", "buy milk\n")
        .spawn()
        .await;
    app.provider.will("reader", reads_and("milk"));
    let run = app.run("reader", "What to buy?").await.id().to_owned();
    save(&app, &run, "tests/reader.toml").await;
    let expect = "completed = true\ncontains = \"milk\"";
    edit(&app, "tests/reader.toml", "completed = true", expect);
    app
}

fn reads_and(says_text: &str) -> [crate::support::provider::answer::ScriptedAnswer; 2] {
    [
        calls([("read_file", json!({"path": "notes.txt"}))]),
        says(says_text),
    ]
}

/// The last result that the reader's model was sent.
fn last_result(app: &TestApp) -> String {
    let request = app.provider.requests_for("reader").pop();
    request.expect("a request").tool_results().remove(0)
}

#[tokio::test]
async fn live_models_are_judged_by_the_assertions() {
    let app = saved_reader().await;
    app.write("notes.txt", "buy bread\n");
    for text in ["milk", "bread", "milk, please"] {
        app.provider.will("reader", reads_and(text));
    }
    let repeat = ["--live-models", "--repeat", "3", "--pass", "0.6"];
    let passed = tested(&app, 0, &repeat).await;
    let attempts = passed["attempts"].as_array().expect("attempts");
    let passes: Vec<_> = attempts.iter().map(|it| it["passed"] == true).collect();
    assert_eq!(passes, [true, false, true]);
    assert_eq!(last_result(&app), "1: buy milk", "as recorded");

    app.provider.will("reader", reads_and("milk"));
    tested(&app, 0, &["--live"]).await;
    assert_eq!(last_result(&app), "1: buy bread", "as it is");

    app.provider.will("reader", [fails(400, "no such model")]);
    let failed = tested(&app, 3, &["--live-models"]).await;
    assert_eq!(failed["status"], "provider_failed");
}

#[tokio::test]
async fn judges_decide_only_about_live_models() {
    let app = saved_reader().await;
    let judge =
        "contains = \"milk\"\njudge = [{ agent = \"judge\", question = \"Is it polite?\" }]";
    edit(&app, "tests/reader.toml", "contains = \"milk\"", judge);
    let requests = app.provider.requests().len();
    tested(&app, 0, &[]).await;
    assert_eq!(app.provider.requests().len(), requests);

    let verdict = async |holds: bool, code| {
        app.provider.will("reader", reads_and("milk"));
        let answer = json!({"holds": holds, "reason": "no please"});
        app.provider.will("judge", [says(answer.to_string())]);
        tested(&app, code, &["--live-models"]).await
    };
    verdict(true, 0).await;
    let failed = verdict(false, 1).await["attempts"][0]["failed"][0].clone();
    assert_eq!(failed["assertion"], "judge");
    let message = failed["message"].as_str().expect("a message");
    assert!(
        message.contains("Is it polite?") && message.contains("no please"),
        "{message}"
    );
}

#[tokio::test]
async fn a_judge_that_cannot_judge_is_an_error_of_the_file_or_of_its_provider() {
    let app = saved_reader().await;
    let judge =
        "contains = \"milk\"\njudge = [{ agent = \"nobody\", question = \"Is it polite?\" }]";
    edit(&app, "tests/reader.toml", "contains = \"milk\"", judge);
    app.provider.will("reader", reads_and("milk"));
    let invalid = tested(&app, 2, &["--live-models"]).await;
    assert_eq!(invalid["status"], "invalid");
    let error = invalid["error"].as_str().expect("an error");
    assert!(error.contains("judge nobody: "), "{error}");

    edit(&app, "tests/reader.toml", "nobody", "judge");
    app.provider.will("reader", reads_and("milk"));
    app.provider.will("judge", [fails(400, "no such model")]);
    let failed = tested(&app, 3, &["--live-models"]).await;
    assert_eq!(failed["status"], "provider_failed");
}

#[tokio::test]
async fn a_conversation_and_a_memory_are_played_back() {
    let app = TestApp::setup()
        .agent("solo", "[memory]\nenabled = true")
        .spawn()
        .await;
    app.provider
        .will("solo", [says("Ada, then"), says("You are Ada")]);
    let talk = |input: &str| json!({"input": input, "session": "talk"});
    app.run_with("solo", talk("I am Ada")).await;
    let run = app
        .run_with("solo", talk("Who am I?"))
        .await
        .id()
        .to_owned();
    save(&app, &run, "tests/talk.toml").await;
    let recording = read(&app, "tests/talk.toml");
    for part in ["content = \"Ada, then\"", "**Task:** I am Ada"] {
        assert!(recording.contains(part), "{part} is not in {recording}");
    }
    let memory = "## 2026-01-01T00:00:00Z\n**Task:** other\n**Result:** ok\n\n";
    app.write("notes/solo.md", memory);
    app.write_agent("solo", "[memory]\nenabled = true\npath = \"notes/solo.md\"");
    tested(&app, 0, &[]).await;
    let after = fs::read_to_string(app.path("notes/solo.md")).expect("a memory");
    assert_eq!(after, memory);
    edit(&app, "tests/talk.toml", "Ada, then", "Ada it is");
    tested(&app, 0, &[]).await;
}

#[tokio::test]
async fn tools_of_servers_are_offered_without_the_servers() {
    let path = process_environment().remove("PATH").expect("a PATH");
    let server = "[[mcp_servers]]\nname = \"s\"\ntransport = \"stdio\"\ncommand = \"python3\"\nargs = [\"server.py\"]";
    let app = TestApp::setup()
        .file("server.py", include_str!("../tools/mcp/server.py"))
        .agent("a", server)
        .environment("PATH", &path)
        .spawn()
        .await;
    let call = calls([("s__echo", json!({"text": "hi"}))]);
    app.provider.will("a", [call, says("done")]);
    let run = app.run("a", "go").await.id().to_owned();
    save(&app, &run, "tests/mcp.toml").await;
    assert!(read(&app, "tests/mcp.toml").contains("[[mcp]]\nserver = \"s\""));
    fs::remove_file(app.path("server.py")).expect("a file");
    tested(&app, 0, &[]).await;
    app.write_agent("a", &format!("{server}\ntools = [\"echo\"]"));
    let failed = tested(&app, 1, &[]).await;
    assert_eq!(failed["attempts"][0]["divergence"]["field"], "tools");
}

#[tokio::test]
async fn a_recording_opens_no_paths() {
    let app = saved_reader().await;
    let request = "[request]\nskill = \"/etc/hostname\"\n\n[expect]";
    edit(&app, "tests/reader.toml", "[expect]", request);
    let refused: Value = tested(&app, 2, &[]).await;
    let error = refused["error"].as_str().expect("an error");
    assert!(error.contains("skill cannot be overridden"), "{error}");
    edit(&app, "tests/reader.toml", "skill = ", "include = ");
    let invalid = axed(&app, &["test"]).await;
    assert!(invalid.with(2).contains("[request]"), "{}", invalid.out);
}
