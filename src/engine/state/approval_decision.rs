//! The decision on a tool call that needed approval.

use serde::Deserialize;

use crate::domain::event::{Decision, EventKind};

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct ApprovalDecision {
    pub decision: Decision,
    /// The reason for the model.
    pub reason: Option<String>,
    /// The name of the deciding key; `None` without keys.
    pub by: Option<String>,
}

impl ApprovalDecision {
    pub fn timed_out() -> Self {
        Self {
            decision: Decision::TimedOut,
            reason: None,
            by: None,
        }
    }

    pub fn to_event(&self, call: &str) -> EventKind {
        EventKind::ApprovalDecided {
            tool_call_id: call.to_owned(),
            decision: self.decision,
            reason: self.reason.clone(),
            by: self.by.clone(),
        }
    }
}
