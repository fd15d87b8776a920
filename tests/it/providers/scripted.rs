//! The scripted provider, as its writers use it: files of replies, no network, no key.

use reqwest::Method;

use crate::support::app::{Setup, TestApp};
use crate::support::daemon::axed_command;
use crate::support::events::{Event, Events};
use crate::support::within_timeout;

/// A daemon with one scripted agent of that name, and its script.
fn scripted(name: &str, agent: &str, script: &str) -> Setup {
    also(
        TestApp::setup().config("[providers.scripted]\nscripts = [\"scripts\"]"),
        name,
        agent,
        script,
    )
}

fn also(setup: Setup, name: &str, agent: &str, script: &str) -> Setup {
    setup
        .agent(name, &format!("model = \"scripted/{name}\"\n{agent}"))
        .file(&format!("config/scripts/{name}.toml"), script)
}

#[tokio::test]
async fn a_script_delegates_and_quotes_the_result() {
    let setup = scripted(
        "lead",
        "sub_agents = [\"reader\"]",
        r#"
        [[replies]]
        input_tokens = 10
        output_tokens = 2
        tool_calls = [
            { name = "call_agent", arguments = { agent = "reader", task = "{{input}} once" } },
            { name = "call_agent", arguments = { agent = "reader", task = "{{input}} twice" } },
        ]
        [[replies]]
        text = "{{result.2}} / {{result.1}}"
        input_tokens = 20
        output_tokens = 3
        "#,
    );
    let reader = "[[replies]]\ntext = \"got <{{input}}>\"\ninput_tokens = 5\noutput_tokens = 1\n";
    let app = also(setup, "reader", "", reader).spawn().await;

    let run = app.run("lead", "read").await;

    assert_eq!(
        run.output(),
        "got <Task: read twice> / got <Task: read once>"
    );
    assert_eq!(run.usage(), (30, 5, 2));
    assert_eq!(run.tree_usage(), (40, 7, 2));
    assert_eq!(run["model"], "lead");
    assert_eq!(run["stop_reason"], "end_turn");
    assert_eq!(run.children().await.len(), 2);
}

#[tokio::test]
async fn scripted_errors_are_retried_until_the_reply() {
    let app = scripted(
        "shaky",
        "[retry]\ninitial_delay_ms = 1",
        r#"
        [[replies]]
        errors = [{ category = "rate_limit", message = "slow down", times = 2, retry_after_ms = 1 }]
        text = "done"
        [[replies]]
        match = "never"
        errors = [{ category = "auth", message = "who are you?" }]
        "#,
    )
    .spawn()
    .await;

    for _ in 0..2 {
        let run = app.run("shaky", "go").await;
        assert_eq!(run.output(), "done");
        let events = run.events().await;
        let retries = events
            .iter()
            .filter(|event| event.kind() == "retry.scheduled");
        assert_eq!(retries.count(), 2, "{events:?}");
    }
    let refused = app.run("shaky", "never").await;
    let (code, message) = refused.failure();
    assert_eq!(code, "provider_auth");
    assert!(message.contains("who are you?"), "{message}");
}

#[tokio::test]
async fn a_streaming_run_gets_the_text_in_deltas() {
    let script = "[[replies]]\ntext = \"one two three\"\n";
    let app = scripted("talker", "", script).spawn().await;
    let request = app.request(Method::POST, "/agents/talker/runs");
    let request = request.header("accept", "text/event-stream").send();
    let response = within_timeout("the stream's head", request).await;

    let events = Events::new(response.expect("a head")).rest().await;

    let words: Vec<&str> = events
        .iter()
        .filter(|event| event.kind() == "text.delta")
        .filter_map(|event| event["text"].as_str())
        .collect();
    assert_eq!(words, ["one ", "two ", "three"]);
    assert_eq!(events.last().map(Event::kind), Some("run.completed"));
}

#[tokio::test]
async fn a_model_without_a_script_lists_the_scripts() {
    let app = scripted("known", "", "[[replies]]\ntext = \"\"\n")
        .agent("lost", "model = \"scripted/unknown\"")
        .spawn()
        .await;

    let run = app.run("lost", "go").await;

    let (code, message) = run.failure();
    assert_eq!(code, "provider_bad_request");
    assert!(
        message.contains("no script for model \"scripted/unknown\": scripts exist for known"),
        "{message}"
    );
}

#[tokio::test]
async fn a_broken_script_stops_the_start() {
    let home = tempfile::tempdir().expect("a directory");
    let write = |path: &str, text: &str| {
        let path = home.path().join(path);
        std::fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
        std::fs::write(path, text).expect("a file");
    };
    write(
        "config/axed.toml",
        "[providers.scripted]\nscripts = [\"scripts\"]\n",
    );
    write("config/scripts/m.toml", "[[replies]]\ntxt = \"\"\n");

    let mut command = axed_command(home.path(), &["serve", "--listen", "127.0.0.1:0"]);
    let output = within_timeout("the end", command.output())
        .await
        .expect("run axed");

    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(
        error.contains("scripts/m.toml:2: unknown key \"txt\""),
        "{error}"
    );
    assert!(output.stdout.is_empty(), "{output:?}");
}
