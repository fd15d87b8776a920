//! Batches of OpenAI (<https://developers.openai.com/api/docs/guides/batch>) and of Anthropic
//! (<https://platform.claude.com/docs/en/api/messages/batches>): a request is handed over, and its reply is there when the
//! service found time for it. Each batch here has one request. Knows no run.

use std::borrow::Cow;
use std::time::Duration;

use bytes::Bytes;
use secrecy::SecretString;
use serde::{Deserialize, Serialize};
use serde_json::json;
use serde_json::value::RawValue;

use crate::providers::http_client::{self, ApiRequest, BaseUrl, HttpClient};
use crate::providers::{ErrorCategory, ProviderError, error_mapping};

/// How long OpenAI keeps the files of a batch, in seconds: longer than any batch takes.
const FILE_EXPIRY_SECS: u64 = 172_800;
/// The key of OpenAI's metadata by which a batch is found again.
const METADATA_KEY: &str = "axed_item";
/// Most characters of a batch's id.
const MAX_ID_LEN: usize = 128;

/// A service's batches.
pub struct BatchClient {
    client: HttpClient,
    base_url: BaseUrl,
    api: BatchApi,
    /// The longest pause between two looks at a batch.
    pub max_poll_interval: Duration,
}

/// Whose batches they are.
#[derive(Clone, Copy, Debug)]
pub enum BatchApi {
    /// A file of requests, a batch of that file, and a file of replies.
    Openai,
    /// A list of requests, and a list of replies.
    Anthropic,
}

/// The request of a batch.
pub struct BatchItem {
    /// OpenAI: the endpoint that it is for.
    pub path: &'static str,
    /// Its body.
    pub body: Vec<u8>,
}

/// What a look at a batch found.
#[derive(Debug)]
pub enum BatchStatus {
    /// It is not done.
    InProgress,
    /// What the service answered, as it would have at once.
    Completed {
        /// HTTP's status.
        status: u16,
        /// The body.
        body: Bytes,
    },
    /// There is no answer, and why.
    Failed(ProviderError),
    /// The service had no time for it.
    Expired,
}

impl BatchClient {
    /// Those of the service below `base`.
    pub fn new(
        client: &HttpClient,
        base_url: &BaseUrl,
        api: BatchApi,
        max_poll_interval: Duration,
    ) -> Self {
        Self {
            client: client.clone(),
            base_url: base_url.clone(),
            api,
            max_poll_interval,
        }
    }

