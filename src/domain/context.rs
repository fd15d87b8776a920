//! `[context]` of an agent, and the record of a shortened conversation.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Serialize};

use crate::domain::agent::schema::SectionSchema;
use crate::domain::agent::settings::{Choice, Section, Setting, Visitor};

/// A summary does not fit in a lower share of the window.
const MIN_COMPACT_AT: f64 = 0.1;

/// How a conversation that outgrows the model's context window is shortened.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ContextSettings {
    /// The share of the window that a request may fill. The tokens reserved for the reply are subtracted from the window first.
    pub compact_at: f64,
    /// How a larger request is shortened.
    pub strategy: ContextStrategy,
    /// Whether the agent has the tool `recall`, which searches the recorded conversation.
    #[serde(default)]
    pub recall: bool,
}

impl Default for ContextSettings {
    fn default() -> Self {
        Self {
            compact_at: 0.8,
            strategy: ContextStrategy::default(),
            recall: false,
        }
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

impl Section for ContextSettings {
    const SCHEMA: &'static str = "AgentContext";

    fn visit<V: Visitor>(&mut self, v: &mut V) {
        let Self {
            compact_at,
            strategy,
            recall,
        } = self;
        v.setting(
            "compact_at",
            Setting::Number(MIN_COMPACT_AT..=1.0, compact_at),
        );
        v.setting("strategy", Setting::Choice(strategy));
        v.setting("recall", Setting::Flag(recall));
    }
}

/// How a request that would fill too much of the window is shortened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "ContextStrategy")]
#[serde(rename_all = "snake_case")]
pub enum ContextStrategy {
    /// The model summarizes the oldest turns.
    #[default]
    Compact,
    /// The oldest tool results are replaced by a short notice.
    DropToolResults,
    /// The run fails.
    Fail,
}

impl Choice for ContextStrategy {
    const NAMES: &'static [(&'static str, Self)] = &Self::ALL;
}

impl ContextStrategy {
    pub const ALL: [(&'static str, Self); 3] = [
        ("compact", Self::Compact),
        ("drop_tool_results", Self::DropToolResults),
        ("fail", Self::Fail),
    ];

    pub fn as_str(self) -> &'static str {
        Self::ALL[self as usize].0
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

#[cfg(test)]
mod tests {
    use super::ContextStrategy;

    #[test]
    fn a_strategy_is_named_as_in_files() {
        for (name, strategy) in ContextStrategy::ALL {
            assert_eq!(strategy.as_str(), name);
            assert_eq!(serde_json::to_value(strategy).expect("JSON"), name);
        }
    }
}
