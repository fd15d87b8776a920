//! Anthropic's batch API (<https://platform.claude.com/docs/en/api/messages/batches>): one call submits the requests, and
//! one call returns all results. axed submits one request per batch.

use std::borrow::Cow;
use std::time::Duration;

use futures_util::future::BoxFuture;
use secrecy::SecretString;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::providers::batches::{
    BatchApi, ResultsError, cancelled_status, completed_status, no_reply_status, parse_body,
    parse_id, result_lines,
};
use crate::providers::http_client::ApiRequest;
use crate::providers::{
    BatchClient, BatchItem, BatchStatus, ProviderError, error_mapping, wire_json,
};

pub struct AnthropicBatches(pub BatchApi);

impl BatchClient for AnthropicBatches {
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
        struct Request<'a> {
            custom_id: &'a str,
            params: &'a RawValue,
        }
        #[derive(Serialize)]
        struct Create<'a> {
            requests: [Request<'a>; 1],
        }
        Box::pin(async move {
            let create = Create {
                requests: [Request {
                    custom_id: name,
                    params: item.json()?,
                }],
            };
            let request = ApiRequest::post("/v1/messages/batches", wire_json::serialize(&create)?);
            parse_id(&self.0.call(request, key).await?)
        })
    }

    /// Always `None`: Anthropic's API cannot search batches by name.
    fn find<'a>(
        &'a self,
        _name: &'a str,
        _key: Option<&'a SecretString>,
    ) -> BoxFuture<'a, Result<Option<String>, ProviderError>> {
        Box::pin(async { Ok(None) })
    }

    fn poll<'a>(
        &'a self,
        batch: &'a str,
        name: &'a str,
        key: Option<&'a SecretString>,
    ) -> BoxFuture<'a, Result<BatchStatus, ProviderError>> {
        #[derive(Deserialize)]
        struct BatchState<'a> {
            processing_status: Cow<'a, str>,
        }
        Box::pin(async move {
            let path = format!("/v1/messages/batches/{batch}");
            let state = self.0.call(ApiRequest::get(&path), key).await?;
            if parse_body::<BatchState<'_>>(&state)?.processing_status != "ended" {
                return Ok(BatchStatus::InProgress);
            }
            let results = format!("{path}/results");
            let parse = |lines: &str| parse_results(lines, name);
            self.0
                .read_results(&results, key, parse)
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
            let path = format!("/v1/messages/batches/{batch}/cancel");
            let request = ApiRequest::post(&path, Vec::new());
            self.0.call(request, key).await.map(drop)
        })
    }
}

fn parse_results(lines: &str, name: &str) -> Result<BatchStatus, ProviderError> {
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
    for line in result_lines(lines) {
        let ResultLine { custom_id, result } = wire_json::parse(line)?;
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
    Ok(no_reply_status())
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
                describe(&parse_results(lines, name).expect("lines")),
                wanted
            );
        }
        assert!(parse_results("[]", "a").is_err());
    }
}
