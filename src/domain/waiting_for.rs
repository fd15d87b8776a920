//! What a run waits for.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What a run, or all of its running children, waits for: the first that applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WaitingFor {
    /// An approval of a tool call.
    Approval,
    /// A client has paused the run, or one above it, and has to resume it.
    Resume,
    /// The results of tools that the client of the run executes.
    ClientTools,
    /// A batch that was submitted to a provider.
    Batch,
}
