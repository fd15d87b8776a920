//! A recording: what the models of a tree of runs were sent and what came back, and what a test of it expects. Only data;
//! `engine/recording` writes and reads its file.

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use crate::domain::agent::client_additions::ToolChoice;
use crate::domain::event::Decision;
use crate::domain::expect::Expect;
use crate::domain::usage::TokenUsage;

/// The version of the file format.
pub const VERSION: u32 = 1;
/// The largest recording that is written or read, in bytes.
pub const MAX_BYTES: usize = 16 << 20;

/// A whole tree.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recording {
    pub version: u32,
    /// The agent of the root run.
    pub agent: String,
    /// The input of the root run.
    #[serde(default)]
    pub input: String,
    /// Regular expressions of texts that differ each time, such as times and ids.
    #[serde(default)]
    pub ignore: Vec<String>,
    /// What the request set besides the input, as in the body of `POST /agents/{name}/runs`; and `client`, a
    /// [`ClientRecording`].
    #[serde(default, deserialize_with = "request_fields")]
    pub request: Map<String, Value>,
    #[serde(default)]
    pub expect: Expect,
    /// The root first, then its descendants in the order of their calls.
    pub runs: Vec<RunRecording>,
    #[serde(default)]
    pub mcp: Vec<McpRecording>,
    #[serde(default)]
    pub tools: Vec<ToolRecording>,
}

impl Recording {
    /// The tool with this id, of a server or not.
    pub fn tool(&self, id: &str) -> Option<&ToolRecording> {
        let of_servers = self.mcp.iter().flat_map(|server| &server.tools);
        let mut tools = self.tools.iter().chain(of_servers);
        tools.find(|tool| tool.id == id)
    }
}

/// What a client of another protocol added to the agent of the root run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ClientRecording {
    /// Appended to the prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instructions: Option<String>,
    /// The ids of the tools that the client executed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tools: Vec<String>,
    /// What the first reply has to call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_choice: Option<ToolChoice>,
}

/// A run of the tree.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunRecording {
    /// See [`crate::domain::run_path`].
    pub path: String,
    pub agent: String,
    /// The version of the agent's definition.
    #[serde(default)]
    pub definition: String,
    /// `provider/model`.
    pub model: String,
    #[serde(default)]
    pub effort: Option<String>,
    /// Without `effort` and `response_format`.
    #[serde(default, deserialize_with = "json_table")]
    pub params: Map<String, Value>,
    #[serde(default, deserialize_with = "optional_json")]
    pub response_format: Option<Value>,
    /// The ids of the offered tools.
    #[serde(default)]
    pub tools: Vec<String>,
    /// The system prompt without the agent's memory.
    #[serde(default)]
    pub system: String,
    /// The agent's memory in the prompt.
    #[serde(default)]
    pub memory: Option<String>,
    /// The messages before the run.
    #[serde(default)]
    pub history: Vec<HistoryMessage>,
    /// What requests omit of the history.
    #[serde(default)]
    pub compaction: Option<CompactionRecording>,
    /// The user message.
    #[serde(default)]
    pub message: String,
    #[serde(default)]
    pub turns: Vec<TurnRecording>,
    #[serde(default)]
    pub results: Vec<ResultRecording>,
    /// Why the run has no further reply.
    #[serde(default)]
    pub error: Option<ErrorRecording>,
    /// The reason for which it was cancelled, and has no further reply.
    #[serde(default)]
    pub cancelled: Option<String>,
}

impl RunRecording {
    pub fn turn(&self, number: u32) -> Option<&TurnRecording> {
        self.turns.iter().find(|turn| turn.turn == number)
    }

    /// The result of the call at this position, from 1.
    pub fn result(&self, turn: u32, position: usize) -> Option<&ResultRecording> {
        let mut results = self.results.iter();
        results.find(|result| result.turn == turn && result.position == position)
    }

    /// Whether the run was cancelled after the reply of this turn.
    pub fn is_cancelled_in(&self, number: u32) -> bool {
        let last = self.turns.last();
        self.cancelled.is_some() && last.is_some_and(|turn| turn.turn == number)
    }

    /// The messages that were sent to the run and that the request of this turn is the first to have.
    pub fn added(&self, number: u32) -> &[String] {
        match (self.turn(number), &self.error) {
            (Some(turn), _) => &turn.added,
            (None, Some(error)) if number as usize == self.turns.len() + 1 => &error.added,
            (None, _) => &[],
        }
    }
}

/// A message from before the run.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HistoryMessage {
    pub role: HistoryRole,
    #[serde(default)]
    pub content: String,
    /// The calls of a reply.
    #[serde(default)]
    pub calls: Vec<CallRecording>,
    /// The results of the calls before.
    #[serde(default)]
    pub results: Vec<HistoryResult>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HistoryRole {
    #[default]
    User,
    Assistant,
    Tool,
}

