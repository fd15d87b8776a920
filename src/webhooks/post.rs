//! One POST to a stranger's address: past the guard, without proxy and redirects, within bounds of time and size.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use http::header::{CONTENT_TYPE, USER_AGENT};
use reqwest::{Client, Response};

use crate::net::{self, Guard, guarded, innermost};

/// How long a receiver has for its answer, from the first packet on.
const TIMEOUT: Duration = Duration::from_secs(15);
/// Most bytes that are read of an answer, and for how long. Nobody looks at them: a connection that is read to its
/// answer's end can be used again.
const MOST_READ: usize = 4096;
const READING: Duration = Duration::from_secs(1);
/// Most characters of an error: it may hold names that a stranger chose.
const MOST_SAID: usize = 500;

/// What came back.
#[derive(Debug)]
pub struct Answer {
    /// HTTP's status, where one came.
    pub status: Option<u16>,
    /// Why it does not count as delivered.
    pub error: Option<String>,
}

impl Answer {
    /// Nothing came, for this reason.
    pub fn none(error: String) -> Self {
        Self {
            status: None,
            error: Some(error.chars().take(MOST_SAID).collect()),
        }
    }
}

/// Posts messages.
pub struct Post {
    /// Made for the first message: most daemons send none.
    client: OnceLock<Result<Client, String>>,
    guard: Arc<Guard>,
}

impl Post {
    /// To where this guard lets it.
    pub fn new(guard: Guard) -> Self {
        Self {
            client: OnceLock::new(),
            guard: Arc::new(guard),
        }
    }

    fn client(&self) -> Result<&Client, String> {
        let made = self.client.get_or_init(|| {
            guarded::client(&self.guard)
                .pool_max_idle_per_host(4)
                .pool_idle_timeout(Duration::from_secs(30))
                .build()
                .map_err(|error| format!("no HTTP client for webhooks: {error}"))
        });
        made.as_ref().map_err(String::clone)
    }

    /// Sends one message with the headers of Standard Webhooks.
    pub async fn send(
        &self,
        url: &str,
        id: &str,
        at: i64,
        signature: &str,
        body: String,
    ) -> Answer {
        let url = match net::parse(url) {
            Ok(url) => url,
            Err(why) => return Answer::none(format!("its address {why}")),
        };
        // The client asks the resolver for names only: an address that stands in the URL is vetted here.
        if let Err(refused) = self.guard.check(&url) {
            return Answer::none(refused.to_string());
        }
        let client = match self.client() {
            Ok(client) => client,
            Err(why) => return Answer::none(why),
        };
        let sending = client
            .post(url)
            .header(CONTENT_TYPE, "application/json")
            .header(USER_AGENT, concat!("axed/", env!("CARGO_PKG_VERSION")))
            .header("webhook-id", id)
            .header("webhook-timestamp", at)
            .header("webhook-signature", signature)
            .body(body)
            .send();
        let mut response = match tokio::time::timeout(TIMEOUT, sending).await {
            Ok(Ok(response)) => response,
            Ok(Err(error)) => return Answer::none(root_cause(&error)),
            Err(_) => return Answer::none(format!("no answer within {}s", TIMEOUT.as_secs())),
        };
        let status = response.status();
        // What is behind the status changes nothing any more.
        let _ = tokio::time::timeout(READING, read(&mut response)).await;
        let error = match status.as_u16() {
            200..300 => None,
            300..400 => Some(format!("answered {status}; redirects are not followed")),
            410 => Some(format!("answered {status}: it wants no more of them")),
            _ => Some(format!("answered {status}")),
        };
        Answer {
            status: Some(status.as_u16()),
            error,
        }
    }
}

async fn read(response: &mut Response) {
    let mut read = 0;
    while let Ok(Some(chunk)) = response.chunk().await {
        read += chunk.len();
        if read > MOST_READ {
            return;
        }
    }
}

fn root_cause(error: &reqwest::Error) -> String {
    innermost(error).unwrap_or_else(|| "the HTTP client gave no reason".to_owned())
}
