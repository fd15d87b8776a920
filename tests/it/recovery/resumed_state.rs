//! What a resumed run keeps: its definition, request, budget, turns and memory.

use crate::recovery::after_kill::{PLANNER, is_as_charged, started};
use crate::support::app::TestApp;
use crate::support::provider::answer::{delegates, hangs, says};
use serde_json::json;
use std::fs;

/// Changes an agent's file, its notes and its memory while no daemon runs.
#[tokio::test]
async fn a_resumed_run_keeps_its_definition() {
    let file = "system_prompt = \"Old.\"\nfiles = [\"notes.md\"]\nsub_agents = [\"reader\"]\n\
                [memory]\nenabled = true\n[params]\ntemperature = 0.5";
    let mut app = TestApp::setup()
        .agent("planner", file)
        .agent("reader", "system_prompt = \"Old reader.\"")
        .file("notes.md", "old notes")
        .spawn()
        .await;
    app.provider.will(
        "planner",
        [delegates([("reader", "x")]), hangs(), says("planned")],
    );
    app.provider
        .will("reader", [says("read"), hangs(), says("read again")]);
    let first = started(&app, "planner", 3).await;
    app.provider.wait_for_request("planner", 2).await;
    let second = started(&app, "reader", 1).await;
    app.provider.wait_for_request("reader", 2).await;
    let version = app.find(&first).await["agent_version"].clone();

    app.daemon.kill().await;
    app.write_agent(
        "planner",
        "model = \"anthropic/other\"\nsystem_prompt = \"New.\"",
    );
    app.write("notes.md", "new notes");
    app.write(
        "data/memory/planner.md",
        "## 2026-01-01T00:00:00Z\n**Task:** forged\n**Result:** forged\n\n",
    );
    fs::remove_file(app.path("agents/reader.toml")).expect("a file");
    app.restart_after_end().await;

    assert_eq!(
        app.find(&first).await.wait_for_end().await.output(),
        "planned"
    );
    assert_eq!(
        app.find(&second).await.wait_for_end().await.output(),
        "read again"
    );
    let sent = app.provider.requests_for("planner");
    assert!(sent[1].system().starts_with("Old."), "{}", sent[1].system());
    assert_eq!(sent[1].body, sent[2].body);
    let sent = app.provider.requests_for("reader");
    assert_eq!(sent[1].body, sent[2].body);
    assert!(app.provider.requests_for("other").is_empty());
    assert_eq!(app.find(&first).await["agent_version"], version);
}

#[tokio::test]
async fn a_requests_overrides_survive_a_restart() {
    let mut app = TestApp::setup()
        .agent("planner", PLANNER)
        .agent("reader", "")
        .spawn()
        .await;
    app.provider.will(
        "planner",
        [hangs(), delegates([("reader", "x")]), says("never")],
    );
    app.provider.always("reader", |_| says("read"));
    let body = json!({
        "input": "go", "labels": {"team": "x"}, "params": {"temperature": 0.25},
        "budget": {"max_tokens": 20},
    });
    let id = app.start_with("planner", body).await.id().to_owned();
    app.provider.wait_for_request("planner", 1).await;

    app.crash_and_restart().await;

    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run["labels"], json!({"team": "x"}));
    let sent = app.provider.requests_for("planner");
    assert_eq!(sent[1].body["temperature"], 0.25);
    assert_eq!(sent[0].body, sent[1].body);
    // The planner's 15 and the reader's 15.
    assert_eq!(run.failure().1, "budget exceeded: used 30 of 20 tokens");
}

