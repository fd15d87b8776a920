//! One POST to a stranger's address: past the guard, without proxy and redirects, within bounds of time and size.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use http::header::{CONTENT_TYPE, USER_AGENT};
use reqwest::{Client, Response};

use crate::ssrf::{self, SsrfGuard, root_cause, ssrf_client};

/// How long a receiver has for its answer, from the first packet on.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(15);
/// Most bytes that are read of an answer, and for how long. Nobody looks at them: a connection that is read to its
/// answer's end can be used again.
const MAX_BODY_BYTES: usize = 4096;
const BODY_TIMEOUT: Duration = Duration::from_secs(1);
/// Most characters of an error: it may hold names that a stranger chose.
const MAX_ERROR_CHARS: usize = 500;

/// What came back.
#[derive(Debug)]
pub struct PostOutcome {
    /// HTTP's status, where one came.
    pub status: Option<u16>,
    /// Why it does not count as delivered.
    pub error: Option<String>,
}

impl PostOutcome {
    /// Nothing came, for this reason.
    pub fn failed(error: String) -> Self {
        Self {
            status: None,
            error: Some(error.chars().take(MAX_ERROR_CHARS).collect()),
        }
    }
}

/// Posts messages.
pub struct WebhookClient {
    /// Made for the first message: most daemons send none.
    client: OnceLock<Result<Client, String>>,
    guard: Arc<SsrfGuard>,
}

impl WebhookClient {
    /// To where this guard lets it.
    pub fn new(guard: SsrfGuard) -> Self {
        Self {
            client: OnceLock::new(),
            guard: Arc::new(guard),
        }
    }

    fn client(&self) -> Result<&Client, String> {
        let client = self.client.get_or_init(|| {
            ssrf_client::client_builder(&self.guard)
                .pool_max_idle_per_host(4)
                .pool_idle_timeout(Duration::from_secs(30))
                .build()
                .map_err(|error| format!("no HTTP client for webhooks: {error}"))
        });
        client.as_ref().map_err(String::clone)
    }

    /// Sends one message with the headers of Standard Webhooks.
    pub async fn send(
        &self,
        url: &str,
        id: &str,
        timestamp: i64,
        signature: &str,
        body: String,
    ) -> PostOutcome {
        let url = match ssrf::parse_url(url) {
            Ok(url) => url,
            Err(message) => return PostOutcome::failed(format!("its address {message}")),
        };
        // The client asks the resolver for names only: an address that stands in the URL is vetted here.
        if let Err(refused) = self.guard.check(&url) {
            return PostOutcome::failed(refused.to_string());
        }
        let client = match self.client() {
            Ok(client) => client,
            Err(message) => return PostOutcome::failed(message),
        };
        let request = client
            .post(url)
            .header(CONTENT_TYPE, "application/json")
            .header(USER_AGENT, concat!("axed/", env!("CARGO_PKG_VERSION")))
            .header("webhook-id", id)
            .header("webhook-timestamp", timestamp)
            .header("webhook-signature", signature)
            .body(body)
            .send();
        let mut response = match tokio::time::timeout(RESPONSE_TIMEOUT, request).await {
            Ok(Ok(response)) => response,
            Ok(Err(error)) => return PostOutcome::failed(error_cause(&error)),
            Err(_) => {
                return PostOutcome::failed(format!(
                    "no answer within {}s",
                    RESPONSE_TIMEOUT.as_secs()
                ));
            }
        };
        let status = response.status();
        // What is behind the status changes nothing any more.
        let _ = tokio::time::timeout(BODY_TIMEOUT, drain_body(&mut response)).await;
        let error = match status.as_u16() {
            200..300 => None,
            300..400 => Some(format!("answered {status}; redirects are not followed")),
            410 => Some(format!("answered {status}: it wants no more of them")),
            _ => Some(format!("answered {status}")),
        };
        PostOutcome {
            status: Some(status.as_u16()),
            error,
        }
    }
}

async fn drain_body(response: &mut Response) {
    let mut total = 0;
    while let Ok(Some(chunk)) = response.chunk().await {
        total += chunk.len();
        if total > MAX_BODY_BYTES {
            return;
        }
    }
}

fn error_cause(error: &reqwest::Error) -> String {
    root_cause(error).unwrap_or_else(|| "the HTTP client gave no reason".to_owned())
}
