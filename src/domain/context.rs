//! `[context]` of an agent, and the record of a shortened conversation.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Serialize};

use crate::settings::choice::choice;
use crate::settings::kinds::{Flag, Number, OneOf};
use crate::settings::schema::SectionSchema;
use crate::settings::section::section;

/// A summary does not fit in a lower share of the window.
const MIN_COMPACT_AT: f64 = 0.1;

section! {
    /// `[context]`: how a conversation that outgrows the model's window is shortened, if the window is known (`axed models`).
    #[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct ContextSettings in "AgentContext" {
        /// The share of the model's window that a request may fill before it is shortened. The tokens reserved for the reply are
        /// subtracted from the window first.
        pub compact_at: f64 = 0.8, Number(MIN_COMPACT_AT..=1.0);
        /// How a larger request is shortened: compact: the model summarizes the oldest turns; drop_tool_results: the oldest results
        /// are left out; fail: the run fails.
        pub strategy: ContextStrategy, OneOf;
        /// Whether the agent has the tool `recall`, which searches the recorded conversation.
        pub recall: bool, Flag;
    }
}

impl JsonSchema for ContextSettings {
    fn schema_name() -> Cow<'static, str> {
        SectionSchema::<Self>::schema_name()
    }

    fn schema_id() -> Cow<'static, str> {
        SectionSchema::<Self>::schema_id()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        SectionSchema::<Self>::json_schema(generator)
    }
}

choice! {
    /// How a request that would fill too much of the window is shortened.
    #[derive(Default)]
    #[schemars(rename = "ContextStrategy")]
    pub enum ContextStrategy {
        /// The model summarizes the oldest turns.
        #[default]
        Compact = "compact",
        /// The oldest tool results are replaced by a short notice.
        DropToolResults = "drop_tool_results",
        /// The run fails.
        Fail = "fail",
    }
}

/// The part of a conversation that requests omit. Messages are counted from 0 over the whole recorded conversation,
/// including messages from before the run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Compaction {
    /// The summary replaces the messages before this one; 0 means that there is no summary.
    pub before: usize,
    /// The message among them that is still sent unchanged: the task.
    pub task: Option<usize>,
    pub summary: String,
    /// The tool results before this message are replaced by a short notice.
    pub results_before: usize,
}

impl Compaction {
    /// The same after the first `count` messages are removed.
    pub fn without_first(self, count: usize) -> Self {
        let before = self.before.saturating_sub(count);
        let task = self.task.and_then(|task| task.checked_sub(count));
        Self {
            before,
            task: task.filter(|task| *task < before),
            results_before: self.results_before.saturating_sub(count),
            ..self
        }
    }
}
