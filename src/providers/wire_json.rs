//! Reads and writes the JSON of providers.

use serde::{Deserialize, Serialize};

use crate::domain::json_buffer::JsonBuffer;
use crate::providers::{ErrorCategory, ProviderError};
use crate::providers::{error_mapping, lenient_json};

/// As much as a short request takes.
const USUAL_BYTES: usize = 1024;

/// The JSON is malformed, or does not have the expected fields.
#[derive(Debug, thiserror::Error)]
#[error("failed to parse response: {0}")]
pub struct UnreadableJson(serde_json::Error);

impl From<UnreadableJson> for ProviderError {
    fn from(error: UnreadableJson) -> Self {
        // It quotes what the service has sent instead.
        let message = error_mapping::sanitize_message(&error.to_string());
        Self::new(ErrorCategory::Server, message.unwrap_or_default())
    }
}

/// Parses what a service sent. Values of other types than expected are read where their meaning is clear.
pub fn parse<'a, T: Deserialize<'a>>(text: &'a str) -> Result<T, UnreadableJson> {
    match serde_json::from_str(text) {
        Err(error) if error.is_data() => lenient_json::parse(text).map_err(UnreadableJson),
        parsed => parsed.map_err(UnreadableJson),
    }
}

pub fn serialize(body: &impl Serialize) -> Result<Vec<u8>, ProviderError> {
    JsonBuffer::json(body, USUAL_BYTES).map_err(|error| {
        let message = format!("the request cannot be written as JSON: {error}");
        ProviderError::new(ErrorCategory::BadRequest, message)
    })
}
