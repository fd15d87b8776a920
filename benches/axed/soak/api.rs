//! The daemon's API as the soak's clients use it.

use std::time::Duration;

use serde_json::Value;

/// No answer may take longer: the longest fault with what it takes to recover from it.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(90);
/// Wait before a request that was answered 503 is sent again.
const RETRY_INTERVAL: Duration = Duration::from_millis(300);

/// Where requests go. Cheap to clone.
#[derive(Clone)]
pub struct Api {
    http: reqwest::Client,
    base: String,
}

/// A whole answer.
#[derive(Debug)]
pub struct ApiResponse {
    /// Its status.
    pub status: u16,
    /// Its JSON.
    pub body: Value,
}

impl ApiResponse {
    /// A text of the body.
    pub fn text(&self, field: &str) -> &str {
        self.body[field].as_str().unwrap_or_default()
    }
}

impl Api {
    /// Of the daemon at this `host:port`.
    pub fn new(address: &str) -> Self {
        Self {
            http: reqwest::Client::new(),
            base: format!("http://{address}"),
        }
    }

    /// A GET, which must be answered 2xx whatever the store does: the record can be read while it cannot be written.
    pub async fn get(&self, path: &str) -> Result<Value, String> {
        let response = self.send(self.http.get(self.url(path)), path).await?;
        match response.status {
            200..300 => Ok(response.body),
            status => Err(format!(
                "GET {path} was answered {status}: {}",
                response.body
            )),
        }
    }

    /// A POST, which must be answered 2xx, or 503 while the store fails.
    pub async fn post(
        &self,
        path: &str,
        body: &Value,
        key: Option<&str>,
    ) -> Result<ApiResponse, String> {
        let mut request = self.http.post(self.url(path)).json(body);
        if let Some(key) = key {
            request = request.header("idempotency-key", key);
        }
        let response = self.send(request, path).await?;
        match response.status {
            200..300 | 503 => Ok(response),
            status => Err(format!(
                "POST {path} was answered {status}: {}",
                response.body
            )),
        }
    }

    /// A POST that is sent again until it is not answered 503.
    pub async fn post_until_accepted(
        &self,
        path: &str,
        body: &Value,
        key: Option<&str>,
    ) -> Result<ApiResponse, String> {
        loop {
            let response = self.post(path, body, key).await?;
            if response.status != 503 {
                return Ok(response);
            }
            tokio::time::sleep(RETRY_INTERVAL).await;
        }
    }

    /// The run once it has ended.
    pub async fn wait_for_end(&self, id: &str) -> Result<Value, String> {
        loop {
            let run = self.get(&format!("/runs/{id}?wait=20")).await?;
            if is_terminal(&run) {
                return Ok(run);
            }
        }
    }

    /// All items of a list whose next page begins `after`, a field of the page before.
    pub async fn get_all(&self, path: &str, next_field: &str) -> Result<Vec<Value>, String> {
        let mut items = Vec::new();
        let mut next = Value::Null;
        loop {
            let parameter = next_field.strip_prefix("next_").unwrap_or(next_field);
            let page = match &next {
                Value::Null => self.get(path).await?,
                Value::String(next) => self.get(&format!("{path}&{parameter}={next}")).await?,
                next => self.get(&format!("{path}&{parameter}={next}")).await?,
            };
            items.extend(page["data"].as_array().into_iter().flatten().cloned());
            next = page[next_field].clone();
            if next.is_null() {
                return Ok(items);
            }
        }
    }

    /// A stream that a POST opens; `None` for a 503.
    pub async fn start_stream(&self, path: &str, body: &Value) -> Result<Option<Stream>, String> {
        let request = self.http.post(self.url(path)).json(body);
        self.stream(request, path).await
    }

    /// A run's stream after an event; `None` for a 204.
    pub async fn resume_stream(&self, id: &str, last: u64) -> Result<Option<Stream>, String> {
        let path = format!("/runs/{id}/events");
        let request = self.http.get(self.url(&path));
        let request = request.header("last-event-id", last.to_string());
        self.stream(request, &path).await
    }

    async fn stream(
        &self,
        request: reqwest::RequestBuilder,
        path: &str,
    ) -> Result<Option<Stream>, String> {
        let request = request.header("accept", "text/event-stream").send();
        let response = with_timeout(path, request).await?;
        let location = response.headers().get("location");
        let location = location.and_then(|location| location.to_str().ok());
        match response.status().as_u16() {
            200 => Ok(Some(Stream {
                location: location.unwrap_or_default().to_owned(),
                response,
                text: String::new(),
            })),
            204 | 503 => Ok(None),
            status => Err(format!("the stream of {path} was answered {status}")),
        }
    }

    async fn send(
        &self,
        request: reqwest::RequestBuilder,
        path: &str,
    ) -> Result<ApiResponse, String> {
        let response = with_timeout(path, request.send()).await?;
        let status = response.status().as_u16();
        let text = with_timeout(path, response.text()).await?;
        Ok(ApiResponse {
            status,
            body: serde_json::from_str(&text).unwrap_or(Value::String(text)),
        })
    }

    fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }
}

/// Events as they come.
pub struct Stream {
    /// The path of its run, if a POST opened it.
    pub location: String,
    response: reqwest::Response,
    text: String,
}

impl Stream {
    /// The next event with a number; none at the end.
    pub async fn next(&mut self) -> Result<Option<Value>, String> {
        loop {
            while let Some((block, rest)) = self.text.split_once("\n\n") {
                let field = |name: &str| {
                    let mut lines = block.lines();
                    lines
                        .find_map(|line| line.strip_prefix(name))
                        .map(str::trim)
                };
                let event = field("id:").and(field("data:"));
                let event = event.map(|data| serde_json::from_str(data).unwrap_or_default());
                self.text = rest.to_owned();
                if event.is_some() {
                    return Ok(event);
                }
            }
            match with_timeout("events", self.response.chunk()).await? {
                Some(bytes) => self.text.push_str(&String::from_utf8_lossy(&bytes)),
                None => return Ok(None),
            }
        }
    }
}

/// Whether a run, or a summary of one, has ended.
pub fn is_terminal(run: &Value) -> bool {
    matches!(
        run["status"].as_str(),
        Some("completed" | "failed" | "cancelled")
    )
}

async fn with_timeout<T>(
    path: &str,
    request: impl Future<Output = reqwest::Result<T>>,
) -> Result<T, String> {
    match tokio::time::timeout(REQUEST_TIMEOUT, request).await {
        Ok(Ok(response)) => Ok(response),
        Ok(Err(error)) => Err(format!("{path} had no answer: {error:?}")),
        Err(_) => Err(format!("{path} had no answer within {REQUEST_TIMEOUT:?}")),
    }
}
