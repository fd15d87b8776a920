//! Pages of lists of the HTTP API.

use serde::Deserialize;
use serde_json::Value;

#[derive(Debug, Deserialize)]
pub struct RunPage {
    pub data: Vec<Value>,
    /// `None` on the last page.
    pub next_cursor: Option<String>,
}

/// Stored events as JSON.
#[derive(Debug, Deserialize)]
pub struct EventPage {
    pub data: Vec<Value>,
    /// The number of the last event; `None` after the last one of a run that has ended.
    pub next_after: Option<u64>,
}

/// Part of a conversation, as JSON.
#[derive(Debug, Deserialize)]
pub struct MessagePage {
    pub system: Option<String>,
    pub data: Vec<Value>,
    /// `None` on the last page.
    pub next_after: Option<u64>,
}
