//! An MCP server that requires access tokens, and the authorization server that issues them, on one port.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

/// Every token of this server begins with this text.
pub const TOKEN: &str = "s3cret-access-";

/// Both servers, and what they saw.
#[derive(Clone)]
pub struct OauthServer {
    pub base: String,
    state: Arc<Mutex<OauthState>>,
}

/// How the servers behave, and what they saw.
#[derive(Default)]
pub struct OauthState {
    /// The scopes of every valid token.
    pub valid: BTreeMap<String, BTreeSet<String>>,
    /// The forms that the token endpoint got, with the Authorization header as `authorization`.
    pub token_requests: Vec<BTreeMap<String, String>>,
    /// The MCP methods that were answered, with the token.
    pub answered: Vec<(String, String)>,
    /// Requests that had no valid token.
    pub refused: usize,
    /// The scope that calls need.
    pub call_scope: Option<String>,
    /// Seconds that a token lives; `None` says nothing.
    pub lifetime: Option<u64>,
    /// Whole answers by path, instead of the proper ones.
    pub instead: BTreeMap<&'static str, (u16, String)>,
    /// The authorization servers of the resource, instead of this one.
    pub authorization_servers: Option<Vec<String>>,
    issued: usize,
}

impl OauthServer {
    pub async fn start() -> (Self, JoinSet<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let base = format!("http://{}", listener.local_addr().expect("an address"));
        let server = Self {
            base,
            state: Arc::default(),
        };
        let routes = Router::new()
            .route("/mcp", post(mcp))
            .route(
                "/.well-known/oauth-protected-resource/mcp",
                get(resource_metadata),
            )
            .route(
                "/.well-known/oauth-authorization-server",
                get(server_metadata),
            )
            .route("/token", post(token))
            .with_state(server.clone());
        let mut tasks = JoinSet::new();
        tasks.spawn(async move { axum::serve(listener, routes).await.expect("serve") });
        (server, tasks)
    }

    pub fn with<T>(&self, change: impl FnOnce(&mut OauthState) -> T) -> T {
        change(&mut self.state.lock().expect("the state"))
    }

    /// The address of the MCP server.
    pub fn url(&self) -> String {
        format!("{}/mcp", self.base)
    }

    pub fn token_requests(&self) -> Vec<BTreeMap<String, String>> {
        self.with(|it| it.token_requests.clone())
    }

    fn instead(&self, path: &'static str) -> Option<Response> {
        let (status, body) = self.with(|it| it.instead.get(path).cloned())?;
        let status = StatusCode::from_u16(status).expect("a status");
        Some((status, [("content-type", "application/json")], body).into_response())
    }
}

fn as_json(body: &Value) -> Response {
    ([("content-type", "application/json")], body.to_string()).into_response()
}

async fn resource_metadata(State(server): State<OauthServer>) -> Response {
    if let Some(answer) = server.instead("resource") {
        return answer;
    }
    let servers = server.with(|it| it.authorization_servers.clone());
    as_json(&json!({
        "resource": server.url(),
        "authorization_servers": servers.unwrap_or_else(|| vec![server.base.clone()]),
        "scopes_supported": ["tickets:read"],
    }))
}

async fn server_metadata(State(server): State<OauthServer>) -> Response {
    let base = &server.base;
    server.instead("server").unwrap_or_else(|| {
        as_json(&json!({
            "issuer": base,
            "token_endpoint": format!("{base}/token"),
            "grant_types_supported": ["client_credentials"],
            "token_endpoint_auth_methods_supported": ["client_secret_basic", "client_secret_post"],
        }))
    })
}

async fn token(State(server): State<OauthServer>, headers: HeaderMap, body: Bytes) -> Response {
    let mut form: BTreeMap<String, String> =
        url::form_urlencoded::parse(&body).into_owned().collect();
    let authorization = headers.get("authorization").and_then(|it| it.to_str().ok());
    form.extend(authorization.map(|it| ("authorization".to_owned(), it.to_owned())));
    server.with(|it| it.token_requests.push(form.clone()));
    if let Some(answer) = server.instead("token") {
        return answer;
    }
    let scope = form.get("scope").cloned().unwrap_or_default();
    server.with(|it| {
        it.issued += 1;
        let token = format!("{TOKEN}{}", it.issued);
        let scopes = scope.split(' ').map(str::to_owned).collect();
        it.valid.insert(token.clone(), scopes);
        let mut answer = json!({"access_token": token, "token_type": "Bearer"});
        if let Some(lifetime) = it.lifetime {
            answer["expires_in"] = json!(lifetime);
        }
        as_json(&answer)
    })
}

async fn mcp(State(server): State<OauthServer>, headers: HeaderMap, body: Bytes) -> Response {
    let message: Value = serde_json::from_slice(&body).expect("JSON");
    let method = message["method"].as_str().unwrap_or_default();
    let token = headers.get("authorization").and_then(|it| it.to_str().ok());
    let token = token.and_then(|it| it.strip_prefix("Bearer "));
    let metadata = format!(
        "resource_metadata=\"{}/.well-known/oauth-protected-resource/mcp\"",
        server.base
    );
    let scopes = server.with(|it| token.and_then(|token| it.valid.get(token).cloned()));
    let Some(scopes) = scopes else {
        server.with(|it| it.refused += 1);
        let challenge = format!("Bearer error=\"invalid_token\", {metadata}");
        let body = format!("no such token: {}", token.unwrap_or_default());
        let headers = [("www-authenticate", challenge)];
        return (StatusCode::UNAUTHORIZED, headers, body).into_response();
    };
    let missing = server.with(|it| it.call_scope.clone());
    if let Some(scope) = missing.filter(|it| method == "tools/call" && !scopes.contains(it)) {
        let challenge =
            format!("Bearer error=\"insufficient_scope\", scope=\"{scope}\", {metadata}");
        let headers = [("www-authenticate", challenge)];
        return (StatusCode::FORBIDDEN, headers, "more scopes").into_response();
    }
    let token = token.unwrap_or_default().to_owned();
    server.with(|it| it.answered.push((method.to_owned(), token)));
    let result = match method {
        "initialize" => json!({
            "protocolVersion": message["params"]["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "tickets", "version": "1"},
        }),
        "tools/list" => json!({"tools": [{"name": "find", "inputSchema": {"type": "object"}}]}),
        "tools/call" => json!({"content": [{"type": "text", "text": "found"}]}),
        _ => return StatusCode::ACCEPTED.into_response(),
    };
    as_json(&json!({"jsonrpc": "2.0", "id": message["id"], "result": result}))
}
