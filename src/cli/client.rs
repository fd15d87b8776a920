//! An HTTP client of a daemon. Knows the routes and the parts of the responses that commands show.

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::StreamExt;
use reqwest::header::{ACCEPT, AUTHORIZATION, HeaderValue};
use reqwest::{Method, RequestBuilder, Response, StatusCode, Url};
use secrecy::{ExposeSecret, SecretString};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::config::secrets::SecretError;
use crate::domain::agent::is_agent_name;
use crate::domain::event::{Event, EventName};
use crate::domain::failure::Failure;
use crate::domain::run::{RunId, Status};
use crate::domain::run_ref::RunRef;
use crate::domain::warning::RunWarning;

/// A decision on a tool call that waits for approval.
#[derive(Debug, Serialize)]
pub struct Decision<'a> {
    pub decision: &'a str,
    pub reason: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arguments: Option<&'a Value>,
    /// Of the arguments that the user has seen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arguments_hash: Option<&'a str>,
}

pub struct Client {
    http: reqwest::Client,
    base: Url,
    /// The key of every request.
    authorization: Option<HeaderValue>,
}

#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("\"{url}\" is not the address of a daemon: {why}")]
    Url { url: String, why: String },
    #[error("the key for the daemon contains invalid characters; check --key or AXED_KEY")]
    Key,
    #[error(transparent)]
    KeyFile(#[from] SecretError),
    #[error("could not reach a daemon at {base}")]
    Unreachable {
        base: String,
        #[source]
        source: reqwest::Error,
    },
    /// The daemon responded with an error.
    #[error("{detail}")]
    ErrorResponse {
        status: u16,
        /// The problem's stable `code`; empty if the response is not an axed problem.
        code: String,
        /// The problem's `detail`, with its `errors`.
        detail: String,
    },
    /// The daemon does not accept new runs: the failed checks, with why each has failed.
    #[error("the daemon is not ready: {0}")]
    NotReady(String),
    /// The response is not one that a daemon sends.
    #[error("invalid response from {base}: {why}")]
    InvalidResponse { base: String, why: String },
}

/// A response of `/readyz`.
#[derive(Deserialize)]
struct Readiness {
    checks: BTreeMap<String, ReadinessCheck>,
}

#[derive(Deserialize)]
struct ReadinessCheck {
    ok: bool,
    #[serde(default)]
    detail: String,
}

impl Readiness {
    fn failed_checks(&self) -> String {
        let failed = self.checks.iter().filter(|(_, check)| !check.ok);
        let failed = failed.map(|(name, check)| format!("{name}: {}", check.detail));
        failed.collect::<Vec<_>>().join("; ")
    }
}

/// The parts of a run that commands show.
#[derive(Debug, Deserialize)]
pub struct RunView {
    pub id: String,
    pub status: Status,
    pub content: Option<String>,
    /// The model's last text, if the run did not complete.
    pub partial_content: Option<String>,
    pub error: Option<Failure>,
    pub cancel_reason: Option<String>,
    #[serde(default)]
    pub warnings: Vec<RunWarning>,
}

impl RunView {
    /// How a run ended that did not complete, and why.
    pub fn outcome(&self) -> String {
        let reason = match (&self.error, &self.cancel_reason) {
            (Some(failure), _) => failure.message.as_str(),
            (None, Some(reason)) => reason.as_str(),
            (None, None) => "no reason was given",
        };
        format!("run {} {}: {reason}", self.id, self.status.as_str())
    }
}

/// Maximum length of an event's line in bytes.
const MAX_EVENT_LINE: usize = 16 << 20;

/// An event as a daemon sends it.
pub struct ReceivedEvent {
    pub json: Value,
    /// `None` if it is one of a newer daemon.
    pub event: Option<Event>,
}

impl ReceivedEvent {
    pub fn new(json: Value) -> Self {
        let name = json["type"].as_str().and_then(EventName::parse);
        let event = name.and_then(|name| Event::read(name, &json.to_string()).ok());
        Self { json, event }
    }

    /// `None` for a part of a text, which is in a later event as a whole.
    pub fn number(&self) -> Option<u64> {
        self.json["seq"].as_u64()
    }
}

