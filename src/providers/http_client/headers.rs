//! The headers of requests to a provider: its key, the configured ones and the client's own.

use http::header::{
    AUTHORIZATION, CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, HOST, TRANSFER_ENCODING, USER_AGENT,
};
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use secrecy::{ExposeSecret, SecretString};
use url::Url;

use crate::config;
use crate::domain::request_head::{REDACTED, RequestHead};

/// Anthropic's header for the API key.
const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");
/// The headers that carry an API key. A request with the client's own key must not send any of the operator's.
pub const KEY_HEADERS: [HeaderName; 4] = [
    AUTHORIZATION,
    X_API_KEY,
    HeaderName::from_static("api-key"),
    HeaderName::from_static("x-goog-api-key"),
];

/// Why a configured header is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    #[error("api_key has characters that a header cannot hold")]
    ApiKey,
    #[error("headers.{name} is not a valid header name")]
    Name { name: String },
    #[error("remove headers.{name}: the HTTP client sets it")]
    Reserved { name: String },
    #[error("headers.{name} has characters that a header cannot hold")]
    Value { name: String },
    #[error("the {name} header has characters that a header cannot hold")]
    BuiltIn { name: &'static str },
}

/// The header in which a service takes the API key.
#[derive(Clone, Copy, Debug)]
pub enum KeyHeader {
    /// `x-api-key`
    ApiKey,
    /// `authorization: Bearer …`
    Bearer,
}

impl KeyHeader {
    pub fn name(self) -> HeaderName {
        match self {
            Self::ApiKey => X_API_KEY,
            Self::Bearer => AUTHORIZATION,
        }
    }

    /// `None` if the key has characters that a header cannot hold.
    pub fn value(self, key: &SecretString) -> Option<HeaderValue> {
        let key = key.expose_secret().trim();
        match self {
            Self::ApiKey => sensitive_value(key),
            Self::Bearer => sensitive_value(&format!("Bearer {key}")),
        }
    }
}

pub fn default_headers(
    config: &config::Provider,
    key_header: KeyHeader,
) -> Result<HeaderMap, HeaderError> {
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(
        USER_AGENT,
        HeaderValue::from_static(concat!("axed/", env!("CARGO_PKG_VERSION"))),
    );
    if let Some(key) = &config.api_key {
        let value = key_header.value(key).ok_or(HeaderError::ApiKey)?;
        headers.insert(key_header.name(), value);
    }
    for (name, value) in &config.headers {
        let name = name.clone();
        let Ok(header) = HeaderName::from_bytes(name.as_bytes()) else {
            return Err(HeaderError::Name { name });
        };
        if [CONNECTION, CONTENT_LENGTH, HOST, TRANSFER_ENCODING].contains(&header) {
            return Err(HeaderError::Reserved { name });
        }
        let value = sensitive_value(value.expose_secret()).ok_or(HeaderError::Value { name })?;
        headers.insert(header, value);
    }
    Ok(headers)
}

/// The request as it may be recorded: without the values of secret headers, and without secrets in the URL.
pub fn recorded_head(url: &Url, headers: &HeaderMap, secrets: &[SecretString]) -> RequestHead {
    let recorded = headers.iter().map(|(name, value)| {
        let value = match (value.is_sensitive(), value.to_str()) {
            (false, Ok(value)) => value.to_owned(),
            // So that a reader sees what the service expects.
            (true, Ok(value)) if name == AUTHORIZATION && value.starts_with("Bearer ") => {
                format!("Bearer {REDACTED}")
            }
            _ => REDACTED.to_owned(),
        };
        (name.to_string(), value)
    });
    RequestHead {
        method: Some(Method::POST.to_string()),
        url: Some(recorded_url(url, secrets)),
        headers: recorded.collect(),
        key_variable: None,
    }
}

fn recorded_url(url: &Url, secrets: &[SecretString]) -> String {
    const SECRET_NAMES: [&str; 6] = ["key", "token", "secret", "sig", "password", "auth"];
    let mut recorded = url.clone();
    if url.query().is_some() {
        let pairs = url.query_pairs().map(|(name, value)| {
            let lower = name.to_ascii_lowercase();
            let is_secret = SECRET_NAMES.iter().any(|secret| lower.contains(secret));
            let value = if is_secret { REDACTED.into() } else { value };
            (name, value)
        });
        recorded.query_pairs_mut().clear().extend_pairs(pairs);
    }
    let mut text = String::from(recorded);
    for secret in secrets {
        text = text.replace(secret.expose_secret().trim(), REDACTED);
    }
    text
}

pub fn sensitive_value(text: &str) -> Option<HeaderValue> {
    let mut value = HeaderValue::from_str(text.trim()).ok()?;
    value.set_sensitive(true);
    Some(value)
}
