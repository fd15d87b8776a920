//! `service`: cheaper tiers, if a provider sells them, at the billed price.

use serde_json::{Value, json};

use crate::support::app::TestApp;
use crate::support::events::Event;
use crate::support::provider::answer::{ScriptedAnswer, calls, fails, raw, says};
use crate::support::run::Run;

/// Models with prices of round numbers: a token costs 1 or 2 millionths of a dollar.
const PRICES: &str = r#"
[providers.new]
kind = "openai"
api = "responses"
base_url = "{provider}"
services = ["flex"]
[prices."openai/gpt"]
input = 1
output = 2
[prices."new/gpt"]
input = 1
output = 2
flex = 0.25
[prices."ollama/gpt"]
input = 1
output = 2
[providers.openai.models."slow"]
input = 1
output = 2
"#;

/// The usage that all answers here have: 100 in, 50 out, so that the usual price is 200 millionths.
fn priced(answer: ScriptedAnswer) -> ScriptedAnswer {
    answer.with_usage(100, 50)
}

fn cost(run: &Run<'_>) -> f64 {
    run["tree"]["cost_usd"].as_f64().expect("a cost") * 1e6
}

fn warnings(events: &[Event]) -> Vec<&str> {
    let warnings = events.iter().filter(|it| it.kind() == "model.warning");
    warnings
        .map(|it| it["message"].as_str().unwrap_or_default())
        .collect()
}

#[tokio::test]
async fn flex_is_sent_on_both_wires_and_costs_the_billed_tier() {
    for (model, share) in [("openai/gpt", 0.5), ("new/gpt", 0.25)] {
        for stream in [false, true] {
            let app = TestApp::setup()
                .config(PRICES)
                .agent("solo", &format!("model = \"{model}\"\nservice = \"flex\""))
                .spawn()
                .await;
            app.provider.always("gpt", |_| priced(says("done")));
            let run = app.run_with("solo", json!({"stream": stream})).await;
            assert_eq!(run.output(), "done");
            assert_eq!(
                app.provider.requests_for("gpt")[0].body["service_tier"],
                "flex"
            );
            assert_eq!(cost(&run), 200.0 * share, "{model}");
            assert!(warnings(&run.events().await).is_empty());
            // The service may use another tier than requested, and reports it.
            app.provider
                .will("gpt", [priced(says("done")).with_tier("default")]);
            let run = app.run_with("solo", json!({"stream": stream})).await;
            assert_eq!(cost(&run), 200.0, "{model}");
            let default = json!({"params": {"service": "default"}});
            let run = app.run_with("solo", default).await;
            assert_eq!(
                app.provider.requests_for("gpt")[2].body["service_tier"],
                Value::Null
            );
            assert_eq!(cost(&run), 200.0, "{model}");
            // A request without a tier may be billed by the project's own setting.
            app.provider
                .will("gpt", [priced(says("done")).with_tier("flex")]);
            let unset = json!({"params": {"service": "default"}});
            let run = app.run_with("solo", unset).await;
            assert_eq!(cost(&run), 200.0 * share, "{model}");
            let turn = run.get("/turns/1").await.json();
            let sent = app.provider.requests_for("gpt").pop().expect("a request");
            assert_eq!(turn["request"]["body"], sent.body);
            assert_eq!(turn["cost_usd"].as_f64(), run["tree"]["cost_usd"].as_f64());
        }
    }
}

#[tokio::test]
async fn requests_ad_hoc_children_and_fallbacks_have_their_own_tier() {
    let app = TestApp::setup()
        .config(PRICES)
        .agent(
            "solo",
            "model = \"openai/gpt\"\nfallback_models = [\"ollama/gpt\"]\n[retry]\nmax_retries = 0\n\
             [subagent]\nenabled = true\nmodel = \"openai/slow\"\nservice = \"flex\"",
        )
        .spawn()
        .await;
    app.provider.will(
        "gpt",
        [
            calls([("subagent", json!({"label": "l", "task_prompt": "z"}))]),
            says("done"),
            fails(429, "resource_unavailable"),
            says("fell back"),
        ],
    );
    app.provider.always("slow", |_| says("done"));
    app.run("solo", "go").await;
    let tier =
        |model: &str, at: usize| app.provider.requests_for(model)[at].body["service_tier"].clone();
    assert_eq!(
        (tier("gpt", 0), tier("slow", 0)),
        (Value::Null, json!("flex"))
    );
    let run = app
        .run_with("solo", json!({"params": {"service": "flex"}}))
        .await;
    assert_eq!(run.output(), "fell back");
    assert_eq!(
        (tier("gpt", 2), tier("gpt", 3)),
        (json!("flex"), Value::Null)
    );
    let events = run.events().await;
    assert_eq!(
        warnings(&events),
        ["ollama/gpt is not offered with service \"flex\": sent with the default"]
    );
}

#[tokio::test]
async fn a_provider_without_flex_gets_one_warning() {
    let app = TestApp::setup()
        // Of a row that was checked, it is known that this one has no flexible tier.
        .config("[providers.openai.models.old]\nchecked = 2026-11-28\ninput = 1\noutput = 1")
        .agent("claude", "service = \"flex\"\ntools = [\"grep\"]")
        .agent("old", "model = \"openai/old\"\nservice = \"flex\"")
        .spawn()
        .await;
    app.provider.will(
        "claude",
        [calls([("grep", json!({"pattern": "x"}))]), says("done")],
    );
    app.provider.will("old", [says("done")]);
    for (agent, model) in [("claude", "anthropic/claude"), ("old", "openai/old")] {
        let run = app.run(agent, "go").await;
        assert_eq!(run.output(), "done");
        let reported =
            format!("{model} is not offered with service \"flex\": sent with the default");
        assert_eq!(warnings(&run.events().await), [reported]);
    }
    let seen = app.provider.requests();
    assert!(seen.iter().all(|seen| seen.body["service_tier"].is_null()));
}

#[tokio::test]
async fn a_busy_flexible_tier_is_retried() {
    let app = TestApp::setup()
        .config(PRICES)
        .agent(
            "solo",
            "model = \"openai/gpt\"\nservice = \"flex\"\n[retry]\ninitial_delay_ms = 1",
        )
        .spawn()
        .await;
    let busy = json!({"error": {"message": "try later", "type": "resource_unavailable", "code": "resource_unavailable"}});
    app.provider.will(
        "gpt",
        [
            raw(429, "application/json", busy.to_string()),
            // Some say so with a 200.
            raw(200, "application/json", busy.to_string()),
            priced(says("done")),
        ],
    );
    let run = app.run("solo", "go").await;
    assert_eq!(run.output(), "done");
    assert_eq!(cost(&run), 100.0);
    let events = run.events().await;
    let reasons: Vec<_> = events
        .iter()
        .filter(|it| it.kind() == "retry.scheduled")
        .map(|it| it["reason"].clone())
        .collect();
    assert_eq!(reasons, ["rate_limit: try later", "rate_limit: try later"]);
}

#[tokio::test]
async fn an_unknown_tier_is_refused() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.always("solo", |_| says("done"));
    let refused = app
        .post("/agents/solo/runs", &json!({"params": {"service": "slow"}}))
        .await;
    assert!(refused.problem(422).contains("default"), "{}", refused.text);
    app.write_agent("solo", "service = \"slow\"");
    let shown = app
        .get_until("/agents/solo", |got| got.json()["valid"] == false)
        .await;
    let why = shown.json()["error"].to_string();
    assert!(
        why.contains("service") && why.contains("default, flex, batch"),
        "{why}"
    );
}