    /// Hands a request over; the id of its batch. `name` is what the request is known by there.
    pub async fn create(
        &self,
        name: &str,
        item: &BatchItem,
        key: Option<&SecretString>,
    ) -> Result<String, ProviderError> {
        let body: &RawValue =
            http_client::parse_json(std::str::from_utf8(&item.body).unwrap_or_default())?;
        let response = match self.api {
            BatchApi::Anthropic => {
                #[derive(Serialize)]
                struct Request<'a> {
                    custom_id: &'a str,
                    params: &'a RawValue,
                }
                #[derive(Serialize)]
                struct Create<'a> {
                    requests: [Request<'a>; 1],
                }
                let create = Create {
                    requests: [Request {
                        custom_id: name,
                        params: body,
                    }],
                };
                let call = ApiRequest::post(
                    "/v1/messages/batches",
                    http_client::serialize_json(&create)?,
                );
                self.client.call_api(&self.base_url, call, key).await?
            }
            BatchApi::Openai => {
                #[derive(Serialize)]
                struct RequestLine<'a> {
                    custom_id: &'a str,
                    method: &'static str,
                    url: &'static str,
                    body: &'a RawValue,
                }
                let line = RequestLine {
                    custom_id: name,
                    method: "POST",
                    url: item.path,
                    body,
                };
                let file = self
                    .upload(name, http_client::serialize_json(&line)?, key)
                    .await?;
                let create = json!({
                    "input_file_id": file,
                    "endpoint": item.path,
                    "completion_window": "24h",
                    "metadata": {METADATA_KEY: name},
                    "output_expires_after": {"anchor": "created_at", "seconds": FILE_EXPIRY_SECS},
                });
                let call = ApiRequest::post("/batches", http_client::serialize_json(&create)?);
                self.client.call_api(&self.base_url, call, key).await?
            }
        };
        parse_id(&response)
    }

    /// Uploads a file of one line; its id.
    async fn upload(
        &self,
        name: &str,
        line: Vec<u8>,
        key: Option<&SecretString>,
    ) -> Result<String, ProviderError> {
        // The line has no line end in it, so that it cannot hold the boundary.
        let boundary = format!("axed-{name}");
        let field = |field: &str, value: &str| {
            format!(
                "--{boundary}\r\nContent-Disposition: form-data; name=\"{field}\"\r\n\r\n{value}\r\n"
            )
        };
        let mut body = [
            field("purpose", "batch"),
            field("expires_after[anchor]", "created_at"),
            field("expires_after[seconds]", &FILE_EXPIRY_SECS.to_string()),
            format!(
                "--{boundary}\r\nContent-Disposition: form-data; name=\"file\"; filename=\"{name}.jsonl\"\r\n\
                 Content-Type: application/jsonl\r\n\r\n"
            ),
        ]
        .concat()
        .into_bytes();
        body.extend(line);
        body.extend(format!("\n\r\n--{boundary}--\r\n").into_bytes());
        let call = ApiRequest {
            content_type: Some(format!("multipart/form-data; boundary={boundary}")),
            ..ApiRequest::post("/files", body)
        };
        parse_id(&self.client.call_api(&self.base_url, call, key).await?)
    }

    /// Finds the batch of a request that was handed over, where the service tells: Anthropic does not.
    pub async fn find(
        &self,
        name: &str,
        key: Option<&SecretString>,
    ) -> Result<Option<String>, ProviderError> {
        #[derive(Deserialize)]
        struct BatchInfo {
            id: String,
            status: Option<String>,
            metadata: Option<serde_json::Map<String, serde_json::Value>>,
        }
        #[derive(Deserialize)]
        struct BatchList {
            data: Vec<BatchInfo>,
        }
        if let BatchApi::Anthropic = self.api {
            return Ok(None);
        }
        let call = ApiRequest {
            query: Some("limit=100"),
            ..ApiRequest::get("/batches")
        };
        let list = self.client.call_api(&self.base_url, call, key).await?;
        let list: BatchList = parse_body(&list)?;
        let is_match = |batch: &BatchInfo| {
            let item_name = batch
                .metadata
                .as_ref()
                .and_then(|it| it.get(METADATA_KEY)?.as_str());
            let is_finished = matches!(
                batch.status.as_deref(),
                Some("failed" | "cancelled" | "cancelling")
            );
            item_name == Some(name) && !is_finished
        };
        let matched = list.data.into_iter().find(is_match);
        matched.map(|batch| check_id(batch.id)).transpose()
    }

    /// Looks at a batch, and fetches what it has for the request once it is done.
    ///
    /// # Errors
    /// The look failed, which says nothing of the batch.
    pub async fn poll(
        &self,
        batch: &str,
        name: &str,
        key: Option<&SecretString>,
    ) -> Result<BatchStatus, ProviderError> {
        match self.api {
            BatchApi::Anthropic => self.poll_anthropic(batch, name, key).await,
            BatchApi::Openai => self.poll_openai(batch, name, key).await,
        }
    }

    async fn poll_anthropic(
        &self,
        batch: &str,
        name: &str,
        key: Option<&SecretString>,
    ) -> Result<BatchStatus, ProviderError> {
        #[derive(Deserialize)]
        struct BatchState<'a> {
            processing_status: Cow<'a, str>,
        }
        let path = format!("/v1/messages/batches/{batch}");
        let state = self
            .client
            .call_api(&self.base_url, ApiRequest::get(&path), key)
            .await?;
        if parse_body::<BatchState<'_>>(&state)?.processing_status != "ended" {
            return Ok(BatchStatus::InProgress);
        }
        let results = format!("{path}/results");
        let results = self
            .client
            .call_api(&self.base_url, ApiRequest::get(&results), key)
            .await?;
        parse_anthropic_results(body_text(&results)?, name)
    }

    async fn poll_openai(
        &self,
        batch: &str,
        name: &str,
        key: Option<&SecretString>,
    ) -> Result<BatchStatus, ProviderError> {
        #[derive(Deserialize)]
        struct Errors<'a> {
            #[serde(borrow)]
            data: Option<Vec<&'a RawValue>>,
        }
        #[derive(Deserialize)]
        struct BatchState<'a> {
            status: Cow<'a, str>,
            output_file_id: Option<String>,
            error_file_id: Option<String>,
            #[serde(borrow)]
            errors: Option<Errors<'a>>,
        }
        let path = format!("/batches/{batch}");
        let state = self
            .client
            .call_api(&self.base_url, ApiRequest::get(&path), key)
            .await?;
        let state: BatchState<'_> = parse_body(&state)?;
        let status_without_reply = match state.status.as_ref() {
            "completed" => BatchStatus::Failed(ProviderError::new(
                ErrorCategory::Server,
                "the batch has no reply to the request",
            )),
            "expired" => BatchStatus::Expired,
            "cancelled" => cancelled_status(),
            "failed" => {
                let error = state
                    .errors
                    .and_then(|errors| errors.data?.into_iter().next());
                let message =
                    error.map(|error| error_mapping::from_error_body(error.get()).message);
                let message = message.unwrap_or_else(|| "the batch failed".to_owned());
                return Ok(BatchStatus::Failed(ProviderError::new(
                    ErrorCategory::BadRequest,
                    message,
                )));
            }
            _ => return Ok(BatchStatus::InProgress),
        };
        for file in [state.output_file_id, state.error_file_id]
            .into_iter()
            .flatten()
        {
            let path = format!("/files/{}/content", check_id(file)?);
            let lines = self
                .client
                .call_api(&self.base_url, ApiRequest::get(&path), key)
                .await?;
            if let Some(status) = parse_openai_results(body_text(&lines)?, name)? {
                return Ok(status);
            }
        }
        Ok(status_without_reply)
    }

    /// Asks the service not to begin with a batch.
    pub async fn cancel(
        &self,
        batch: &str,
        key: Option<&SecretString>,
    ) -> Result<(), ProviderError> {
        let path = match self.api {
            BatchApi::Anthropic => format!("/v1/messages/batches/{batch}/cancel"),
            BatchApi::Openai => format!("/batches/{batch}/cancel"),
        };
        let call = ApiRequest::post(&path, Vec::new());
        self.client
            .call_api(&self.base_url, call, key)
            .await
            .map(drop)
    }
}

