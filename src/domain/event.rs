//! Entries of a tree's append-only event log. The store numbers an event (`seq`) when it commits it.

use std::sync::Arc;

use jiff::Timestamp;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::domain::context::ContextStrategy;
use crate::domain::message::ToolCall;
use crate::domain::run::{Failure, RunId};
use crate::domain::usage::Usage;

/// An event that has no number yet.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Event {
    /// The run it is about.
    pub run_id: RunId,
    /// The root of that run's tree.
    pub root_id: RunId,
    /// That run's depth.
    pub depth: u8,
    /// That run's agent.
    pub agent: Arc<str>,
    /// When it happened.
    pub time: Timestamp,
    #[serde(flatten)]
    pub kind: EventKind,
}

/// The type and the data of an event.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(tag = "type")]
pub enum EventKind {
    #[serde(rename = "run.queued")]
    RunQueued {
        #[serde(skip_serializing_if = "Option::is_none")]
        parent_id: Option<RunId>,
        #[serde(skip_serializing_if = "Option::is_none")]
        tool_call_id: Option<String>,
    },
    #[serde(rename = "run.started")]
    RunStarted {
        model: String,
        agent_version: String,
    },
    #[serde(rename = "run.resumed")]
    RunResumed { attempt: u32 },
    #[serde(rename = "run.cancelling")]
    RunCancelling { reason: String },
    #[serde(rename = "run.completed")]
    RunCompleted {
        turns: u32,
        characters: usize,
        /// The final text; if `truncated`, its first 16 KiB.
        content: String,
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        truncated: bool,
    },
    #[serde(rename = "run.failed")]
    RunFailed { error: Failure },
    #[serde(rename = "run.cancelled")]
    RunCancelled { reason: String },
    #[serde(rename = "turn.started")]
    TurnStarted {
        turn: u32,
        messages: usize,
        results: usize,
    },
    #[serde(rename = "turn.completed")]
    TurnCompleted {
        turn: u32,
        model: String,
        stop_reason: Option<String>,
        input_tokens: u64,
        output_tokens: u64,
        cache_read_tokens: u64,
        cache_write_tokens: u64,
        #[serde(skip_serializing_if = "Option::is_none")]
        reasoning_tokens: Option<u64>,
        tool_calls: Vec<CalledTool>,
    },
    #[serde(rename = "tool.started")]
    ToolStarted {
        turn: u32,
        tool_call_id: String,
        tool: String,
        /// What the model wrote; if `truncated`, the first 2 KiB of its JSON as a string.
        arguments: Arc<RawValue>,
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        truncated: bool,
    },
    #[serde(rename = "tool.completed")]
    ToolCompleted {
        turn: u32,
        tool_call_id: String,
        tool: String,
        duration_ms: u64,
        is_error: bool,
        /// What the model gets; if `truncated`, its first 2 KiB.
        result: String,
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        truncated: bool,
    },
    #[serde(rename = "agent.called")]
    AgentCalled {
        tool_call_id: String,
        child_id: RunId,
        child_agent: String,
        child_depth: u8,
        task: String,
    },
    #[serde(rename = "agent.returned")]
    AgentReturned {
        tool_call_id: String,
        child_id: RunId,
        child_agent: String,
        duration_ms: u64,
        #[serde(skip_serializing_if = "Option::is_none")]
        characters: Option<usize>,
        #[serde(skip_serializing_if = "Option::is_none")]
        error: Option<String>,
        input_tokens: u64,
        output_tokens: u64,
        tool_calls: u64,
    },
    #[serde(rename = "approval.requested")]
    ApprovalRequested {
        turn: u32,
        tool_call_id: String,
        tool: String,
        arguments: Arc<RawValue>,
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        truncated: bool,
        #[serde(skip_serializing_if = "Option::is_none")]
        deadline: Option<Timestamp>,
    },
    #[serde(rename = "approval.decided")]
    ApprovalDecided {
        tool_call_id: String,
        decision: Decision,
        #[serde(skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
        #[serde(skip_serializing_if = "Option::is_none")]
        by: Option<String>,
    },
    #[serde(rename = "retry.scheduled")]
    RetryScheduled {
        turn: u32,
        model: String,
        attempt: u32,
        wait_ms: u64,
        reason: String,
    },
    #[serde(rename = "batch.submitted")]
    BatchSubmitted {
        turn: u32,
        model: String,
        batch_id: String,
    },
    #[serde(rename = "memory.warning")]
    MemoryWarning { message: String },
    #[serde(rename = "tools.warning")]
    ToolsWarning { message: String },
    #[serde(rename = "loop.warning")]
    LoopWarning {
        turn: u32,
        repeats: u32,
        message: String,
    },
    #[serde(rename = "model.warning")]
    ModelWarning { turn: u32, message: String },
    #[serde(rename = "context.compacted")]
    ContextCompacted {
        turn: u32,
        strategy: ContextStrategy,
        from_turn: u32,
        to_turn: u32,
        messages: usize,
        results: usize,
        tokens_before: u64,
        tokens_after: u64,
        #[serde(skip_serializing_if = "Option::is_none")]
        model: Option<String>,
        input_tokens: u64,
        output_tokens: u64,
    },
    #[serde(rename = "reasoning.started")]
    ReasoningStarted { turn: u32 },
    #[serde(rename = "reasoning.delta")]
    ReasoningDelta { turn: u32, text: String },
    #[serde(rename = "text.delta")]
    TextDelta { turn: u32, text: String },
    #[serde(rename = "text.withdrawn")]
    TextWithdrawn { turn: u32, reason: String },
}