impl Client {
    /// The path of `url` is the daemon's `path_prefix`; the default scheme is `http`. Ignores proxies of the
    /// environment.
    pub fn new(url: &str) -> Result<Self, ClientError> {
        let invalid_url = |why: String| ClientError::Url {
            url: url.to_owned(),
            why,
        };
        let full_url = if url.contains("://") {
            url.to_owned()
        } else {
            format!("http://{url}")
        };
        let base = Url::parse(&full_url).map_err(|error| invalid_url(error.to_string()))?;
        if !matches!(base.scheme(), "http" | "https") {
            return Err(invalid_url(
                "it must start with http:// or https://".to_owned(),
            ));
        }
        let http = reqwest::Client::builder()
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(Duration::from_secs(5))
            .build()
            .map_err(|error| invalid_url(error.to_string()))?;
        Ok(Self {
            http,
            base,
            authorization: None,
        })
    }

    /// Sends the key with every request.
    pub fn with_key(self, key: &SecretString) -> Result<Self, ClientError> {
        let text = format!("Bearer {}", key.expose_secret().trim());
        let mut value = HeaderValue::try_from(text).map_err(|_| ClientError::Key)?;
        value.set_sensitive(true);
        Ok(Self {
            authorization: Some(value),
            ..self
        })
    }

    /// The daemon's address, with a trailing slash.
    pub fn base(&self) -> &str {
        self.base.as_str()
    }

    /// Returns the accepted run's record.
    pub async fn create_run(&self, agent: &str, body: &Value) -> Result<Value, ClientError> {
        let url = self.agent_url(agent, "runs")?;
        self.json(self.http.post(url).json(body)).await
    }

    /// Returns the accepted fork's record.
    pub async fn fork(&self, id: &str, body: &Value) -> Result<Value, ClientError> {
        let url = self.url(&["runs", id, "fork"]);
        self.json(self.http.post(url).json(body)).await
    }

    /// The differences of two runs.
    pub async fn diff(&self, a: &str, b: &str) -> Result<Value, ClientError> {
        self.json(self.get(&["runs", a, "diff", b])).await
    }

    pub async fn dry_run(&self, agent: &str, body: &Value) -> Result<Value, ClientError> {
        let url = self.agent_url(agent, "dry-run")?;
        self.json(self.http.post(url).json(body)).await
    }

    /// Collects garbage in an agent's memory: that of the key with this name, else that of the client's key.
    pub async fn collect_memory_garbage(
        &self,
        agent: &str,
        key: Option<&str>,
        dry_run: bool,
    ) -> Result<Value, ClientError> {
        let mut url = self.agent_url(agent, "gc")?;
        if let Some(key) = key {
            url.query_pairs_mut().append_pair("key", key);
        }
        let body = serde_json::json!({ "dry_run": dry_run });
        self.json(self.http.post(url).json(&body)).await
    }

    /// Makes the candidate of an agent its current version. Returns the evaluation of its gate if that takes longer than `wait`
    /// seconds.
    pub async fn promote(
        &self,
        agent: &str,
        body: &Value,
        wait: u64,
    ) -> Result<Value, ClientError> {
        let mut url = self.agent_url(agent, "promote")?;
        url.set_query(Some(&format!("wait={wait}")));
        self.json(self.http.post(url).json(body)).await
    }

    /// An agent's definition.
    pub async fn get_agent(&self, agent: &str) -> Result<Value, ClientError> {
        let url = self.agent_url(agent, "")?;
        self.json(self.http.get(url)).await
    }

    /// Names of the valid agents.
    pub async fn valid_agents(&self) -> Result<Vec<String>, ClientError> {
        let list: AgentList = self.read(self.get(&["agents"])).await?;
        let valid = list.data.into_iter().filter(|agent| agent.valid);
        Ok(valid.map(|agent| agent.name).collect())
    }

    /// The id of the run that the user has named. A whole id is an error only if the daemon says that there is no such run: the
    /// key may lack the scope to read it.
    pub async fn find_run(&self, run: &RunRef) -> Result<String, ClientError> {
        let mut url = self.url(&["runs", &run.to_string()]);
        url.set_query(Some("fields=id"));
        let found = self.read::<RunIdView>(self.http.get(url)).await;
        match (found, run) {
            (Ok(found), _) => Ok(found.id.to_string()),
            (Err(ClientError::ErrorResponse { status, .. }), RunRef::Id(id)) if status != 404 => {
                Ok(id.to_string())
            }
            (Err(error), _) => Err(error),
        }
    }

