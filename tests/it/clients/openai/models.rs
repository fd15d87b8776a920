//! `/v1/models`, and what all routes below `/v1/` share.

use serde_json::json;

use crate::support::app::TestApp;

#[tokio::test]
async fn models_are_the_agents_that_are_valid() {
    let app = TestApp::setup()
        .agent("planner", "description = \"Plans.\"")
        .agent("broken", "timeout = \"soon\"")
        .spawn()
        .await;
    let planner = json!({
        "id": "planner", "object": "model", "created": 0, "owned_by": "axed", "description": "Plans.",
    });
    let models = app.get("/v1/models").await;
    assert_eq!(models.status, 200);
    assert_eq!(models.json(), json!({"object": "list", "data": [planner]}));
    assert_eq!(app.get("/v1/models/planner").await.json(), planner);
    let missing = app.get("/v1/models/nobody").await;
    assert_eq!(missing.status, 404);
    assert_eq!(
        missing.json(),
        json!({"error": {
            "message": "agent config not found: nobody", "type": "invalid_request_error", "param": null,
            "code": "agent_not_found",
        }})
    );
}

#[tokio::test]
async fn a_wrong_method_or_path_is_an_error_of_the_protocol() {
    for prefix in ["", "/axed"] {
        let app = match prefix {
            "" => TestApp::spawn().await,
            prefix => TestApp::setup().prefix(prefix).spawn().await,
        };
        let refused = app.delete("/v1/models").await;
        assert_eq!(refused.status, 405);
        assert_eq!(refused.header("allow"), "GET,HEAD");
        let error = &refused.json()["error"];
        assert_eq!(error["type"], "invalid_request_error");
        assert_eq!(error["code"], "method_not_allowed");
        app.delete("/agents").await.problem(405);
        let refused = app.post("/v1/embeddings", &json!({"input": "x"})).await;
        assert_eq!(refused.status, 404);
        let error = &refused.json()["error"];
        assert_eq!(error["type"], "invalid_request_error");
        assert_eq!(error["code"], "route_not_found");
        // Operations of OpenAI's service, and not responses.
        for path in ["compact", "input_tokens"] {
            let path = format!("/v1/responses/{path}");
            let refused = app.post(&path, &json!({"model": "solo"})).await;
            assert_eq!(refused.status, 404, "{path}");
            assert_eq!(refused.json()["error"]["code"], "route_not_found");
            assert_eq!(app.get(&path).await.status, 404);
        }
        let id = "/v1/responses/resp_0198c7a2-0000-7000-8000-000000000000";
        assert_eq!(app.post(id, &json!({})).await.status, 405);
        let refused = app.get("/a2a/solo/nothing").await;
        assert_eq!(refused.json()["error"]["status"], "NOT_FOUND");
        app.get("/nothing").await.problem(404);
    }
}

#[tokio::test]
async fn a_path_that_is_not_utf8_is_an_error_of_the_protocol() {
    let app = TestApp::spawn().await;
    for path in ["/v1/responses/%FF", "/v1/models/%FF"] {
        let refused = app.get(path).await;
        assert_eq!(refused.status, 400, "{}", refused.text);
        assert_eq!(refused.json()["error"]["code"], "malformed_path");
    }
}

#[tokio::test]
async fn the_configuration_turns_the_routes_off() {
    let app = TestApp::setup()
        .config("[clients]\nopenai = false")
        .spawn()
        .await;
    let refused = app.get("/v1/models").await;
    assert_eq!(refused.status, 404);
    assert_eq!(refused.json()["code"], "route_not_found");
}
