//! Speaks to a daemon over HTTP, as any client would. Knows the routes and the parts of the answers that commands show.

use std::time::Duration;

use futures_util::StreamExt;
use reqwest::header::{ACCEPT, AUTHORIZATION, HeaderValue};
use reqwest::{Method, RequestBuilder, Response, Url};
use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;
use serde_json::Value;

use crate::domain::agent::is_agent_name;
use crate::domain::run::{Failure, Status};

/// A daemon, from outside.
pub struct Client {
    http: reqwest::Client,
    base: Url,
    /// What the daemon is told of who asks.
    authorization: Option<HeaderValue>,
}

/// Why there is no answer to use.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The address is none.
    #[error("\"{url}\" is no address of a daemon: {why}")]
    Url {
        /// As given.
        url: String,
        /// What is wrong with it.
        why: String,
    },
    /// The key is none.
    #[error("the key for the daemon holds characters that no key has; look at --key or AXED_KEY")]
    Key,
    /// Nobody answers there.
    #[error("could not reach a daemon at {base}")]
    Unreachable {
        /// Where.
        base: String,
        /// What happened.
        #[source]
        source: reqwest::Error,
    },
    /// The daemon refused, with a reason.
    #[error("{detail}")]
    ErrorResponse {
        /// The HTTP status.
        status: u16,
        /// The problem's stable `code`; empty where the answer is no problem of ours.
        code: String,
        /// The problem's `detail`, with its `errors`.
        detail: String,
    },
    /// The answer is not what a daemon would say.
    #[error("the answer of {base} makes no sense: {why}")]
    InvalidResponse {
        /// Who answered.
        base: String,
        /// What is wrong.
        why: String,
    },
}

/// The parts of a run that commands show.
#[derive(Debug, Deserialize)]
pub struct RunView {
    /// Its id.
    pub id: String,
    /// Where it stands.
    pub status: Status,
    /// The final text.
    pub content: Option<String>,
    /// The last text of a run that did not complete.
    pub partial_content: Option<String>,
    /// Why it failed.
    pub error: Option<Failure>,
    /// Why it was cancelled.
    pub cancel_reason: Option<String>,
}

/// A page of runs as the API has it.
#[derive(Debug, Deserialize)]
pub struct RunPage {
    /// The runs.
    pub data: Vec<Value>,
    /// Where the next page begins; none where there is none.
    pub next_cursor: Option<String>,
}

/// A run among others, with what it used itself.
#[derive(Debug, Deserialize)]
pub struct TreeNode {
    /// Its agent.
    pub agent: String,
    /// What its caller called it, where it has no name of its own.
    #[serde(default)]
    pub label: Option<String>,
    /// Where it stands.
    pub status: Status,
    /// Replies received.
    pub turns: u64,
    /// What it used, without its children.
    pub usage: UsageView,
    /// From start to end.
    pub duration_ms: u64,
    /// In the order of the calls that started them.
    pub children: Vec<TreeNode>,
}

/// The parts of a usage that commands show.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub struct UsageView {
    /// Tokens of prompts.
    pub input_tokens: u64,
    /// Tokens of replies.
    pub output_tokens: u64,
    /// Tool calls performed.
    pub tool_calls: u64,
}

/// An event line longer than this is none of ours.
const MAX_LINE: usize = 16 << 20;

impl Client {
    /// A client of the daemon at `url`, whose path is its `path_prefix`; without a scheme `http` is meant.
    /// Proxies that the environment names are not asked.
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

    /// The same client with a key for every request.
    pub fn with_key(self, key: &SecretString) -> Result<Self, ClientError> {
        let text = format!("Bearer {}", key.expose_secret().trim());
        let mut value = HeaderValue::try_from(text).map_err(|_| ClientError::Key)?;
        value.set_sensitive(true);
        Ok(Self {
            authorization: Some(value),
            ..self
        })
    }

    /// The daemon's address, with a slash at its end.
    pub fn base(&self) -> &str {
        self.base.as_str()
    }

    /// Starts a run; the record as accepted.
    pub async fn create_run(&self, agent: &str, body: &Value) -> Result<Value, ClientError> {
        let url = self.agent_url(agent, "runs")?;
        self.json(self.http.post(url).json(body)).await
    }

    /// What a run would be.
    pub async fn dry_run(&self, agent: &str, body: &Value) -> Result<Value, ClientError> {
        let url = self.agent_url(agent, "dry-run")?;
        self.json(self.http.post(url).json(body)).await
    }

    /// Collects the garbage of an agent's memory: that of the key of this name, else the caller's own.
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

    /// Names of the agents that can run.
    pub async fn valid_agents(&self) -> Result<Vec<String>, ClientError> {
        let list: AgentList = self.read(self.get(&["agents"])).await?;
        let valid = list.data.into_iter().filter(|agent| agent.valid);
        Ok(valid.map(|agent| agent.name).collect())
    }

    /// A run as it stands, or as it stands after waiting at most `wait` seconds for its end.
    pub async fn get_run(&self, id: &str, wait: u64) -> Result<Value, ClientError> {
        let mut url = self.url(&["runs", id]);
        url.set_query(Some(&format!("wait={wait}")));
        self.json(self.http.get(url)).await
    }

