//! Requests with oversized parts: each gets a specific error before it costs anything.

use serde_json::{Value, json};

use crate::support::app::TestApp;

/// The detail of a refused request, and the place in its body that it names.
async fn refused(app: &TestApp, body: &Value) -> (String, Value) {
    let got = app.post("/agents/solo/runs", body).await;
    let detail = got.problem(422);
    (detail, got.json()["errors"][0]["pointer"].clone())
}

#[tokio::test]
async fn paths_are_limited_to_the_systems_maximum() {
    let app = TestApp::setup()
        .config("[tools]\nroots = [\"area\"]")
        .file("area/x", "")
        .agent("solo", "tools = [\"read_file\"]")
        .spawn()
        .await;
    // Every part of a path was kept with all before it: 1 MB of them took all memory.
    let long = format!("area/{}", "a/".repeat(20_000));
    for field in ["workdir", "skill"] {
        let (detail, pointer) = refused(&app, &json!({field: long})).await;
        assert!(detail.contains("must have at most 4096 bytes"), "{detail}");
        assert_eq!(pointer, format!("/{field}"));
    }
}

#[tokio::test]
async fn the_patterns_of_a_schema_share_one_limit() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    let pattern = r"(\w{50}){9}".repeat(2_000);
    let schema = json!({"type": "string", "pattern": pattern});
    let format = json!({"type": "json_schema", "schema": schema});
    let (detail, pointer) = refused(&app, &json!({"response_format": format})).await;
    let why = "its patterns have more than 16384 bytes together";
    assert!(detail.contains(why), "{detail}");
    assert_eq!(pointer, "/response_format/schema");
}

#[tokio::test]
async fn the_number_of_query_parameters_is_bounded() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    let labels: Vec<String> = (0..4_000).map(|n| format!("label.{n}=x")).collect();
    let got = app.get(&format!("/runs?{}", labels.join("&"))).await;
    let detail = got.problem(400);
    assert!(detail.contains("more than 200 parameters"), "{detail}");
}
