//! OpenAI's batch API (<https://developers.openai.com/api/docs/guides/batch>): the client uploads a file of requests, creates
//! a batch from it, and downloads a file of results. axed submits one request per batch.

use std::borrow::Cow;
use std::time::Duration;

use futures_util::future::BoxFuture;
use secrecy::SecretString;
use serde::{Deserialize, Serialize};
use serde_json::json;
use serde_json::value::RawValue;

use crate::providers::batches::{
    BatchApi, ResultsError, cancelled_status, check_id, completed_status, no_reply_status,
    parse_body, parse_id, result_lines,
};
use crate::providers::http_client::ApiRequest;
use crate::providers::{
    BatchClient, BatchItem, BatchStatus, ErrorCategory, ProviderError, error_mapping, wire_json,
};

/// How long OpenAI keeps the files of a batch: longer than any batch takes.
const FILE_EXPIRY_SECS: u64 = 172_800;
/// Pages of the list of batches that are searched for one, and how each is requested.
const MAX_PAGES: usize = 50;
const LIST_QUERY: &str = "limit=100";
/// The metadata key by which a batch is found again after a restart.
const METADATA_KEY: &str = "axed_item";

pub struct OpenAiBatches(pub BatchApi);

impl OpenAiBatches {
    /// Uploads a file with one line and returns its id.
    async fn upload(
        &self,
        name: &str,
        line: Vec<u8>,
        key: Option<&SecretString>,
    ) -> Result<String, ProviderError> {
        // The line is JSON without line breaks, so it cannot contain the boundary.
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
        let request = ApiRequest {
            content_type: Some(format!("multipart/form-data; boundary={boundary}")),
            ..ApiRequest::post("/files", body)
        };
        parse_id(&self.0.call(request, key).await?)
    }

    async fn read_result(
        &self,
        state: BatchState<'_>,
        name: &str,
        key: Option<&SecretString>,
    ) -> Result<BatchStatus, ResultsError> {
        let status_without_reply = match state.status.as_ref() {
            "completed" => no_reply_status(),
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
            let file = check_id(file)
                .map_err(|error| ResultsError::Lost(self.0.client.reply_error(error)))?;
            let path = format!("/files/{file}/content");
            let parse = |lines: &str| parse_results(lines, name);
            let found = self.0.read_results(&path, key, parse).await?;
            if let Some(status) = found {
                return Ok(status);
            }
        }
        Ok(status_without_reply)
    }
}

impl BatchClient for OpenAiBatches {
    fn max_poll_interval(&self) -> Duration {
        self.0.max_poll_interval
    }

    fn create<'a>(
        &'a self,
        name: &'a str,
        item: &'a BatchItem,
        key: Option<&'a SecretString>,
    ) -> BoxFuture<'a, Result<String, ProviderError>> {
        #[derive(Serialize)]
        struct RequestLine<'a> {
            custom_id: &'a str,
            method: &'static str,
            url: &'static str,
            body: &'a RawValue,
        }
        Box::pin(async move {
            let line = RequestLine {
                custom_id: name,
                method: "POST",
                url: item.path,
                body: item.json()?,
            };
            let file = self.upload(name, wire_json::serialize(&line)?, key).await?;
            let create = json!({
                "input_file_id": file,
                "endpoint": item.path,
                "completion_window": "24h",
                "metadata": {METADATA_KEY: name},
                "output_expires_after": {"anchor": "created_at", "seconds": FILE_EXPIRY_SECS},
            });
            let request = ApiRequest::post("/batches", wire_json::serialize(&create)?);
            parse_id(&self.0.call(request, key).await?)
        })
    }

    fn find<'a>(
        &'a self,
        name: &'a str,
        key: Option<&'a SecretString>,
    ) -> BoxFuture<'a, Result<Option<String>, ProviderError>> {
        Box::pin(async move {
            let mut query = LIST_QUERY.to_owned();
            for _ in 0..MAX_PAGES {
                let request = ApiRequest {
                    query: Some(&query),
                    ..ApiRequest::get("/batches")
                };
                let list = self.0.call(request, key).await?;
                let mut list: BatchList = parse_body(&list)?;
                let found = list.data.iter().position(|batch| batch.is_usable(name));
                if let Some(index) = found {
                    return check_id(list.data.swap_remove(index).id).map(Some);
                }
                let Some(last) = list.data.pop().filter(|_| list.has_more) else {
                    break;
                };
                query = format!("{LIST_QUERY}&after={}", check_id(last.id)?);
            }
            Ok(None)
        })
    }

    fn poll<'a>(
        &'a self,
        batch: &'a str,
        name: &'a str,
        key: Option<&'a SecretString>,
    ) -> BoxFuture<'a, Result<BatchStatus, ProviderError>> {
        Box::pin(async move {
            let path = format!("/batches/{batch}");
            let state = self.0.call(ApiRequest::get(&path), key).await?;
            self.read_result(parse_body(&state)?, name, key)
                .await
                .or_else(ResultsError::into_status)
        })
    }

    fn cancel<'a>(
        &'a self,
        batch: &'a str,
        key: Option<&'a SecretString>,
    ) -> BoxFuture<'a, Result<(), ProviderError>> {
        Box::pin(async move {
            let path = format!("/batches/{batch}/cancel");
            let request = ApiRequest::post(&path, Vec::new());
            self.0.call(request, key).await.map(drop)
        })
    }
}

#[derive(Deserialize)]
struct BatchList {
    /// The newest first.
    data: Vec<BatchInfo>,
    #[serde(default)]
    has_more: bool,
}

#[derive(Deserialize)]
struct BatchInfo {
    id: String,
    status: Option<String>,
    metadata: Option<serde_json::Map<String, serde_json::Value>>,
}

impl BatchInfo {
    /// Whether this is the batch with this name, and it can still have a result.
    fn is_usable(&self, name: &str) -> bool {
        let metadata = self.metadata.as_ref();
        let item_name = metadata.and_then(|it| it.get(METADATA_KEY)?.as_str());
        let is_finished = matches!(
            self.status.as_deref(),
            Some("failed" | "cancelled" | "cancelling")
        );
        item_name == Some(name) && !is_finished
    }
}

#[derive(Deserialize)]
struct BatchState<'a> {
    status: Cow<'a, str>,
    output_file_id: Option<String>,
    error_file_id: Option<String>,
    #[serde(borrow)]
    errors: Option<Errors<'a>>,
}

#[derive(Deserialize)]
struct Errors<'a> {
    #[serde(borrow)]
    data: Option<Vec<&'a RawValue>>,
}

fn parse_results(lines: &str, name: &str) -> Result<Option<BatchStatus>, ProviderError> {
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
    for line in result_lines(lines) {
        let parsed: ResultLine<'_> = wire_json::parse(line)?;
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

#[cfg(test)]
mod tests {
    use super::parse_results;
    use crate::providers::BatchStatus;

    fn describe(status: &BatchStatus) -> String {
        match status {
            BatchStatus::InProgress => "in progress".to_owned(),
            BatchStatus::Completed { status, body } => {
                format!("{status} {}", String::from_utf8_lossy(body))
            }
            BatchStatus::Failed(error) | BatchStatus::Unreadable(error) => error.to_string(),
            BatchStatus::Expired => "expired".to_owned(),
        }
    }

    #[test]
    fn a_result_line_is_found_by_its_name() {
        let lines = concat!(
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
            let status = parse_results(lines, name).expect("lines");
            assert_eq!(status.as_ref().map(describe).as_deref(), wanted);
        }
        assert!(parse_results("{", "a").is_err());
    }
}
