//! What is read of stored events to continue, fork or record their run.

use jiff::Timestamp;
use serde::Deserialize;
use serde::de::Error as _;
use serde_json::{Map, Value};

use crate::domain::approval::ArgumentsHash;
use crate::domain::event::{Decision, ResumeCause, STORED_EVENT_NAMES};
use crate::domain::run::RunId;

#[derive(Debug, Deserialize)]
pub struct RecordedEvent {
    pub run_id: RunId,
    pub time: Timestamp,
    #[serde(flatten)]
    pub kind: RecordedKind,
}

/// The fields are those of [`EventKind`](crate::domain::event::EventKind).
#[derive(Debug, Deserialize)]
#[serde(tag = "type")]
pub enum RecordedKind {
    #[serde(rename = "run.queued")]
    RunQueued {
        #[serde(default)]
        request: Map<String, Value>,
    },
    #[serde(rename = "run.resumed")]
    RunResumed { cause: ResumeCause },
    #[serde(rename = "run.paused")]
    RunPaused,
    #[serde(rename = "turn.started")]
    TurnStarted { turn: u32 },
    #[serde(rename = "turn.completed")]
    TurnCompleted(RecordedReply),
    #[serde(rename = "tool.started")]
    ToolStarted { tool_call_id: String },
    #[serde(rename = "tool.completed")]
    ToolCompleted { tool_call_id: String },
    #[serde(rename = "agent.called")]
    AgentCalled {
        tool_call_id: String,
        child_id: RunId,
    },
    #[serde(rename = "agent.returned")]
    AgentReturned { tool_call_id: String },
    #[serde(rename = "approval.requested")]
    ApprovalRequested {
        tool_call_id: String,
        arguments_hash: ArgumentsHash,
    },
    #[serde(rename = "approval.decided")]
    ApprovalDecided {
        tool_call_id: String,
        decision: Decision,
        reason: Option<String>,
        by: Option<String>,
    },
    #[serde(rename = "batch.submitted")]
    BatchSubmitted {
        turn: u32,
        model: String,
        batch_id: String,
    },
    #[serde(rename = "context.compacted")]
    ContextCompacted,
    #[serde(other)]
    Other,
}

#[derive(Debug, Deserialize)]
pub struct RecordedReply {
    pub turn: u32,
    pub model: String,
    pub stop_reason: Option<String>,
    pub input_tokens: u64,
    pub output_tokens: u64,
    pub cache_read_tokens: u64,
    pub cache_write_tokens: u64,
    #[serde(default)]
    pub reasoning_tokens: u64,
}

/// Reads an event with this name from its JSON.
///
/// # Errors
/// It is not what was written.
pub fn parse(name: &str, json: &str) -> serde_json::Result<RecordedEvent> {
    if !STORED_EVENT_NAMES.contains(&name) {
        return Err(serde_json::Error::custom("there is no such event"));
    }
    serde_json::from_str(json)
}