    /// Gives a person's word on a tool call that waits for it.
    pub async fn decide(
        &self,
        id: &str,
        call: &str,
        decision: &str,
        reason: Option<&str>,
    ) -> Result<Value, ClientError> {
        let body = serde_json::json!({ "decision": decision, "reason": reason });
        let url = self.url(&["runs", id, "approvals", call]);
        self.json(self.http.post(url).json(&body)).await
    }

    /// Where the daemon is.
    pub fn base_without_slash(&self) -> String {
        self.base.as_str().trim_end_matches('/').to_owned()
    }

    /// Asks a run and its descendants to stop.
    pub async fn cancel(&self, id: &str, reason: &str) -> Result<Value, ClientError> {
        let body = serde_json::json!({ "reason": reason });
        let url = self.url(&["runs", id, "cancel"]);
        self.json(self.http.post(url).json(&body)).await
    }

    /// A run with all its descendants.
    pub async fn get_tree(&self, id: &str) -> Result<TreeNode, ClientError> {
        self.read(self.get(&["runs", id, "tree"])).await
    }

    /// The same as the API has it.
    pub async fn get_tree_json(&self, id: &str) -> Result<Value, ClientError> {
        self.json(self.get(&["runs", id, "tree"])).await
    }

    /// At most `limit` runs that fit these filters, newest first, beginning at a cursor.
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

    /// Whether the daemon answers, within `limit`.
    pub async fn check_liveness(&self, timeout: Duration) -> Result<(), ClientError> {
        self.send(self.get(&["livez"]).timeout(timeout))
            .await
            .map(drop)
    }

    /// Tells `hear` every event of a run's tree, until its last one or until the stream breaks off.
    pub async fn follow(
        &self,
        id: &str,
        mut on_event: impl FnMut(&Value),
    ) -> Result<(), ClientError> {
        let request = self
            .get(&["runs", id, "events"])
            .header(ACCEPT, "text/event-stream");
        let mut bytes = self.send(request).await?.bytes_stream();
        let mut line = Vec::new();
        while let Some(chunk) = bytes.next().await {
            let chunk = chunk.map_err(|source| self.unreachable_error(source))?;
            for part in chunk.split_inclusive(|byte| *byte == b'\n') {
                line.extend_from_slice(part);
                if line.ends_with(b"\n") {
                    if let Some(event) = parse_event(&line) {
                        on_event(&event);
                    }
                    line.clear();
                } else if line.len() > MAX_LINE {
                    return Err(self.invalid_response("an endless event"));
                }
            }
        }
        Ok(())
    }

    fn url(&self, segments: &[&str]) -> Url {
        let mut url = self.base.clone();
        // Cannot fail: `new` lets only http and https through, which have a path.
        if let Ok(mut path) = url.path_segments_mut() {
            path.pop_if_empty().extend(segments);
        }
        url
    }

    fn agent_url(&self, agent: &str, route: &str) -> Result<Url, ClientError> {
        // Anything that is no name could change the path; the daemon would not know it either.
        if !is_agent_name(agent) {
            return Err(ClientError::ErrorResponse {
                status: 404,
                code: "agent_not_found".to_owned(),
                detail: format!("agent config not found: {agent}"),
            });
        }
        Ok(self.url(&["agents", agent, route]))
    }

    fn get(&self, segments: &[&str]) -> RequestBuilder {
        self.http.request(Method::GET, self.url(segments))
    }

    async fn json(&self, request: RequestBuilder) -> Result<Value, ClientError> {
        self.read(request).await
    }

    async fn read<T: for<'de> Deserialize<'de>>(
        &self,
        request: RequestBuilder,
    ) -> Result<T, ClientError> {
        let body = self.send(request).await?.bytes().await;
        let body = body.map_err(|source| self.unreachable_error(source))?;
        serde_json::from_slice(&body).map_err(|error| self.invalid_response(&error.to_string()))
    }

    async fn send(&self, mut request: RequestBuilder) -> Result<Response, ClientError> {
        if let Some(authorization) = &self.authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        let response = request
            .send()
            .await
            .map_err(|source| self.unreachable_error(source))?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let body = response.bytes().await.unwrap_or_default();
        let (code, detail) = match serde_json::from_slice::<Problem>(&body) {
            Ok(problem) => (problem.code.clone(), problem.into_message()),
            Err(_) => (String::new(), format!("{} answered {status}", self.base)),
        };
        Err(ClientError::ErrorResponse {
            status: status.as_u16(),
            code,
            detail,
        })
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
    code: String,
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
    fn into_message(self) -> String {
        let mut message = self.detail.unwrap_or(self.title);
        for error in self.errors {
            if !message.contains(&error.detail) {
                message.push_str(&format!("; {}: {}", error.pointer, error.detail));
            }
        }
        message
    }
}

fn parse_event(line: &[u8]) -> Option<Value> {
    serde_json::from_slice(line.strip_prefix(b"data:")?).ok()
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
