//! Where a request to a provider was sent, without secrets.

use serde::{Deserialize, Serialize};

/// Replaces what must not be recorded.
pub const REDACTED: &str = "[redacted]";

/// The method, the URL and the headers of a request. Recorded with short names, because many requests have one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestHead {
    /// `None` if the provider is not reached over HTTP.
    #[serde(rename = "m", default, skip_serializing_if = "Option::is_none")]
    pub method: Option<String>,
    #[serde(rename = "u", default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// Names and values. [`REDACTED`] replaces what is secret in a value.
    #[serde(rename = "h", default, skip_serializing_if = "Vec::is_empty")]
    pub headers: Vec<(String, String)>,
    /// The environment variable that the provider's key is read from.
    #[serde(rename = "k", default, skip_serializing_if = "Option::is_none")]
    pub key_variable: Option<String>,
}
