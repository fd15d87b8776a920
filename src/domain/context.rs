//! `[context]` of an agent, and what the record keeps of a conversation that was made shorter.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Serialize};

use crate::domain::agent::schema::SectionSchema;
use crate::domain::agent::settings::{Choice, Section, Setting, Visitor};

/// A summary does not fit in a lower share of the window.
const MIN_COMPACT_AT: f64 = 0.1;

/// What becomes of a conversation that outgrows its model's context window.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ContextSettings {
    /// The share of the window that a request may fill, from which the tokens kept for the reply are taken off first.
    pub compact_at: f64,
    /// What is done about a request that would be larger.
    pub strategy: ContextStrategy,
    /// Whether the tool `recall` is offered, which searches what was recorded.
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

/// What is done about a request that would fill too much of the window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "ContextStrategy")]
#[serde(rename_all = "snake_case")]
pub enum ContextStrategy {
    /// The model sums up the oldest turns.
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
    /// All by name.
    pub const ALL: [(&'static str, Self); 3] = [
        ("compact", Self::Compact),
        ("drop_tool_results", Self::DropToolResults),
        ("fail", Self::Fail),
    ];

    /// Its name in files.
    pub fn as_str(self) -> &'static str {
        Self::ALL[self as usize].0
    }
}

/// What requests leave out of a conversation, all in all. Messages are counted from 0 over everything that is recorded
/// of it, with what came before the run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Compaction {
    /// The summary stands for the messages before this one; 0 means that there is none.
    pub before: usize,
    /// The one of them that is still sent as it is: the task.
    pub task: Option<usize>,
    /// The summary.
    pub summary: String,
    /// Of the messages before this one, tool results are sent as a short notice.
    pub results_before: usize,
}

impl Compaction {
    /// The same once the first so many messages are gone.
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