fn parse_anthropic_results(lines: &str, name: &str) -> Result<BatchStatus, ProviderError> {
    #[derive(Deserialize)]
    struct Outcome<'a> {
        #[serde(rename = "type")]
        kind: Cow<'a, str>,
        #[serde(borrow)]
        message: Option<&'a RawValue>,
        #[serde(borrow)]
        error: Option<&'a RawValue>,
    }
    #[derive(Deserialize)]
    struct ResultLine<'a> {
        #[serde(borrow)]
        custom_id: Cow<'a, str>,
        #[serde(borrow)]
        result: Outcome<'a>,
    }
    for line in lines.lines().filter(|line| !line.trim().is_empty()) {
        let ResultLine { custom_id, result } = http_client::parse_json(line)?;
        if custom_id != name {
            continue;
        }
        return Ok(match (result.kind.as_ref(), result.message, result.error) {
            ("succeeded", Some(message), _) => completed_status(200, message),
            ("errored", _, Some(error)) => {
                BatchStatus::Failed(error_mapping::from_error_body(error.get()))
            }
            ("expired", ..) => BatchStatus::Expired,
            ("canceled", ..) => cancelled_status(),
            _ => BatchStatus::Failed(error_mapping::from_error_body(line)),
        });
    }
    let message = "the batch has no reply to the request";
    Ok(BatchStatus::Failed(ProviderError::new(
        ErrorCategory::Server,
        message,
    )))
}

fn parse_openai_results(lines: &str, name: &str) -> Result<Option<BatchStatus>, ProviderError> {
    #[derive(Deserialize)]
    struct Response<'a> {
        status_code: u16,
        #[serde(borrow)]
        body: &'a RawValue,
    }
    #[derive(Deserialize)]
    struct LineError<'a> {
        code: Option<Cow<'a, str>>,
    }
    #[derive(Deserialize)]
    struct ResultLine<'a> {
        #[serde(borrow)]
        custom_id: Cow<'a, str>,
        #[serde(borrow)]
        response: Option<Response<'a>>,
        #[serde(borrow)]
        error: Option<&'a RawValue>,
    }
    for line in lines.lines().filter(|line| !line.trim().is_empty()) {
        let parsed: ResultLine<'_> = http_client::parse_json(line)?;
        if parsed.custom_id != name {
            continue;
        }
        if let Some(Response { status_code, body }) = parsed.response {
            return Ok(Some(completed_status(status_code, body)));
        }
        let error = parsed.error.map_or(line, RawValue::get);
        let line_error = serde_json::from_str::<LineError<'_>>(error).ok();
        let code = line_error.and_then(|fault| fault.code).unwrap_or_default();
        return Ok(Some(match code.as_ref() {
            "batch_expired" => BatchStatus::Expired,
            "batch_cancelled" => cancelled_status(),
            _ => BatchStatus::Failed(error_mapping::from_error_body(error)),
        }));
    }
    Ok(None)
}

