//! What a run waits for.

use std::sync::Arc;

use jiff::Timestamp;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::domain::timestamp_text;
use crate::domain::world_event::WaitedEvent;

/// What a run, or all of its running children, waits for: the first that applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WaitingFor {
    /// An approval of a tool call.
    Approval,
    /// A person's answer to a question.
    Input,
    /// What a person knows of a call that had begun.
    Reconcile,
    /// A client has paused the run, or one above it, and has to resume it.
    Resume,
    /// The results of tools that the client of the run executes.
    ClientTools,
    /// An event of the world outside.
    Event,
    /// The end of runs in the background.
    Agents,
    /// A batch that was submitted to a provider.
    Batch,
    /// A time.
    Sleep,
}

impl WaitingFor {
    /// In the order in which they are declared.
    pub const ALL: [Self; 9] = [
        Self::Approval,
        Self::Input,
        Self::Reconcile,
        Self::Resume,
        Self::ClientTools,
        Self::Event,
        Self::Agents,
        Self::Batch,
        Self::Sleep,
    ];

    /// Whether a person, not the run's client, has to answer something.
    pub fn is_input(self) -> bool {
        matches!(self, Self::Approval | Self::Input | Self::Reconcile)
    }

    /// Whether the record has all that ends the wait: it needs no memory meanwhile.
    pub fn may_sleep(self) -> bool {
        self.is_input() || matches!(self, Self::Event | Self::Sleep)
    }
}

/// The wait of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Wait {
    /// What the run waits for, as in `waiting_for`.
    pub reason: WaitingFor,
    /// Since when it waits.
    #[serde(serialize_with = "timestamp_text::serialize")]
    #[schemars(with = "Timestamp")]
    pub since: Timestamp,
    /// When the wait ends by itself; absent if it does not, or if that is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(serialize_with = "timestamp_text::serialize_option")]
    #[schemars(with = "Option<Timestamp>")]
    pub until: Option<Timestamp>,
    /// The event that it waits for.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub event: Option<WaitedEvent>,
    /// The id of the call whose end is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub call_id: Option<String>,
    /// That call.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub begun: Option<BegunCall>,
}

/// A call that had begun, and whose end is not known.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct BegunCall {
    /// The name of the tool.
    pub tool: String,
    /// The arguments as JSON; if they are long, the beginning of their JSON as a string.
    pub arguments: Arc<RawValue>,
    /// Whether `arguments` is only the beginning; absent if not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub truncated: bool,
    /// When the call began.
    #[serde(serialize_with = "timestamp_text::serialize")]
    #[schemars(with = "Timestamp")]
    pub began_at: Timestamp,
}

impl PartialEq for BegunCall {
    fn eq(&self, other: &Self) -> bool {
        (&self.tool, self.arguments.get(), self.began_at)
            == (&other.tool, other.arguments.get(), other.began_at)
    }
}

impl Eq for BegunCall {}

#[cfg(test)]
mod tests {
    use super::WaitingFor;

    #[test]
    fn the_list_has_the_order_of_the_enum() {
        for (index, waiting_for) in WaitingFor::ALL.into_iter().enumerate() {
            assert_eq!(waiting_for as usize, index);
        }
    }
}
