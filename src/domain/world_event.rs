//! Events of the world outside, for which runs wait.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// The longest name of an event, and the longest key.
pub const MAX_NAME: usize = 100;
pub const MAX_KEY: usize = 200;
/// The longest data of an event as JSON.
pub const MAX_DATA_BYTES: usize = 256 << 10;

/// An event, with which runs of its owner go on.
#[derive(Clone, Debug)]
pub struct WorldEvent {
    /// The name of a key; `None` without keys.
    pub owner: Option<String>,
    pub name: String,
    pub key: String,
    /// Under which it counts once.
    pub client_id: Option<String>,
    pub data: Arc<RawValue>,
}

/// An event for which a run waits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct WaitedEvent {
    /// The name of the event.
    pub event: String,
    /// Its key.
    pub key: String,
}

/// Why an event cannot have this name.
pub fn check_name(name: &str) -> Result<(), String> {
    let is_valid = |it: char| it.is_ascii_alphanumeric() || "._-:/".contains(it);
    match (1..=MAX_NAME).contains(&name.len()) && name.chars().all(is_valid) {
        true => Ok(()),
        false => Err(format!(
            "must be 1 to {MAX_NAME} letters, digits, dots, colons, slashes, - and _"
        )),
    }
}

/// Why an event cannot have this key.
pub fn check_key(key: &str) -> Result<(), String> {
    match (1..=MAX_KEY).contains(&key.chars().count()) && !key.chars().any(char::is_control) {
        true => Ok(()),
        false => Err(format!(
            "must be 1 to {MAX_KEY} characters, without control characters"
        )),
    }
}

/// What an event and a wait for it have in common. A name has no space.
pub fn wake_key(name: &str, key: &str) -> String {
    format!("{name} {key}")
}
