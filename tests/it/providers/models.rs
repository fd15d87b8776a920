//! Effort, extra keys and what models refuse: requests as they go out on each wire, and `axed models`.

use serde_json::{Value, json};

use crate::support::app::TestApp;
use crate::support::daemon::axed_command;
use crate::support::provider::answer::{calls, says};

const FACTS: &str = r#"
[providers.anthropic.models."thinker"]
max_output = 128000
effort = ["low", "medium", "high", "xhigh"]
sampling = "never"
[providers.anthropic.models."plain"]
effort = []
max_output = 5000
[providers.anthropic.models."paid"]
input = 1000
output = 2000
extra = { metadata = { tier = "gold" } }
"#;

#[tokio::test]
async fn effort_is_sent_on_each_wire() {
    let app = TestApp::setup()
        .agent("claude", "effort = \"high\"")
        .agent("gpt", "model = \"openai/gpt\"\neffort = \"minimal\"")
        .agent(
            "new",
            "model = \"responses/new\"\neffort = \"xhigh\"\n[params.extra]\ntruncation = \"auto\"",
        )
        .agent("llama", "model = \"ollama/llama\"\neffort = \"max\"")
        .agent("gpt-oss", "model = \"ollama/gpt-oss\"\neffort = \"max\"")
        .spawn()
        .await;
    for model in ["claude", "gpt", "new", "llama", "gpt-oss"] {
        app.provider.will(model, [says("1"), says("2"), says("3")]);
        app.run(model, "go").await;
        app.run_with(
            model,
            json!({"params": {"effort": "none", "max_tokens": 5}}),
        )
        .await;
    }

    let claude = app.provider.wait_for_request("claude", 1).await;
    assert_eq!(claude.body["output_config"], json!({"effort": "high"}));
    assert_eq!(claude.body["thinking"], json!({"type": "adaptive"}));
    assert_eq!(claude.body["max_tokens"], 8192);
    let none = app.provider.wait_for_request("claude", 2).await;
    assert_eq!(none.body["thinking"], json!({"type": "disabled"}));
    assert_eq!(none.body["output_config"], Value::Null);
    let gpt = app.provider.wait_for_request("gpt", 1).await;
    assert_eq!(gpt.body["reasoning_effort"], "minimal");
    assert_eq!(gpt.body["max_tokens"], Value::Null);
    let new = app.provider.wait_for_request("new", 1).await;
    assert_eq!(new.body["reasoning"], json!({"effort": "xhigh"}));
    assert_eq!(new.body["truncation"], "auto");
    let short = app.provider.wait_for_request("new", 2).await;
    assert_eq!(
        short.body["max_output_tokens"], 16,
        "the least that it takes"
    );
    assert_eq!(
        app.provider.wait_for_request("llama", 1).await.body["think"],
        true,
        "the model is not known to have levels"
    );
    assert_eq!(
        app.provider.wait_for_request("llama", 2).await.body["think"],
        false
    );
    assert_eq!(
        app.provider.wait_for_request("gpt-oss", 1).await.body["think"],
        "high"
    );
}

#[tokio::test]
async fn parameters_that_a_model_refuses_are_left_out_with_a_warning() {
    let app = TestApp::setup()
        .config(FACTS)
        .agent(
            "thinker",
            "effort = \"max\"\ntools = [\"grep\"]\n[params]\ntemperature = 0.5",
        )
        .agent("plain", "effort = \"high\"")
        .spawn()
        .await;
    app.provider.will(
        "thinker",
        [calls([("grep", json!({"pattern": "x"}))]), says("done")],
    );
    app.provider.will("plain", [says("done")]);

    let run = app.run("thinker", "go").await;
    app.run("plain", "go").await;

    assert_eq!(run.output(), "done");
    let sent = app.provider.wait_for_request("thinker", 1).await;
    assert_eq!(sent.body["output_config"]["effort"], "xhigh");
    assert_eq!(sent.body["temperature"], Value::Null);
    assert_eq!(sent.body["max_tokens"], 32000);
    let events = run.events().await;
    let warnings: Vec<_> = events
        .iter()
        .filter(|event| event.kind() == "model.warning")
        .map(|event| event["message"].as_str().unwrap_or_default())
        .collect();
    assert_eq!(
        warnings,
        [
            "anthropic/thinker does not take effort \"max\": sent the nearest, \"xhigh\"",
            "anthropic/thinker does not take temperature: left out of the request",
        ],
        "once each, though the run had two turns"
    );
    let plain = app.provider.wait_for_request("plain", 1).await;
    assert_eq!(plain.body["output_config"], Value::Null);
    assert_eq!(plain.body["max_tokens"], 5000);

    let refused = app
        .post(
            "/agents/thinker/runs",
            &json!({"params": {"temperature": 1}}),
        )
        .await;
    let why = refused.problem(422);
    assert!(why.contains("anthropic/thinker does not take it"), "{why}");
    assert_eq!(
        refused.json()["errors"][0]["pointer"],
        "/params/temperature"
    );
}

#[tokio::test]
async fn extra_keys_are_merged_into_the_body_within_limits() {
    let app = TestApp::setup()
        .config(FACTS)
        .agent(
            "paid",
            "allow_extra = [\"service_tier\"]\n[params]\nextra = { metadata = { team = \"a\" }, top_k = 3 }",
        )
        .spawn()
        .await;
    app.provider.will("paid", [says("done")]);

    let run = app
        .run_with(
            "paid",
            json!({"params": {"extra": {"service_tier": "auto"}}}),
        )
        .await;

    assert_eq!(run.output(), "done");
    assert!(
        run["tree"]["cost_usd"]
            .as_f64()
            .is_some_and(|usd| usd > 0.0)
    );
    let sent = app.provider.wait_for_request("paid", 1).await;
    assert_eq!(sent.body["metadata"], json!({"tier": "gold", "team": "a"}));
    assert_eq!(sent.body["top_k"], 3);
    assert_eq!(sent.body["service_tier"], "auto");

    for (extra, why) in [
        (
            json!({"top_k": 4}),
            "\"top_k\" is not in the agent's allow_extra",
        ),
        (json!({"model": "x"}), "may not set \"model\""),
        (json!({"options": {"num_predict": 1}}), "num_predict"),
    ] {
        let refused = app
            .post("/agents/paid/runs", &json!({"params": {"extra": extra}}))
            .await;
        let reported = refused.problem(422);
        assert!(reported.contains(why), "{reported}");
        assert_eq!(refused.json()["errors"][0]["pointer"], "/params/extra");
    }
}

#[tokio::test]
async fn the_table_of_models_is_printed() {
    let home = tempfile::tempdir().expect("a directory");
    let print = |arguments: &'static [&'static str]| {
        let mut command = axed_command(home.path(), arguments);
        async move { command.output().await.expect("a finished process") }
    };
    let json = print(&["models", "--json"]).await;
    let json: Value = serde_json::from_slice(&json.stdout).expect("JSON");
    let data = json["data"].as_array().expect("models");
    assert!(data.len() >= 40, "{}", data.len());
    let opus = data
        .iter()
        .find(|model| model["model"] == "claude-opus-5-5");
    assert_eq!(opus.expect("a model")["provider"], "anthropic");

    let table = print(&["models", "gpt-5.5"]).await;
    let table = String::from_utf8_lossy(&table.stdout).into_owned();
    assert!(table.contains("openai/gpt-5.5"), "{table}");
    assert!(
        table.lines().all(|line| line.chars().count() <= 80),
        "{table}"
    );
}