#[tokio::test]
async fn usage_before_a_restart_counts_against_the_budget() {
    for (budget, used) in [
        ("max_tokens = 100", "105 of 100 tokens"),
        ("max_runs = 2", "2 of 2 runs"),
        ("max_tool_calls = 1", "1 of 1 tool calls"),
    ] {
        let mut app = TestApp::setup()
            .agent("planner", &format!("{PLANNER}\n[budget]\n{budget}"))
            .agent("reader", "")
            .spawn()
            .await;
        let ask = || delegates([("reader", "x")]).with_usage(50, 10);
        app.provider.will("planner", [ask(), ask(), says("never")]);
        app.provider.will(
            "reader",
            [hangs(), says("read").with_usage(30, 15), says("never")],
        );
        let id = started(&app, "planner", 2).await;
        app.provider.wait_for_request("reader", 1).await;

        app.crash_and_restart().await;

        let run = app.find(&id).await.wait_for_end().await;
        let message = format!("budget exceeded: used {used}");
        assert_eq!(run.failure(), ("budget_exceeded", message.as_str()));
        assert_eq!(run.children().await[0].output(), "read");
        assert_eq!(app.provider.requests_for("reader").len(), 2, "{budget}");
        is_as_charged(&app, &run);
    }
}

#[tokio::test]
async fn turns_and_repetitions_before_a_restart_count() {
    let mut app = TestApp::setup()
        .config("[limits]\nloop_warn = 2\nloop_stop = 3")
        .agent("short", &format!("{PLANNER}\n[limits]\nmax_turns = 2"))
        .agent("circling", PLANNER)
        .agent("reader", "")
        .spawn()
        .await;
    let ask = || delegates([("reader", "x")]).with_text("again");
    app.provider.will("short", [ask(), hangs(), ask()]);
    app.provider
        .will("circling", [ask(), ask(), hangs(), ask(), says("never")]);
    app.provider.always("reader", |_| says("the same"));
    let short = started(&app, "short", 3).await;
    let circling = started(&app, "circling", 5).await;
    app.provider.wait_for_request("short", 2).await;
    app.provider.wait_for_request("circling", 3).await;

    app.crash_and_restart().await;

    let run = app.find(&short).await.wait_for_end().await;
    assert_eq!(run.failure().0, "max_turns", "{run:?}");
    assert_eq!(run["partial_content"], "again");
    let run = app.find(&circling).await.wait_for_end().await;
    assert_eq!(run.failure().0, "loop_detected", "{run:?}");
    assert_eq!(run["turns"], 3);
    assert_eq!(run.children().await.len(), 3);
}

#[tokio::test]
async fn a_killed_run_is_added_to_the_memory_once() {
    let memory = "[memory]\nenabled = true";
    let mut app = TestApp::setup()
        .agent("planner", &format!("{PLANNER}\n{memory}"))
        .agent("reader", memory)
        .spawn()
        .await;
    app.provider.will(
        "planner",
        [delegates([("reader", "x")]), hangs(), says("planned")],
    );
    app.provider.will("reader", [says("read")]);
    let id = started(&app, "planner", 3).await;
    app.provider.wait_for_request("planner", 2).await;

    app.crash_and_restart().await;
    assert_eq!(app.find(&id).await.wait_for_end().await.output(), "planned");
    app.crash_and_restart().await;

    for (agent, result) in [("planner", "planned"), ("reader", "read")] {
        let entries = app.get(&format!("/agents/{agent}/memory")).await.json();
        let entries = entries["data"].as_array().expect("data");
        assert_eq!(entries.len(), 1, "{entries:?}");
        assert_eq!(entries[0]["result"], result);
    }
    assert_eq!(app.provider.requests().len(), 4);
}

#[tokio::test]
async fn each_of_two_equal_runs_is_added_to_the_memory() {
    let mut app = TestApp::setup()
        .agent("solo", "[memory]\nenabled = true")
        .spawn()
        .await;
    app.provider
        .will("solo", [hangs(), says("the same"), says("the same")]);
    let killed = app.start("solo", "go").await.id().to_owned();
    app.provider.wait_for_request("solo", 1).await;
    // It ends while the other one, which began before it, is active.
    app.run("solo", "go").await;

    app.crash_and_restart().await;
    assert_eq!(
        app.find(&killed).await.wait_for_end().await.output(),
        "the same"
    );

    let entries = app.get("/agents/solo/memory").await.json();
    let entries = entries["data"].as_array().expect("data");
    assert_eq!(entries.len(), 2, "{entries:?}");
    assert_ne!(entries[0]["time"], entries[1]["time"]);
}
