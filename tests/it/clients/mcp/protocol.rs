//! Versions, required metadata, headers, errors, and the handshake of earlier versions.

use reqwest::Method;
use serde_json::json;

use crate::clients::mcp::{client, last_message, legacy, post, result};
use crate::support::app::{TestApp, send};

#[tokio::test]
async fn discovery_names_versions_capabilities_and_tasks() {
    let app = TestApp::spawn().await;
    let found = client(&app).result("server/discover", json!({})).await;
    assert_eq!(
        found["supportedVersions"],
        json!(["2026-07-28", "2025-11-25", "2025-06-18", "2025-03-26"])
    );
    assert_eq!(
        found["capabilities"],
        json!({
            "extensions": { "io.modelcontextprotocol/tasks": {} },
            "resources": {},
            "tools": {},
        })
    );
    assert_eq!(found["resultType"], "complete");
    let server = &found["_meta"]["io.modelcontextprotocol/serverInfo"];
    assert_eq!(server["name"], "axed");
    assert!(found["instructions"].is_string());
}

#[tokio::test]
async fn headers_have_to_match_the_body() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    let client = client(&app);
    let body = client.body("tools/call", json!({ "name": "solo", "arguments": {} }));
    let version = ("mcp-protocol-version", "2026-07-28");
    let method = ("mcp-method", "tools/call");
    for headers in [
        vec![version, method],
        vec![version, ("mcp-name", "solo")],
        vec![method, ("mcp-name", "solo")],
        vec![version, ("mcp-method", "tools/list"), ("mcp-name", "solo")],
        vec![version, method, ("mcp-name", "planner")],
        vec![version, method, ("mcp-name", "=?base64?!?=")],
        vec![
            ("mcp-protocol-version", "2025-11-25"),
            method,
            ("mcp-name", "solo"),
        ],
    ] {
        let mut request = post(&app).json(&body);
        for (name, value) in &headers {
            request = request.header(*name, *value);
        }
        let got = send(request).await;
        assert_eq!(got.status, 400, "{headers:?}: {}", got.text);
        assert_eq!(got.json()["error"]["code"], -32020, "{}", got.text);
        assert_eq!(got.json()["id"], 7);
    }
    // `solo`, encoded.
    let encoded = [version, method, ("mcp-name", "=?base64?c29sbw==?=")];
    app.provider
        .will("solo", [crate::support::provider::answer::says("done")]);
    let mut request = post(&app).json(&body);
    for (name, value) in encoded {
        request = request.header(name, value);
    }
    assert_eq!(result(&send(request).await)["isError"], false);
}

#[tokio::test]
async fn an_unsupported_version_is_answered_with_those_that_are() {
    let app = TestApp::spawn().await;
    let mut body = client(&app).body("tools/list", json!({}));
    body["params"]["_meta"]["io.modelcontextprotocol/protocolVersion"] = json!("2031-01-01");
    let request = post(&app)
        .header("mcp-protocol-version", "2031-01-01")
        .header("mcp-method", "tools/list");
    let got = send(request.json(&body)).await;
    assert_eq!(got.status, 400, "{}", got.text);
    let error = &got.json()["error"];
    assert_eq!(error["code"], -32022);
    assert_eq!(error["data"]["requested"], "2031-01-01");
    assert_eq!(error["data"]["supported"][0], "2026-07-28");
}

#[tokio::test]
async fn a_request_without_capabilities_is_malformed() {
    let app = TestApp::spawn().await;
    let mut body = client(&app).body("tools/list", json!({}));
    let meta = body["params"]["_meta"].as_object_mut().expect("an object");
    meta.remove("io.modelcontextprotocol/clientCapabilities");
    let request = post(&app)
        .header("mcp-protocol-version", "2026-07-28")
        .header("mcp-method", "tools/list");
    let got = send(request.json(&body)).await;
    assert_eq!(got.status, 400, "{}", got.text);
    assert_eq!(got.json()["error"]["code"], -32602);
}

#[tokio::test]
async fn an_unknown_method_is_404_for_clients_of_today() {
    let app = TestApp::spawn().await;
    let error = client(&app).error(404, "prompts/list", json!({})).await;
    assert_eq!(error["code"], -32601);
    // For earlier ones, 404 is the end of a session.
    let got = legacy(&app, "prompts/list", json!({})).await;
    assert_eq!(
        (got.status, &got.json()["error"]["code"]),
        (200, &json!(-32601))
    );
}

#[tokio::test]
async fn earlier_clients_have_a_handshake() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    for (requested, answered) in [
        ("2025-11-25", "2025-11-25"),
        ("2025-06-18", "2025-06-18"),
        ("1999-01-01", "2025-11-25"),
        ("2026-07-28", "2025-11-25"),
    ] {
        let body = json!({ "jsonrpc": "2.0", "id": 7, "method": "initialize", "params": {
            "protocolVersion": requested,
            "capabilities": {},
            "clientInfo": { "name": "story", "version": "1" },
        }});
        let got = send(post(&app).json(&body)).await;
        let initialized = result(&got);
        assert_eq!(initialized["protocolVersion"], answered);
        assert_eq!(initialized["serverInfo"]["name"], "axed");
        assert_eq!(
            initialized["capabilities"],
            json!({ "resources": {}, "tools": {} })
        );
        assert!(!got.header("mcp-session-id").is_empty());
    }
    let initialized = json!({ "jsonrpc": "2.0", "method": "notifications/initialized" });
    let got = send(post(&app).json(&initialized)).await;
    assert_eq!((got.status, got.text.as_str()), (202, ""));
    assert_eq!(result(&legacy(&app, "ping", json!({})).await), json!({}));
    let tools = result(&legacy(&app, "tools/list", json!({})).await);
    assert_eq!(tools["tools"][0]["name"], "solo");
    assert!(
        tools["resultType"].is_null() && tools["ttlMs"].is_null(),
        "{tools}"
    );
}

#[tokio::test]
async fn malformed_messages_get_json_rpc_errors() {
    let app = TestApp::spawn().await;
    for (body, code) in [("{", -32700), ("[]", -32600), ("{}", -32600), ("", -32700)] {
        let request = post(&app).header("content-type", "application/json");
        let got = send(request.body(body)).await;
        assert_eq!(got.status, 400, "{body}: {}", got.text);
        assert_eq!(last_message(&got)["error"]["code"], code, "{body}");
    }
    assert_eq!(app.get("/mcp").await.status, 405);
}

#[tokio::test]
async fn pages_of_other_origins_are_refused_in_the_protocols_shape() {
    let app = TestApp::spawn().await;
    let request = client(&app).request("tools/list", json!({}));
    let got = send(request.header("origin", "https://evil.example")).await;
    assert_eq!(got.status, 403, "{}", got.text);
}

#[tokio::test]
async fn the_server_can_be_turned_off() {
    let app = TestApp::setup()
        .config("[clients]\nmcp = false")
        .spawn()
        .await;
    let got = send(app.request(Method::POST, "/mcp")).await;
    got.problem(404);
}
