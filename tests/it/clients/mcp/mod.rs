//! The MCP server, as a client of 2026-07-28 and as one of 2025-11-25 see it.

mod calls;
mod protocol;
mod resources;
mod tasks;

use reqwest::{Method, RequestBuilder, Response};
use serde_json::{Value, json};

use crate::support::app::{ApiResponse, TestApp, send};
use crate::support::within_timeout;

/// A client of 2026-07-28.
struct McpClient<'a> {
    app: &'a TestApp,
    key: Option<String>,
    capabilities: Value,
}

fn client(app: &TestApp) -> McpClient<'_> {
    McpClient {
        app,
        key: None,
        capabilities: json!({}),
    }
}

impl McpClient<'_> {
    fn with_key(self, key: &str) -> Self {
        Self {
            key: Some(key.to_owned()),
            ..self
        }
    }

    /// Takes tasks and shows forms.
    fn with_tasks(self) -> Self {
        let capabilities = json!({
            "elicitation": {},
            "extensions": { "io.modelcontextprotocol/tasks": {} },
        });
        Self {
            capabilities,
            ..self
        }
    }

    /// Shows forms.
    fn with_forms(self) -> Self {
        Self {
            capabilities: json!({ "elicitation": { "form": {} } }),
            ..self
        }
    }

    fn body(&self, method: &str, mut params: Value) -> Value {
        params["_meta"]["io.modelcontextprotocol/protocolVersion"] = json!("2026-07-28");
        params["_meta"]["io.modelcontextprotocol/clientCapabilities"] = self.capabilities.clone();
        json!({ "jsonrpc": "2.0", "id": 7, "method": method, "params": params })
    }

    fn request(&self, method: &str, params: Value) -> RequestBuilder {
        let name = ["name", "uri", "taskId"].map(|member| params[member].as_str());
        let name = name.into_iter().flatten().next();
        let mut request = post(self.app)
            .header("mcp-protocol-version", "2026-07-28")
            .header("mcp-method", method);
        if let Some(name) = name {
            request = request.header("mcp-name", name);
        }
        if let Some(key) = &self.key {
            request = request.bearer_auth(key);
        }
        request.json(&self.body(method, params))
    }

    async fn send(&self, method: &str, params: Value) -> ApiResponse {
        send(self.request(method, params)).await
    }

    /// The result of a method.
    async fn result(&self, method: &str, params: Value) -> Value {
        result(&self.send(method, params).await)
    }

    /// The error of a method, which is answered with this status.
    async fn error(&self, status: u16, method: &str, params: Value) -> Value {
        let got = self.send(method, params).await;
        assert_eq!(got.status, status, "{}", got.text);
        last_message(&got)["error"].clone()
    }

    /// The result of a call.
    async fn call(&self, agent: &str, arguments: Value) -> Value {
        let params = json!({ "name": agent, "arguments": arguments });
        self.result("tools/call", params).await
    }
}

fn post(app: &TestApp) -> RequestBuilder {
    app.request(Method::POST, "/mcp")
        .header("accept", "application/json, text/event-stream")
}

/// Sends a request of 2025-11-25.
async fn legacy(app: &TestApp, method: &str, params: Value) -> ApiResponse {
    let body = json!({ "jsonrpc": "2.0", "id": 7, "method": method, "params": params });
    send(
        post(app)
            .header("mcp-protocol-version", "2025-11-25")
            .header("mcp-session-id", "session-of-a-story")
            .json(&body),
    )
    .await
}

/// The messages of a response: one as JSON, or those of a stream.
fn messages(got: &ApiResponse) -> Vec<Value> {
    if got.header("content-type") == "application/json" {
        return vec![got.json()];
    }
    let data = got.text.lines().filter_map(|it| it.strip_prefix("data: "));
    data.map(|data| serde_json::from_str(data).expect("JSON"))
        .collect()
}

fn last_message(got: &ApiResponse) -> Value {
    messages(got).pop().expect("a message")
}

fn result(got: &ApiResponse) -> Value {
    assert_eq!(got.status, 200, "{}", got.text);
    let message = last_message(got);
    assert_eq!(message["id"], 7, "{message}");
    assert!(message["result"].is_object(), "{message}");
    message["result"].clone()
}

/// Reads a stream until a message whose text contains `text`. The request stays open.
async fn read_until(response: &mut Response, text: &str) {
    let mut received = String::new();
    within_timeout(text, async {
        while !received.contains(text) {
            let chunk = response.chunk().await.expect("a stream");
            let chunk = chunk.unwrap_or_else(|| panic!("{text} is missing in {received}"));
            received.push_str(&String::from_utf8_lossy(&chunk));
        }
    })
    .await;
}

fn text(result: &Value) -> &str {
    result["content"][0]["text"].as_str().expect("a text")
}