    /// Returns the run, at the latest after `wait` seconds if it has not ended before.
    pub async fn get_run(&self, id: &str, wait: u64) -> Result<Value, ClientError> {
        let mut url = self.url(&["runs", id]);
        url.set_query(Some(&format!("wait={wait}")));
        self.json(self.http.get(url)).await
    }

    /// Approves or denies a tool call that waits for approval.
    pub async fn decide(
        &self,
        id: &str,
        call: &str,
        decision: &Decision<'_>,
    ) -> Result<Value, ClientError> {
        let url = self.url(&["runs", id, "approvals", call]);
        self.json(self.http.post(url).json(decision)).await
    }

    /// Answers a question of a run: `{"answer"}` or `{"decline"}`.
    pub async fn answer(&self, id: &str, input: &str, body: &Value) -> Result<Value, ClientError> {
        let url = self.url(&["runs", id, "inputs", input]);
        self.json(self.http.post(url).json(body)).await
    }

    /// Pauses a run with all below it, or resumes it.
    pub async fn set_paused(&self, id: &str, is_paused: bool) -> Result<Value, ClientError> {
        let action = if is_paused { "pause" } else { "resume" };
        let url = self.url(&["runs", id, action]);
        self.json(self.http.post(url)).await
    }

    /// Adds a message to an unfinished run.
    pub async fn add_message(&self, id: &str, content: &Value) -> Result<Value, ClientError> {
        let body = serde_json::json!({ "content": content });
        let url = self.url(&["runs", id, "messages"]);
        self.json(self.http.post(url).json(&body)).await
    }

    /// Scores a run.
    pub async fn add_score(&self, id: &str, score: &Value) -> Result<Value, ClientError> {
        let url = self.url(&["runs", id, "scores"]);
        self.json(self.http.post(url).json(score)).await
    }

    /// Returns the accepted evaluation.
    pub async fn create_eval(&self, body: &impl Serialize) -> Result<Value, ClientError> {
        self.json(self.post(&["evals"]).json(body)).await
    }

    /// Returns the evaluation, at the latest after `wait` seconds if it has not ended before.
    pub async fn get_eval(&self, id: &str, wait: u64) -> Result<Value, ClientError> {
        let mut url = self.url(&["evals", id]);
        url.set_query(Some(&format!("wait={wait}")));
        self.json(self.http.get(url)).await
    }

    /// A page of the cases of an evaluation.
    pub async fn get_eval_cases(
        &self,
        id: &str,
        limit: usize,
        cursor: Option<&str>,
    ) -> Result<Value, ClientError> {
        let mut url = self.url(&["evals", id, "cases"]);
        url.query_pairs_mut()
            .append_pair("limit", &limit.to_string())
            .extend_pairs(cursor.map(|cursor| ("cursor", cursor)));
        self.json(self.http.get(url)).await
    }

    /// Cancels a run and its descendants.
    pub async fn cancel(&self, id: &str, reason: &str) -> Result<Value, ClientError> {
        let body = serde_json::json!({ "reason": reason });
        let url = self.url(&["runs", id, "cancel"]);
        self.json(self.http.post(url).json(&body)).await
    }

    pub async fn get_tree(&self, id: &str) -> Result<TreeNode, ClientError> {
        self.read(self.get(&["runs", id, "tree"])).await
    }

    pub async fn get_tree_json(&self, id: &str) -> Result<Value, ClientError> {
        self.json(self.get(&["runs", id, "tree"])).await
    }

    /// Lists at most `limit` runs that match the filters, newest first, from a cursor on.
    pub async fn list_runs(
        &self,
        filters: &[(String, String)],
        limit: usize,
        cursor: Option<&str>,
    ) -> Result<RunPage, ClientError> {
        let mut url = self.url(&["runs"]);
        url.query_pairs_mut()
            .extend_pairs(filters)
            .append_pair("limit", &limit.to_string())
            .extend_pairs(cursor.map(|cursor| ("cursor", cursor)));
        self.read(self.http.get(url)).await
    }

    /// Sums of usage, as JSON.
    pub async fn get_usage(&self, parameters: &[(String, String)]) -> Result<Value, ClientError> {
        let mut url = self.url(&["usage"]);
        url.query_pairs_mut().extend_pairs(parameters);
        self.json(self.http.get(url)).await
    }

