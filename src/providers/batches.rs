//! What the batch APIs of OpenAI and Anthropic share.

use std::time::Duration;

use bytes::Bytes;
use secrecy::SecretString;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::providers::http_client::base_url::BaseUrl;
use crate::providers::http_client::{ApiRequest, BodyError, HttpClient};
use crate::providers::{BatchStatus, ErrorCategory, ProviderError, wire_json};

/// Maximum length of a batch id or file id.
const MAX_ID_LEN: usize = 128;

/// The batch API of one service.
pub struct BatchApi {
    pub client: HttpClient,
    base_url: BaseUrl,
    pub max_poll_interval: Duration,
}

impl BatchApi {
    pub fn new(client: &HttpClient, base_url: &BaseUrl, max_poll_interval: Duration) -> Self {
        Self {
            client: client.clone(),
            base_url: base_url.clone(),
            max_poll_interval,
        }
    }

    pub async fn call(
        &self,
        request: ApiRequest<'_>,
        key: Option<&SecretString>,
    ) -> Result<Bytes, ProviderError> {
        self.client.call_api(&self.base_url, request, key).await
    }

    /// Downloads results of a batch that is done, and parses them.
    pub async fn read_results<T>(
        &self,
        path: &str,
        key: Option<&SecretString>,
        parse: impl FnOnce(&str) -> Result<T, ProviderError>,
    ) -> Result<T, ResultsError> {
        let Self {
            client, base_url, ..
        } = self;
        let request = ApiRequest::get(path);
        let lines = client.call_api_for_body(base_url, request, key).await;
        let lines = lines.map_err(|error| match error {
            BodyError::Failed(error) => ResultsError::Unavailable(error),
            BodyError::TooLarge(error) => ResultsError::Lost(client.reply_error(error.into())),
        })?;
        body_text(&lines)
            .and_then(parse)
            .map_err(|error| ResultsError::Unreadable(client.reply_error(error)))
    }
}

/// Why the results of a batch that is done are not known.
pub enum ResultsError {
    /// They could not be downloaded now.
    Unavailable(ProviderError),
    /// The download is not what the service promises, perhaps because of a proxy. The service may charge for the results.
    Unreadable(ProviderError),
    /// They stay out of reach, and the service may charge for them.
    Lost(ProviderError),
}

impl ResultsError {
    /// # Errors
    /// The results have to be downloaded again.
    pub fn into_status(self) -> Result<BatchStatus, ProviderError> {
        match self {
            Self::Unavailable(error) => Err(error),
            Self::Unreadable(error) => Ok(BatchStatus::Unreadable(error)),
            Self::Lost(error) => Ok(BatchStatus::Failed(error)),
        }
    }
}

/// The results of a batch: one JSON document per line.
pub fn result_lines(lines: &str) -> impl Iterator<Item = &str> {
    lines.lines().filter(|line| !line.trim().is_empty())
}

/// The status of a batch whose results do not name the request, as if the download was empty.
pub fn no_reply_status() -> BatchStatus {
    let message = "the batch has no reply to the request";
    BatchStatus::Unreadable(ProviderError {
        may_be_billed: true,
        ..ProviderError::new(ErrorCategory::Server, message)
    })
}

pub fn completed_status(status: u16, body: &RawValue) -> BatchStatus {
    BatchStatus::Completed {
        status,
        body: Bytes::copy_from_slice(body.get().as_bytes()),
    }
}

/// The status of a batch that was cancelled at the service, for example by its operator.
pub fn cancelled_status() -> BatchStatus {
    let message = "the batch was cancelled at the service";
    BatchStatus::Failed(ProviderError::new(ErrorCategory::BadRequest, message))
}

pub fn parse_id(body: &Bytes) -> Result<String, ProviderError> {
    #[derive(Deserialize)]
    struct Created {
        id: String,
    }
    check_id(parse_body::<Created>(body)?.id)
}

/// Accepts only ids that are safe as a segment of a URL path.
pub fn check_id(id: String) -> Result<String, ProviderError> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    match (1..=MAX_ID_LEN).contains(&id.len()) && id.chars().all(is_plain) {
        true => Ok(id),
        false => Err(ProviderError::new(
            ErrorCategory::Server,
            "the service sent an invalid batch id or file id",
        )),
    }
}

fn body_text(body: &Bytes) -> Result<&str, ProviderError> {
    std::str::from_utf8(body).map_err(|error| {
        let message = format!("failed to parse response: {error}");
        ProviderError::new(ErrorCategory::Server, message)
    })
}

pub fn parse_body<'a, T: Deserialize<'a>>(body: &'a Bytes) -> Result<T, ProviderError> {
    Ok(wire_json::parse(body_text(body)?)?)
}

#[cfg(test)]
mod tests {
    use super::check_id;

    #[test]
    fn ids_that_would_change_the_path_are_rejected() {
        assert!(check_id("batch_01-Ab".to_owned()).is_ok());
        for bad in ["", "../files", "a/b", "a?b", "a#b", "é", &"a".repeat(129)] {
            assert!(check_id(bad.to_owned()).is_err(), "{bad}");
        }
    }
}