/// The outcome of a request for approval.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    /// The call is executed.
    Approved,
    /// A person said no.
    Denied,
    /// Nobody decided in time.
    TimedOut,
}

/// A tool call of a reply.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct CalledTool {
    pub id: String,
    pub name: String,
}

impl From<&ToolCall> for CalledTool {
    fn from(call: &ToolCall) -> Self {
        Self {
            id: call.id.clone(),
            name: call.name.clone(),
        }
    }
}

impl EventKind {
    /// The `type` in JSON. [`STORED_EVENT_NAMES`] lists those of numbered events.
    pub fn name(&self) -> &'static str {
        match self {
            Self::RunQueued { .. } => "run.queued",
            Self::RunStarted { .. } => "run.started",
            Self::RunResumed { .. } => "run.resumed",
            Self::RunCancelling { .. } => "run.cancelling",
            Self::RunCompleted { .. } => "run.completed",
            Self::RunFailed { .. } => "run.failed",
            Self::RunCancelled { .. } => "run.cancelled",
            Self::TurnStarted { .. } => "turn.started",
            Self::TurnCompleted { .. } => "turn.completed",
            Self::ToolStarted { .. } => "tool.started",
            Self::ToolCompleted { .. } => "tool.completed",
            Self::AgentCalled { .. } => "agent.called",
            Self::AgentReturned { .. } => "agent.returned",
            Self::ApprovalRequested { .. } => "approval.requested",
            Self::ApprovalDecided { .. } => "approval.decided",
            Self::RetryScheduled { .. } => "retry.scheduled",
            Self::BatchSubmitted { .. } => "batch.submitted",
            Self::MemoryWarning { .. } => "memory.warning",
            Self::ToolsWarning { .. } => "tools.warning",
            Self::LoopWarning { .. } => "loop.warning",
            Self::ModelWarning { .. } => "model.warning",
            Self::ContextCompacted { .. } => "context.compacted",
            Self::ReasoningStarted { .. } => "reasoning.started",
            Self::ReasoningDelta { .. } => "reasoning.delta",
            Self::TextDelta { .. } => "text.delta",
            Self::TextWithdrawn { .. } => "text.withdrawn",
        }
    }
}

/// The names of all numbered events, in the order of [`EventKind`].
pub const STORED_EVENT_NAMES: [&str; 22] = [
    "run.queued",
    "run.started",
    "run.resumed",
    "run.cancelling",
    "run.completed",
    "run.failed",
    "run.cancelled",
    "turn.started",
    "turn.completed",
    "tool.started",
    "tool.completed",
    "agent.called",
    "agent.returned",
    "approval.requested",
    "approval.decided",
    "retry.scheduled",
    "batch.submitted",
    "memory.warning",
    "tools.warning",
    "loop.warning",
    "model.warning",
    "context.compacted",
];

/// Whether an event with this name is the last of a run.
pub fn is_terminal(name: &str) -> bool {
    matches!(name, "run.completed" | "run.failed" | "run.cancelled")
}

/// A stored event, as subscribers receive it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredEvent {
    /// Counts from 1 without gaps over the tree.
    pub seq: u64,
    /// The run it is about.
    pub run_id: RunId,
    /// See [`EventKind::name`].
    pub name: String,
    /// The whole `data` object as JSON text, including the number.
    pub data: String,
}

/// Adds the number as the first member of an event's JSON.
pub fn with_seq(seq: u64, json: &str) -> String {
    format!("{{\"seq\":{seq},{}", json.strip_prefix('{').unwrap_or(json))
}

/// The input tokens, output tokens and tool calls for `agent.returned`, which counts the whole subtree.
pub fn usage_totals(usage: &Usage) -> (u64, u64, u64) {
    (usage.tokens.input, usage.tokens.output, usage.tool_calls)
}

#[cfg(test)]
mod tests {
    use super::{EventKind, STORED_EVENT_NAMES};

    #[test]
    fn every_event_with_a_number_has_its_name_in_the_list() {
        let schema = serde_json::to_value(schemars::schema_for!(EventKind)).expect("JSON");
        let kinds = schema["oneOf"].as_array().expect("kinds");
        let names = kinds
            .iter()
            .map(|kind| &kind["properties"]["type"]["const"]);
        let names: Vec<&str> = names.map(|name| name.as_str().expect("a name")).collect();
        let stored = names
            .into_iter()
            .filter(|name| !name.starts_with("text.") && !name.starts_with("reasoning."));
        assert_eq!(stored.collect::<Vec<_>>(), STORED_EVENT_NAMES);
    }
}
