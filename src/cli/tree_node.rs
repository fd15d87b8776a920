//! A tree of runs in responses of a daemon.

use serde::Deserialize;

use crate::domain::failure::Failure;
use crate::domain::run::{RunId, Status};

/// A run in a tree, with its own usage.
#[derive(Debug, Deserialize)]
pub struct TreeNode {
    pub id: RunId,
    pub agent: String,
    /// The label that its caller gave an ad-hoc sub-agent.
    #[serde(default)]
    pub label: Option<String>,
    pub status: Status,
    pub turns: u64,
    /// Without its children.
    pub usage: UsageView,
    pub duration_ms: u64,
    pub task: Option<String>,
    pub error: Option<Failure>,
    /// In the order of the calls that started them.
    pub children: Vec<TreeNode>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub struct UsageView {
    pub input_tokens: u64,
    pub output_tokens: u64,
    pub tool_calls: u64,
}
