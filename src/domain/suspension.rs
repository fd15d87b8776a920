//! Why the tree of a run is suspended.

use schemars::JsonSchema;
use serde::Serialize;

/// Why a run is suspended with its tree. It continues by itself, from its last committed step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SuspensionCause {
    /// The store could not be written or read. The run continues when the store works.
    StoreFailed,
    /// The store works, and has refused what was to be written of the run. It is tried again, ever more rarely.
    WriteRefused,
    /// What was read of the run's record is damaged. It is read again, ever more rarely.
    RecordDamaged,
}

impl SuspensionCause {
    /// What the console says.
    pub fn describe(self) -> &'static str {
        match self {
            Self::StoreFailed => "suspended until the store works",
            Self::WriteRefused => "suspended: the store refuses its record",
            Self::RecordDamaged => "suspended: its record is damaged",
        }
    }
}