    /// Fails unless the daemon accepts new runs.
    pub async fn check_readiness(&self, timeout: Duration) -> Result<(), ClientError> {
        let request = self.with_authorization(self.get(&["readyz"]).timeout(timeout));
        let response = request.send().await;
        let response = response.map_err(|source| self.unreachable_error(source))?;
        let status = response.status();
        if status.is_success() {
            return Ok(());
        }
        let body = response.bytes().await.unwrap_or_default();
        Err(match serde_json::from_slice::<Readiness>(&body) {
            Ok(readiness) => ClientError::NotReady(readiness.failed_checks()),
            Err(_) => self.error_response(status, &body),
        })
    }

    /// A page of at most `limit` of a run's events, after the one with this number.
    pub async fn get_events(
        &self,
        id: &str,
        after: u64,
        limit: usize,
    ) -> Result<EventPage, ClientError> {
        let mut url = self.url(&["runs", id, "events"]);
        url.set_query(Some(&format!("after={after}&limit={limit}")));
        self.read(self.http.get(url)).await
    }

    /// A page of a run's conversation, after its first messages.
    pub async fn get_messages(&self, id: &str, after: u64) -> Result<MessagePage, ClientError> {
        let mut url = self.url(&["runs", id, "messages"]);
        url.set_query(Some(&format!("after={after}")));
        self.read(self.http.get(url)).await
    }

    /// The text of a tree's recording.
    pub async fn get_recording(&self, id: &str) -> Result<String, ClientError> {
        let response = self.send(self.http.get(self.url(&["runs", id, "recording"])));
        let text = response.await?.text().await;
        text.map_err(|source| self.unreachable_error(source))
    }

    /// A page of the tool calls that wait for approval, from a cursor on.
    pub async fn list_approvals(
        &self,
        limit: usize,
        cursor: Option<&str>,
    ) -> Result<RunPage, ClientError> {
        let mut url = self.url(&["approvals"]);
        url.query_pairs_mut()
            .append_pair("limit", &limit.to_string())
            .extend_pairs(cursor.map(|cursor| ("cursor", cursor)));
        self.read(self.http.get(url)).await
    }

    /// A page of the sessions of the key with this name, else of the client's key, from a cursor on.
    pub async fn list_sessions(
        &self,
        owner: Option<&str>,
        limit: usize,
        cursor: Option<&str>,
    ) -> Result<RunPage, ClientError> {
        let mut url = self.url(&["sessions"]);
        url.query_pairs_mut()
            .append_pair("limit", &limit.to_string())
            .extend_pairs(cursor.map(|cursor| ("cursor", cursor)))
            .extend_pairs(owner.map(|owner| ("key", owner)));
        self.read(self.http.get(url)).await
    }

    /// A session with its newest runs.
    pub async fn get_session(
        &self,
        name: &str,
        agent: Option<&str>,
        owner: Option<&str>,
    ) -> Result<Value, ClientError> {
        let mut url = self.session_url(name, &[], owner)?;
        url.query_pairs_mut()
            .append_pair("limit", "20")
            .extend_pairs(agent.map(|agent| ("agent", agent)));
        self.json(self.http.get(url)).await
    }

    /// A page of a session's conversation, after its first messages.
    pub async fn get_session_messages(
        &self,
        name: &str,
        agent: Option<&str>,
        owner: Option<&str>,
        after: u64,
    ) -> Result<MessagePage, ClientError> {
        let mut url = self.session_url(name, &["messages"], owner)?;
        url.query_pairs_mut()
            .append_pair("after", &after.to_string())
            .extend_pairs(agent.map(|agent| ("agent", agent)));
        self.read(self.http.get(url)).await
    }

    /// Deletes a session with its conversation; its runs stay.
    pub async fn delete_session(&self, name: &str, owner: Option<&str>) -> Result<(), ClientError> {
        let url = self.session_url(name, &[], owner)?;
        self.send(self.http.delete(url)).await.map(drop)
    }

    /// Deletes a run that has ended, and its descendants.
    pub async fn delete_run(&self, id: &str) -> Result<(), ClientError> {
        let request = self.http.delete(self.url(&["runs", id]));
        self.send(request).await.map(drop)
    }

    /// Calls `on_event` for every event of a run's tree after the one with this number, until the last one or until the
    /// stream breaks off.
    pub async fn follow(
        &self,
        id: &str,
        after: u64,
        on_event: impl FnMut(&ReceivedEvent),
    ) -> Result<(), ClientError> {
        let mut url = self.url(&["runs", id, "events"]);
        url.set_query(Some(&format!("after={after}")));
        self.read_events(self.http.get(url), on_event).await
    }

