//! An MCP server that requires access tokens, and the authorization server that issues them, on one port.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
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

use crate::support::gate::Gate;

/// Every token of this server begins with this text.
pub const TOKEN: &str = "s3cret-access-";
/// Every refresh token begins with this text.
pub const REFRESH_TOKEN: &str = "s3cret-refresh-";
const DEVICE_CODE: &str = "s3cret-device-code";

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
    /// The forms that the device authorization endpoint got.
    pub device_requests: Vec<BTreeMap<String, String>>,
    /// The errors that the next polls for a login get; then the login succeeds.
    pub poll_errors: VecDeque<&'static str>,
    /// Valid refresh tokens and their scopes. Each is valid once.
    pub refresh_tokens: BTreeMap<String, String>,
    /// Whether a refresh token stays valid until the next one is used.
    pub keeps_used: bool,
    /// Delays the answers to refresh tokens.
    pub refresh_gate: Option<Gate>,
    /// The tokens that were revoked, with their kind.
    pub revoked: Vec<(String, String)>,
    /// Whether the metadata has no endpoint to revoke tokens.
    pub never_revokes: bool,
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
            .route("/device", post(device))
            .route("/revoke", post(revoke))
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
        let mut metadata = json!({
            "issuer": base,
            "token_endpoint": format!("{base}/token"),
            "grant_types_supported": ["client_credentials"],
            "token_endpoint_auth_methods_supported": ["client_secret_basic", "client_secret_post"],
            "device_authorization_endpoint": format!("{base}/device"),
        });
        if !server.with(|it| it.never_revokes) {
            metadata["revocation_endpoint"] = json!(format!("{base}/revoke"));
        }
        as_json(&metadata)
    })
}

fn form_of(body: &Bytes) -> BTreeMap<String, String> {
    url::form_urlencoded::parse(body).into_owned().collect()
}

async fn device(State(server): State<OauthServer>, body: Bytes) -> Response {
    server.with(|it| it.device_requests.push(form_of(&body)));
    let base = &server.base;
    server.instead("device").unwrap_or_else(|| {
        as_json(&json!({
            "device_code": DEVICE_CODE,
            "user_code": "WDJB-MJHT",
            "verification_uri": format!("{base}/enter"),
            "verification_uri_complete": format!("{base}/enter?user_code=WDJB-MJHT"),
            "expires_in": 600,
            "interval": 0,
        }))
    })
}

async fn revoke(State(server): State<OauthServer>, body: Bytes) -> Response {
    let form = form_of(&body);
    let field = |name: &str| form.get(name).cloned().unwrap_or_default();
    server.with(|it| {
        it.valid.remove(&field("token"));
        it.refresh_tokens.remove(&field("token"));
        it.revoked.push((field("token"), field("token_type_hint")));
    });
    let answer = server.instead("revoke");
    answer.unwrap_or_else(|| StatusCode::OK.into_response())
}

async fn token(State(server): State<OauthServer>, headers: HeaderMap, body: Bytes) -> Response {
    let mut form = form_of(&body);
    let authorization = headers.get("authorization").and_then(|it| it.to_str().ok());
    form.extend(authorization.map(|it| ("authorization".to_owned(), it.to_owned())));
    let gate = server.with(|it| {
        it.token_requests.push(form.clone());
        it.refresh_gate.clone()
    });
    if let Some(answer) = server.instead("token") {
        return answer;
    }
    let field = |name: &str| form.get(name).cloned().unwrap_or_default();
    let is_refresh = field("grant_type") == "refresh_token";
    let answer = server.with(|it| match field("grant_type").as_str() {
        "client_credentials" => it.issue(&field("scope"), false),
        "refresh_token" => it.refresh(&field("refresh_token")),
        _ if field("device_code") != DEVICE_CODE => it.refuse("invalid_grant"),
        _ => match it.poll_errors.pop_front() {
            Some(error) => it.refuse(error),
            None => {
                let scope = it.device_requests.last().and_then(|it| it.get("scope"));
                let scope = scope.cloned().unwrap_or_default();
                it.issue(&scope, true)
            }
        },
    });
    if let (true, Some(gate)) = (is_refresh, gate) {
        gate.wait_until_open().await;
    }
    answer
}

impl OauthState {
    fn issue(&mut self, scope: &str, is_login: bool) -> Response {
        self.issued += 1;
        let token = format!("{TOKEN}{}", self.issued);
        let scopes = scope.split(' ').map(str::to_owned).collect();
        self.valid.insert(token.clone(), scopes);
        let mut answer = json!({"access_token": token, "token_type": "Bearer"});
        if let Some(lifetime) = self.lifetime {
            answer["expires_in"] = json!(lifetime);
        }
        if is_login {
            let refresh_token = format!("{REFRESH_TOKEN}{}", self.issued);
            answer["refresh_token"] = json!(refresh_token);
            self.refresh_tokens.insert(refresh_token, scope.to_owned());
        }
        as_json(&answer)
    }

    fn refresh(&mut self, used: &str) -> Response {
        let Some(scope) = self.refresh_tokens.get(used).cloned() else {
            return self.refuse("invalid_grant");
        };
        let keeps_used = self.keeps_used;
        self.refresh_tokens
            .retain(|token, _| keeps_used && token == used);
        self.issue(&scope, true)
    }

    fn refuse(&self, error: &str) -> Response {
        let body = json!({"error": error, "error_description": "as the story says"});
        (StatusCode::BAD_REQUEST, as_json(&body)).into_response()
    }
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
