//! What went wrong in a run without failing it.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::domain::message::shorten;
use crate::domain::terminal_text::sanitize_line;

/// Most characters of a message.
const MAX_MESSAGE_CHARS: usize = 2_000;

/// What kind of thing went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WarningCode {
    /// An agent in `sub_agents` does not exist.
    SubAgentNotFound,
    /// A sub-agent could not be started, because its file is invalid or its provider is not available.
    SubAgentUnavailable,
    /// An MCP server did not start or did not list its tools.
    McpServerUnavailable,
    /// An MCP server does not have a tool that the agent's file selects, or a tool of it is left out.
    McpToolMissing,
    /// A tool in the agent's file is not offered to the model.
    ToolNotOffered,
    /// A file that matches a glob in `files` is not in the prompt.
    ContextFileLeftOut,
    /// The agent's memory could not be read, or does not fit; it or its oldest entries are not in the prompt.
    MemoryNotRead,
    /// The run could not be added to the agent's memory.
    MemoryNotWritten,
    /// The agent's memory has reached `max_entries`.
    MemoryFull,
    /// The model does not take the effort: another one was sent, or none.
    EffortChanged,
    /// The model does not take a parameter: it was left out.
    ParamDropped,
    /// The model is not offered with the service tier: the default was used.
    ServiceChanged,
    /// The model does not take a kind of attachment: a text replaced it.
    AttachmentReplaced,
    /// The model's maker stops serving it soon, or has stopped.
    ModelEnds,
    /// A fallback model replied.
    FallbackUsed,
    /// The service has read only a part of the prompt: the rest was too long for the model's context.
    PromptCut,
    /// The price of a model is not known, so that its requests do not count against a budget in money.
    PriceUnknown,
    /// The conversation could not be summarized: its oldest tool results or the summary of a sub-agent were left out instead.
    NotSummarized,
    /// The model repeated the same calls with the same results.
    CallsRepeated,
    /// A reply reached its token limit before the arguments of a tool call were complete: the call was not performed.
    CallCut,
    /// An agent made up the result of a call that the record of a backtest does not have.
    ResultMadeUp,
    /// No node has the labels that the run needs: it waits for one.
    NoNode,
    /// The run ended before it read messages that were added to it.
    MessageUnread,
    /// There were more warnings; the log has them.
    MoreWarnings,
}

/// As in JSON.
impl fmt::Display for WarningCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// A warning that is not about a run yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    pub code: WarningCode,
    /// One line of safe characters and of a bounded length.
    pub message: String,
}

impl Warning {
    pub fn new(code: WarningCode, message: &str) -> Self {
        Self {
            code,
            message: sanitize_line(&shorten(message, MAX_MESSAGE_CHARS)),
        }
    }

    /// The warning in the record of a run. `turn` is `None` before the first turn.
    pub fn in_turn(self, turn: Option<u32>) -> RunWarning {
        RunWarning {
            code: self.code,
            message: self.message,
            turn,
        }
    }
}

/// What went wrong in a run without failing it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Warning")]
pub struct RunWarning {
    /// What kind of thing went wrong.
    pub code: WarningCode,
    /// What went wrong, for a person.
    pub message: String,
    /// The turn in which it went wrong; null before the first turn.
    pub turn: Option<u32>,
}