    /// Starts a run and calls `on_event` for every event of its tree, until the last one or until the stream breaks off.
    pub async fn create_streamed_run(
        &self,
        agent: &str,
        body: &Value,
        on_event: impl FnMut(&ReceivedEvent),
    ) -> Result<(), ClientError> {
        let url = self.agent_url(agent, "runs")?;
        self.read_events(self.http.post(url).json(body), on_event)
            .await
    }

    async fn read_events(
        &self,
        request: RequestBuilder,
        mut on_event: impl FnMut(&ReceivedEvent),
    ) -> Result<(), ClientError> {
        let request = request.header(ACCEPT, "text/event-stream");
        let on_line = |line: &[u8]| {
            let data = line.strip_prefix(b"data:");
            if let Some(json) = data.and_then(|data| serde_json::from_slice(data).ok()) {
                on_event(&ReceivedEvent::new(json));
            }
            true
        };
        self.read_lines(request, MAX_EVENT_LINE, on_line).await
    }

    /// Calls `on_line` for every line of the response, until that returns false, or until the response ends or breaks off. A line
    /// may have `max` bytes.
    pub async fn read_lines(
        &self,
        request: RequestBuilder,
        max: usize,
        mut on_line: impl FnMut(&[u8]) -> bool,
    ) -> Result<(), ClientError> {
        let mut bytes = self.send(request).await?.bytes_stream();
        let mut line = Vec::new();
        while let Some(chunk) = bytes.next().await {
            let chunk = chunk.map_err(|source| self.unreachable_error(source))?;
            for part in chunk.split_inclusive(|byte| *byte == b'\n') {
                line.extend_from_slice(part);
                if line.ends_with(b"\n") {
                    if !on_line(&line) {
                        return Ok(());
                    }
                    line.clear();
                } else if line.len() > max {
                    return Err(self.invalid_response("a line is too long"));
                }
            }
        }
        Ok(())
    }

    fn url(&self, segments: &[&str]) -> Url {
        let mut url = self.base.clone();
        // Cannot fail: `new` accepts only http and https, whose URLs have a path.
        if let Ok(mut path) = url.path_segments_mut() {
            path.pop_if_empty().extend(segments);
        }
        url
    }

    fn agent_url(&self, agent: &str, route: &str) -> Result<Url, ClientError> {
        // A text that is not a name could change the path, and the daemon would not find it either.
        if !is_agent_name(agent) {
            return Err(ClientError::ErrorResponse {
                status: 404,
                code: "agent_not_found".to_owned(),
                detail: format!("agent config not found: {agent}"),
            });
        }
        let segments = ["agents", agent, route];
        let count = if route.is_empty() { 2 } else { 3 };
        Ok(self.url(&segments[..count]))
    }

    fn session_url(
        &self,
        name: &str,
        route: &[&str],
        owner: Option<&str>,
    ) -> Result<Url, ClientError> {
        // A text that is not a name could change the path, and the daemon would not find it either.
        if !is_agent_name(name) {
            return Err(ClientError::ErrorResponse {
                status: 404,
                code: "session_not_found".to_owned(),
                detail: format!("there is no session {name:?}"),
            });
        }
        let mut url = self.url(&[&["sessions", name], route].concat());
        if let Some(owner) = owner {
            url.query_pairs_mut().append_pair("key", owner);
        }
        Ok(url)
    }

    pub fn get(&self, segments: &[&str]) -> RequestBuilder {
        self.http.request(Method::GET, self.url(segments))
    }

    pub fn post(&self, segments: &[&str]) -> RequestBuilder {
        self.http.request(Method::POST, self.url(segments))
    }

    /// The request with the client's key, for a caller that reads the response itself.
    pub fn with_authorization(&self, request: RequestBuilder) -> RequestBuilder {
        match &self.authorization {
            Some(authorization) => request.header(AUTHORIZATION, authorization),
            None => request,
        }
    }

    async fn json(&self, request: RequestBuilder) -> Result<Value, ClientError> {
        self.read(request).await
    }

    pub async fn read<T: for<'de> Deserialize<'de>>(
        &self,
        request: RequestBuilder,
    ) -> Result<T, ClientError> {
        let body = self.send(request).await?.bytes().await;
        let body = body.map_err(|source| self.unreachable_error(source))?;
        serde_json::from_slice(&body).map_err(|error| self.invalid_response(&error.to_string()))
    }

