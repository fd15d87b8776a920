//! Services that are there without a section: a variable with a key is enough.

use serde_json::json;

use crate::support::app::TestApp;
use crate::support::provider::answer::says;

#[tokio::test]
async fn a_key_in_the_environment_is_enough_for_a_known_service() {
    // The fake provider replaces the service; everything else is the preset's.
    let app = TestApp::setup()
        .config("[providers.gemini]\nbase_url = \"{provider}\"\n")
        .environment("GOOGLE_API_KEY", "key-of-gemini")
        .environment("GROQ_API_KEY", "key-of-groq")
        .agent("asker", "model = \"gemini/gemini-3.8-flash\"")
        .agent("poor", "model = \"mistral/mistral-large-4\"")
        .agent("cloud", "model = \"azure/my-deployment\"")
        .agent("region", "model = \"bedrock/openai.gpt-6-sol\"")
        .spawn()
        .await;
    app.provider.will("gemini-3.8-flash", [says("done")]);

    let run = app.run("asker", "go").await;
    assert_eq!(run.output(), "done");
    let sent = app.provider.wait_for_request("gemini-3.8-flash", 1).await;
    assert_eq!(sent.api_key(), Some("key-of-gemini"));
    assert!(
        run["tree"]["cost_usd"]
            .as_f64()
            .is_some_and(|usd| usd > 0.0)
    );

    for (agent, why) in [
        (
            "poor",
            "API key for provider \"mistral\" is not configured (set MISTRAL_API_KEY or add to config.toml); in config/axed.toml it is api_key in [providers.mistral]",
        ),
        (
            "cloud",
            "the address of provider \"azure\" is not configured (set AZURE_OPENAI_ENDPOINT, or base_url in [providers.azure])",
        ),
        ("region", "set AWS_REGION"),
    ] {
        let refused = app.post(&format!("/agents/{agent}/runs"), &json!({})).await;
        let reported = refused.problem(422);
        assert!(reported.contains(why), "{reported}");
    }
    let unknown = app
        .post("/agents/poor/runs", &json!({"model": "nobody/x"}))
        .await;
    let reported = unknown.problem(422);
    assert!(
        reported.ends_with("anthropic, openai, ollama, gemini, groq, responses"),
        "{reported}"
    );
}

#[tokio::test]
async fn a_service_with_a_configured_address_keeps_its_field_for_max_tokens() {
    let app = TestApp::setup()
        .config("[providers.azure]\nbase_url = \"{provider}\"\napi_key = \"k\"")
        .agent(
            "cloud",
            "model = \"azure/my-deployment\"\n[params]\nmax_tokens = 50",
        )
        .spawn()
        .await;
    app.provider.will("my-deployment", [says("done")]);

    assert_eq!(app.run("cloud", "go").await.output(), "done");

    let sent = app.provider.wait_for_request("my-deployment", 1).await;
    assert_eq!(sent.body["max_completion_tokens"], 50);
    assert_eq!(sent.body["max_tokens"], json!(null));
}
