//! What was decided about a tool call that waited for approval.

use serde::Deserialize;

use crate::domain::event::{Decision, EventKind};

/// What was decided about a call that waited for a person's word.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct ApprovalDecision {
    /// What.
    pub decision: Decision,
    /// Why, for the model.
    pub reason: Option<String>,
    /// The name of the key that decided; none without keys.
    pub by: Option<String>,
}

impl ApprovalDecision {
    /// Nobody said anything in time.
    pub fn timed_out() -> Self {
        Self {
            decision: Decision::TimedOut,
            reason: None,
            by: None,
        }
    }

    /// The event that tells it.
    pub fn to_event(&self, call: &str) -> EventKind {
        EventKind::ApprovalDecided {
            tool_call_id: call.to_owned(),
            decision: self.decision,
            reason: self.reason.clone(),
            by: self.by.clone(),
        }
    }
}
