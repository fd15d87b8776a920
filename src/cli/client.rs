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
    Refused {
        /// The HTTP status.
        status: u16,
        /// The problem's stable `code`; empty where the answer is no problem of ours.
        code: String,
        /// The problem's `detail`, with its `errors`.
        detail: String,
    },
    /// The answer is not what a daemon would say.
    #[error("the answer of {base} makes no sense: {why}")]
    Unreadable {
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
        let no_address = |why: String| ClientError::Url {
            url: url.to_owned(),
            why,
        };
        let whole = if url.contains("://") {
            url.to_owned()
        } else {
            format!("http://{url}")
        };
        let base = Url::parse(&whole).map_err(|error| no_address(error.to_string()))?;
        if !matches!(base.scheme(), "http" | "https") {
            return Err(no_address(
                "it must start with http:// or https://".to_owned(),
            ));
        }
        let http = reqwest::Client::builder()
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(Duration::from_secs(5))
            .build()
            .map_err(|error| no_address(error.to_string()))?;
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
    pub async fn create(&self, agent: &str, body: &Value) -> Result<Value, ClientError> {
        let url = self.agent_url(agent, "runs")?;
        self.json(self.http.post(url).json(body)).await
    }

    /// What a run would be.
    pub async fn dry_run(&self, agent: &str, body: &Value) -> Result<Value, ClientError> {
        let url = self.agent_url(agent, "dry-run")?;
        self.json(self.http.post(url).json(body)).await
    }

    /// Collects the garbage of an agent's memory: that of the key of this name, else the caller's own.
    pub async fn collect_memory(
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
    pub async fn agents(&self) -> Result<Vec<String>, ClientError> {
        let list: AgentList = self.read(self.get(&["agents"])).await?;
        let valid = list.data.into_iter().filter(|agent| agent.valid);
        Ok(valid.map(|agent| agent.name).collect())
    }

    /// A run as it stands, or as it stands after waiting at most `wait` seconds for its end.
    pub async fn run(&self, id: &str, wait: u64) -> Result<Value, ClientError> {
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
    pub fn address(&self) -> String {
        self.base.as_str().trim_end_matches('/').to_owned()
    }

    /// Asks a run and its descendants to stop.
    pub async fn cancel(&self, id: &str, reason: &str) -> Result<Value, ClientError> {
        let body = serde_json::json!({ "reason": reason });
        let url = self.url(&["runs", id, "cancel"]);
        self.json(self.http.post(url).json(&body)).await
    }

    /// A run with all its descendants.
    pub async fn tree(&self, id: &str) -> Result<TreeNode, ClientError> {
        self.read(self.get(&["runs", id, "tree"])).await
    }

    /// The same as the API has it.
    pub async fn tree_as_json(&self, id: &str) -> Result<Value, ClientError> {
        self.json(self.get(&["runs", id, "tree"])).await
    }

    /// At most `limit` runs that fit these filters, newest first, beginning at a cursor.
    pub async fn runs(
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
    pub async fn alive(&self, limit: Duration) -> Result<(), ClientError> {
        self.send(self.get(&["livez"]).timeout(limit))
            .await
            .map(drop)
    }

    /// Tells `hear` every event of a run's tree, until its last one or until the stream breaks off.
    pub async fn follow(&self, id: &str, mut hear: impl FnMut(&Value)) -> Result<(), ClientError> {
        let request = self
            .get(&["runs", id, "events"])
            .header(ACCEPT, "text/event-stream");
        let mut bytes = self.send(request).await?.bytes_stream();
        let mut line = Vec::new();
        while let Some(chunk) = bytes.next().await {
            let chunk = chunk.map_err(|source| self.unreachable(source))?;
            for part in chunk.split_inclusive(|byte| *byte == b'\n') {
                line.extend_from_slice(part);
                if line.ends_with(b"\n") {
                    if let Some(event) = event_in(&line) {
                        hear(&event);
                    }
                    line.clear();
                } else if line.len() > MAX_LINE {
                    return Err(self.unreadable("an endless event"));
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
            return Err(ClientError::Refused {
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
        let body = body.map_err(|source| self.unreachable(source))?;
        serde_json::from_slice(&body).map_err(|error| self.unreadable(&error.to_string()))
    }

    async fn send(&self, mut request: RequestBuilder) -> Result<Response, ClientError> {
        if let Some(authorization) = &self.authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        let answer = request
            .send()
            .await
            .map_err(|source| self.unreachable(source))?;
        let status = answer.status();
        if status.is_success() {
            return Ok(answer);
        }
        let body = answer.bytes().await.unwrap_or_default();
        let (code, detail) = match serde_json::from_slice::<Problem>(&body) {
            Ok(problem) => (problem.code.clone(), problem.in_words()),
            Err(_) => (String::new(), format!("{} answered {status}", self.base)),
        };
        Err(ClientError::Refused {
            status: status.as_u16(),
            code,
            detail,
        })
    }

    fn unreachable(&self, source: reqwest::Error) -> ClientError {
        ClientError::Unreachable {
            base: self.base.to_string(),
            source: source.without_url(),
        }
    }

    fn unreadable(&self, why: &str) -> ClientError {
        ClientError::Unreadable {
            base: self.base.to_string(),
            why: why.to_owned(),
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
    fn in_words(self) -> String {
        let mut words = self.detail.unwrap_or(self.title);
        for error in self.errors {
            if !words.contains(&error.detail) {
                words.push_str(&format!("; {}: {}", error.pointer, error.detail));
            }
        }
        words
    }
}

fn event_in(line: &[u8]) -> Option<Value> {
    serde_json::from_slice(line.strip_prefix(b"data:")?).ok()
}

#[cfg(test)]
mod tests {
    use super::Client;

    #[test]
    fn addresses_keep_their_prefix_and_names_cannot_leave_their_place() {
        let at = |base: &str| {
            let client = Client::new(base).expect("a client");
            client.url(&["runs", "a/b"]).to_string()
        };
        assert_eq!(at("127.0.0.1:8080"), "http://127.0.0.1:8080/runs/a%2Fb");
        assert_eq!(at("https://x.test/ai/"), "https://x.test/ai/runs/a%2Fb");
        assert!(Client::new("ftp://x").is_err());
        assert!(Client::new("http://").is_err());
        let client = Client::new("x.test").expect("a client");
        assert!(client.agent_url("..", "runs").is_err());
    }
}