fn completed_status(status: u16, body: &RawValue) -> BatchStatus {
    BatchStatus::Completed {
        status,
        body: Bytes::copy_from_slice(body.get().as_bytes()),
    }
}

/// Somebody cancelled it at the service.
fn cancelled_status() -> BatchStatus {
    let message = "the batch was cancelled at the service";
    BatchStatus::Failed(ProviderError::new(ErrorCategory::BadRequest, message))
}

fn parse_id(body: &Bytes) -> Result<String, ProviderError> {
    #[derive(Deserialize)]
    struct Created {
        id: String,
    }
    check_id(parse_body::<Created>(body)?.id)
}

/// An id that may stand in a path.
fn check_id(id: String) -> Result<String, ProviderError> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    match (1..=MAX_ID_LEN).contains(&id.len()) && id.chars().all(is_plain) {
        true => Ok(id),
        false => Err(ProviderError::new(
            ErrorCategory::Server,
            "the service named a batch or file by what is no id",
        )),
    }
}

fn body_text(body: &Bytes) -> Result<&str, ProviderError> {
    std::str::from_utf8(body).map_err(|error| {
        let message = format!("failed to parse response: {error}");
        ProviderError::new(ErrorCategory::Server, message)
    })
}

fn parse_body<'a, T: Deserialize<'a>>(body: &'a Bytes) -> Result<T, ProviderError> {
    http_client::parse_json(body_text(body)?)
}

#[cfg(test)]
mod tests {
    use super::{BatchStatus, check_id, parse_anthropic_results, parse_openai_results};

    fn describe(status: &BatchStatus) -> String {
        match status {
            BatchStatus::InProgress => "working".to_owned(),
            BatchStatus::Completed { status, body } => {
                format!("{status} {}", String::from_utf8_lossy(body))
            }
            BatchStatus::Failed(error) => error.to_string(),
            BatchStatus::Expired => "expired".to_owned(),
        }
    }

    #[test]
    fn a_line_of_results_is_found_by_its_name_and_read() {
        let anthropic = concat!(
            "{\"custom_id\":\"b\",\"result\":{\"type\":\"expired\"}}\n\n",
            "{\"custom_id\":\"a\",\"result\":{\"type\":\"succeeded\",\"message\":{\"id\":1}}}\n",
            "{\"custom_id\":\"c\",\"result\":{\"type\":\"errored\",\"error\":{\"type\":\"error\",\"error\":",
            "{\"type\":\"invalid_request_error\",\"message\":\"no\"}}}}\n",
            "{\"custom_id\":\"d\",\"result\":{\"type\":\"canceled\"}}",
        );
        for (name, wanted) in [
            ("a", "200 {\"id\":1}"),
            ("b", "expired"),
            ("c", "bad_request: no"),
            ("d", "bad_request: the batch was cancelled at the service"),
            ("e", "server: the batch has no reply to the request"),
        ] {
            assert_eq!(
                describe(&parse_anthropic_results(anthropic, name).expect("lines")),
                wanted
            );
        }
        let openai = concat!(
            "{\"custom_id\":\"a\",\"response\":{\"status_code\":429,\"body\":{\"x\":1}},\"error\":null}\n",
            "{\"custom_id\":\"b\",\"response\":null,\"error\":{\"code\":\"batch_expired\",\"message\":\"late\"}}\n",
            "{\"custom_id\":\"c\",\"error\":{\"code\":\"rate_limit_exceeded\",\"message\":\"busy\"}}\n",
        );
        for (name, wanted) in [
            ("a", Some("429 {\"x\":1}")),
            ("b", Some("expired")),
            ("c", Some("rate_limit: busy")),
            ("d", None),
        ] {
            let status = parse_openai_results(openai, name).expect("lines");
            assert_eq!(status.as_ref().map(describe).as_deref(), wanted);
        }
        assert!(
            parse_openai_results("{", "a").is_err() && parse_anthropic_results("[]", "a").is_err()
        );
    }

    #[test]
    fn an_id_cannot_lead_elsewhere() {
        assert!(check_id("batch_01-Ab".to_owned()).is_ok());
        for bad in ["", "../files", "a/b", "a?b", "a#b", "é", &"a".repeat(129)] {
            assert!(check_id(bad.to_owned()).is_err(), "{bad}");
        }
    }
}
