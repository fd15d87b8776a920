//! What a run sent in a test, in the form that recordings have.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::domain::recording::ToolRecording;

/// A run of a test.
#[derive(Clone, Debug, Default)]
pub struct ObservedRun {
    /// The version of the agent's definition.
    pub definition: String,
    pub model: String,
    pub effort: Option<String>,
    pub params: Map<String, Value>,
    pub response_format: Option<Value>,
    pub tools: Vec<ToolRecording>,
    /// Without the memory.
    pub system: String,
    pub memory: Option<String>,
    pub message: String,
    /// The results of calls of other agents, by turn and position.
    pub results: BTreeMap<(u32, usize), ObservedResult>,
    /// The user messages after replies that did not end the run, by turn.
    pub followups: BTreeMap<u32, String>,
    /// The last turn that was requested.
    pub turns: u32,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObservedResult {
    pub text: String,
    pub is_error: bool,
}