impl HistoryRole {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HistoryResult {
    /// The id of the call.
    pub call: String,
    pub text: String,
    #[serde(default)]
    pub is_error: bool,
}

/// What requests omit; see [`crate::domain::context::Compaction`].
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CompactionRecording {
    #[serde(default)]
    pub before: usize,
    #[serde(default)]
    pub task: Option<usize>,
    #[serde(default)]
    pub results_before: usize,
    #[serde(default)]
    pub summary: String,
}

/// A reply.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TurnRecording {
    /// Counts from 1.
    pub turn: u32,
    /// Messages that were sent to the run and that the request of this turn is the first to have.
    #[serde(default)]
    pub added: Vec<String>,
    #[serde(default)]
    pub reply: String,
    #[serde(default)]
    pub calls: Vec<CallRecording>,
    /// The model that the provider reported, if it is not the requested one.
    #[serde(default)]
    pub model: Option<String>,
    #[serde(default)]
    pub stop_reason: Option<String>,
    /// Unset if the provider reported none.
    #[serde(default)]
    pub usage: Option<UsageRecording>,
    /// The message to the model that follows a reply without calls that is not the last one.
    #[serde(default)]
    pub followup: Option<String>,
    /// What later requests omit.
    #[serde(default)]
    pub compaction: Option<CompactionRecording>,
    #[serde(default)]
    pub outcome: OutcomeRecording,
}

/// Whether a reply is usable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OutcomeRecording {
    #[default]
    Complete,
    /// The limit of tokens came before any text or call.
    Truncated,
    Refused,
}

impl OutcomeRecording {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::Truncated => "truncated",
            Self::Refused => "refused",
        }
    }
}

/// A tool call.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CallRecording {
    pub id: String,
    pub tool: String,
    /// A table, or JSON as a text.
    #[serde(default)]
    pub arguments: Value,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct UsageRecording {
    pub input: u64,
    pub output: u64,
    pub cache_read: u64,
    pub cache_write: u64,
    pub reasoning: u64,
}

impl From<TokenUsage> for UsageRecording {
    fn from(tokens: TokenUsage) -> Self {
        Self {
            input: tokens.input,
            output: tokens.output,
            cache_read: tokens.cache_read,
            cache_write: tokens.cache_write,
            reasoning: tokens.reasoning,
        }
    }
}

impl From<UsageRecording> for TokenUsage {
    fn from(usage: UsageRecording) -> Self {
        Self {
            input: usage.input,
            output: usage.output,
            cache_read: usage.cache_read,
            cache_write: usage.cache_write,
            reasoning: usage.reasoning,
        }
    }
}

/// The result of a tool call.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResultRecording {
    /// The turn whose reply made the call.
    pub turn: u32,
    /// The position of the call in that reply, from 1.
    pub position: usize,
    pub tool: String,
    #[serde(default)]
    pub text: String,
    #[serde(default)]
    pub is_error: bool,
    /// The decision of a person on the call.
    #[serde(default)]
    pub decision: Option<Decision>,
    /// The arguments that a person approved instead of the model's: a table, or JSON as a text.
    #[serde(default)]
    pub arguments: Option<Value>,
    /// Whether a fork took the result of the called agent over: it has no run in the recording.
    #[serde(default)]
    pub reused: bool,
}

/// The failure of a run whose provider gave no reply.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ErrorRecording {
    /// `auth`, `bad_request`, `rate_limit`, `overloaded`, `server` or `timeout`.
    pub category: String,
    pub message: String,
    /// Messages that were sent to the run and that the request without a reply was the first to have.
    #[serde(default)]
    pub added: Vec<String>,
}

/// An MCP server and the tools that it listed.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct McpRecording {
    pub server: String,
    #[serde(default)]
    pub tools: Vec<ToolRecording>,
}

/// A tool as the model was offered it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToolRecording {
    /// Identifies it among the tools of the recording: its name, or its name and a number if runs were offered several
    /// with this name.
    pub id: String,
    #[serde(default)]
    pub description: String,
    /// The JSON Schema of its arguments, as JSON.
    #[serde(default)]
    pub parameters: String,
}

impl ToolRecording {
    /// The name that the model uses.
    pub fn name(&self) -> &str {
        self.id.split_once('#').map_or(&self.id, |(name, _)| name)
    }
}

/// The arguments of a call as JSON text.
pub fn arguments_text(arguments: &Value) -> String {
    match arguments {
        Value::Null => "{}".to_owned(),
        Value::String(json) => json.clone(),
        table => table.to_string(),
    }
}

/// A table, or its JSON as a text.
fn json_table<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Map<String, Value>, D::Error> {
    match from_json_text(Value::deserialize(deserializer)?) {
        Value::Object(fields) => Ok(fields),
        _ => Err(D::Error::custom("expected a table, or its JSON as a text")),
    }
}

fn optional_json<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(deserializer).map(|value| Some(from_json_text(value)))
}

/// Of the fields, only the tables may be JSON as a text: another field can have a text that looks like it.
fn request_fields<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Map<String, Value>, D::Error> {
    let mut fields: Map<String, Value> = Map::deserialize(deserializer)?;
    for name in ["params", "budget", "client"] {
        if let Some(value) = fields.get_mut(name) {
            *value = from_json_text(value.take());
        }
    }
    Ok(fields)
}

/// The table that a text is the JSON of; any other value as it is. A table that TOML cannot express is written as such a text.
fn from_json_text(value: Value) -> Value {
    let text = value.as_str();
    let fields: Option<Map<String, Value>> = text.and_then(|it| serde_json::from_str(it).ok());
    fields.map_or(value, Value::Object)
}
