//! The parts of a run that these commands show.

use anyhow::Context;
use jiff::Timestamp;
use serde::Deserialize;
use serde_json::Value;

use crate::domain::content::Content;
use crate::domain::failure::Failure;
use crate::domain::run::{RunId, Status};

#[derive(Deserialize)]
pub struct RunDetails {
    pub id: RunId,
    pub agent: String,
    pub status: Status,
    pub input: Content,
    pub content: Option<String>,
    pub partial_content: Option<String>,
    pub model: String,
    pub turns: u64,
    pub duration_ms: u64,
    pub created_at: Timestamp,
    pub parent_id: Option<RunId>,
    pub session: Option<String>,
    #[serde(default)]
    pub labels: serde_json::Map<String, Value>,
    pub cancel_reason: Option<String>,
    pub error: Option<Failure>,
    pub tree: TreeUsage,
}

/// Usage of a run and its descendants.
#[derive(Deserialize)]
pub struct TreeUsage {
    pub runs: u64,
    pub input_tokens: u64,
    pub output_tokens: u64,
    pub tool_calls: u64,
    pub cost_usd: Option<f64>,
}

pub const UNKNOWN_RUN_FORMAT: &str = "this version of axed cannot read the daemon's response";

pub fn parse_run(run: Value) -> anyhow::Result<RunDetails> {
    serde_json::from_value(run).context(UNKNOWN_RUN_FORMAT)
}