    pub async fn send(&self, request: RequestBuilder) -> Result<Response, ClientError> {
        let response = self
            .with_authorization(request)
            .send()
            .await
            .map_err(|source| self.unreachable_error(source))?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let body = response.bytes().await.unwrap_or_default();
        Err(self.error_response(status, &body))
    }

    fn error_response(&self, status: StatusCode, body: &[u8]) -> ClientError {
        let (code, detail) = match serde_json::from_slice::<Problem>(body) {
            Ok(problem) => (problem.code.clone(), problem.into_message()),
            Err(_) => (
                String::new(),
                format!("{} responded with {status}", self.base),
            ),
        };
        ClientError::ErrorResponse {
            status: status.as_u16(),
            code,
            detail,
        }
    }

    fn unreachable_error(&self, source: reqwest::Error) -> ClientError {
        ClientError::Unreachable {
            base: self.base.to_string(),
            source: source.without_url(),
        }
    }

    fn invalid_response(&self, reason: &str) -> ClientError {
        ClientError::InvalidResponse {
            base: self.base.to_string(),
            why: reason.to_owned(),
        }
    }
}

#[derive(Deserialize)]
struct AgentList {
    data: Vec<ListedAgent>,
}

#[derive(Deserialize)]
struct ListedAgent {
    name: String,
    valid: bool,
}

/// `application/problem+json`, RFC 9457.
#[derive(Deserialize)]
struct Problem {
    #[serde(default)]
    pub code: String,
    title: String,
    detail: Option<String>,
    #[serde(default)]
    errors: Vec<FieldProblem>,
}

#[derive(Deserialize)]
struct FieldProblem {
    pointer: String,
    detail: String,
}

impl Problem {
    /// The detail, and the invalid fields that it does not name.
    pub fn into_message(self) -> String {
        let mut message = self.detail.unwrap_or(self.title);
        for error in self.errors {
            if !message.contains(&error.detail) {
                message.push_str(&format!("; {}: {}", error.pointer, error.detail));
            }
        }
        message
    }
}

#[derive(Deserialize)]
struct RunIdView {
    id: RunId,
}

/// A run in a tree, with its own usage.
#[derive(Debug, Deserialize)]
pub struct TreeNode {
    pub id: RunId,
    pub agent: String,
    /// The label that its caller gave an ad-hoc sub-agent.
    #[serde(default)]
    pub label: Option<String>,
    pub status: Status,
    pub turns: u64,
    /// Without its children.
    pub usage: UsageView,
    pub duration_ms: u64,
    pub task: Option<String>,
    pub error: Option<Failure>,
    /// In the order of the calls that started them.
    pub children: Vec<TreeNode>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub struct UsageView {
    pub input_tokens: u64,
    pub output_tokens: u64,
    pub tool_calls: u64,
}

#[derive(Debug, Deserialize)]
pub struct RunPage {
    pub data: Vec<Value>,
    /// `None` on the last page.
    pub next_cursor: Option<String>,
}

/// Stored events as JSON.
#[derive(Debug, Deserialize)]
pub struct EventPage {
    pub data: Vec<Value>,
    /// The number of the last event; `None` after the last one of a run that has ended.
    pub next_after: Option<u64>,
}

/// Part of a conversation, as JSON.
#[derive(Debug, Deserialize)]
pub struct MessagePage {
    pub system: Option<String>,
    pub data: Vec<Value>,
    /// `None` on the last page.
    pub next_after: Option<u64>,
}

#[cfg(test)]
mod tests {
    use super::Client;

    #[test]
    fn url_prefix_is_kept_and_segments_are_escaped() {
        let run_url = |base: &str| {
            let client = Client::new(base).expect("a client");
            client.url(&["runs", "a/b"]).to_string()
        };
        assert_eq!(
            run_url("127.0.0.1:8080"),
            "http://127.0.0.1:8080/runs/a%2Fb"
        );
        assert_eq!(
            run_url("https://x.test/ai/"),
            "https://x.test/ai/runs/a%2Fb"
        );
        assert!(Client::new("ftp://x").is_err());
        assert!(Client::new("http://").is_err());
        let client = Client::new("x.test").expect("a client");
        assert!(client.agent_url("..", "runs").is_err());
    }
}
