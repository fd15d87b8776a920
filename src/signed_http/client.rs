//! Sends one message: checks the URL with the SSRF guard, uses no proxy, follows no redirects, and limits time and size.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use http::header::{CONTENT_TYPE, USER_AGENT};
use reqwest::{Client, Response};

use crate::ssrf::{self, SsrfGuard, root_cause, ssrf_client};

/// The timeout for a response, including the connection.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(15);
/// How much of a response body is read, and for how long. Reading it to the end lets the connection be reused, also where it is ignored.
const MAX_BODY_BYTES: usize = 16 << 10;
const BODY_TIMEOUT: Duration = Duration::from_secs(1);
/// Longer errors are truncated: they may contain names that the receiver chose.
const MAX_ERROR_CHARS: usize = 500;

#[derive(Debug)]
pub struct PostOutcome {
    /// The HTTP status; `None` if there was no response.
    pub status: Option<u16>,
    /// Why the attempt failed; `None` if it succeeded.
    pub error: Option<String>,
    /// The beginning of the response's body.
    pub body: Vec<u8>,
}

impl PostOutcome {
    pub fn failed(error: String) -> Self {
        Self {
            status: None,
            error: Some(error.chars().take(MAX_ERROR_CHARS).collect()),
            body: Vec::new(),
        }
    }
}

/// One message, with the headers that its receiver trusts.
pub struct Message {
    pub content_type: &'static str,
    pub headers: Vec<(&'static str, String)>,
    pub body: String,
}

pub struct PostClient {
    /// Built for the first message: most daemons send none.
    client: OnceLock<Result<Client, reqwest::Error>>,
    guard: Arc<SsrfGuard>,
}

impl PostClient {
    pub fn new(guard: SsrfGuard) -> Self {
        Self {
            client: OnceLock::new(),
            guard: Arc::new(guard),
        }
    }

    fn client(&self) -> Result<&Client, &reqwest::Error> {
        let client = self.client.get_or_init(|| {
            ssrf_client::client_builder(&self.guard)
                .pool_max_idle_per_host(4)
                .pool_idle_timeout(Duration::from_secs(30))
                .build()
        });
        client.as_ref()
    }

    pub async fn send(&self, url: &str, message: Message) -> PostOutcome {
        let url = match ssrf::parse_url(url) {
            Ok(url) => url,
            Err(message) => return PostOutcome::failed(format!("the URL {message}")),
        };
        // The guarded resolver checks host names only. This checks IP addresses in the URL.
        if let Err(error) = self.guard.check(&url) {
            return PostOutcome::failed(error.to_string());
        }
        let client = match self.client() {
            Ok(client) => client,
            Err(error) => {
                return PostOutcome::failed(format!("cannot build the HTTP client: {error}"));
            }
        };
        let mut request = client
            .post(url)
            .header(CONTENT_TYPE, message.content_type)
            .header(USER_AGENT, concat!("axed/", env!("CARGO_PKG_VERSION")));
        for (name, value) in message.headers {
            request = request.header(name, value);
        }
        let request = request.body(message.body).send();
        let mut response = match tokio::time::timeout(RESPONSE_TIMEOUT, request).await {
            Ok(Ok(response)) => response,
            Ok(Err(error)) => return PostOutcome::failed(error_cause(&error)),
            Err(_) => {
                return PostOutcome::failed(format!(
                    "no response within {}s",
                    RESPONSE_TIMEOUT.as_secs()
                ));
            }
        };
        let status = response.status();
        let mut body = Vec::new();
        let _ = tokio::time::timeout(BODY_TIMEOUT, read_body(&mut response, &mut body)).await;
        let error = match status.as_u16() {
            200..300 => None,
            300..400 => Some(format!("HTTP status {status}; redirects are not followed")),
            410 => Some(format!(
                "HTTP status {status}: the receiver wants no more deliveries"
            )),
            _ => Some(format!("HTTP status {status}")),
        };
        PostOutcome {
            status: Some(status.as_u16()),
            error,
            body,
        }
    }
}

async fn read_body(response: &mut Response, body: &mut Vec<u8>) {
    while let Ok(Some(chunk)) = response.chunk().await {
        let left = MAX_BODY_BYTES.saturating_sub(body.len());
        body.extend_from_slice(&chunk[..chunk.len().min(left)]);
        if chunk.len() > left {
            return;
        }
    }
}

fn error_cause(error: &reqwest::Error) -> String {
    root_cause(error).unwrap_or_else(|| "the HTTP client gave no reason".to_owned())
}
