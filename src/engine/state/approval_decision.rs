//! The decision on a tool call that needed approval.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::domain::approval::ArgumentsHash;
use crate::domain::event::{Decision, EventKind};
use crate::domain::excerpt::ArgumentsExcerpt;
use crate::store::{Change, IdempotencyClaim, Step};

/// The longest arguments in an event; the run's steps have all of them.
pub const MAX_ARGUMENTS_BYTES: usize = 16 << 10;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ApprovalDecision {
    pub decision: Decision,
    /// The reason for the model.
    pub reason: Option<String>,
    /// What the call is executed with instead of the model's arguments. Events have only its beginning.
    #[serde(skip)]
    pub arguments: Option<Arc<RawValue>>,
    /// The arguments that were decided on; `None` if the client does not say. Not recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arguments_hash: Option<ArgumentsHash>,
    /// The name of the deciding key; `None` without keys.
    pub by: Option<String>,
    /// The idempotency key of the request, committed with the decision.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim: Option<Box<IdempotencyClaim>>,
}

impl ApprovalDecision {
    pub fn timed_out() -> Self {
        Self {
            decision: Decision::TimedOut,
            reason: None,
            arguments: None,
            arguments_hash: None,
            by: None,
            claim: None,
        }
    }

    pub fn to_event(&self, call: &str) -> EventKind {
        let arguments = self.arguments.as_ref();
        let excerpt = arguments.map(|it| ArgumentsExcerpt::new(it, MAX_ARGUMENTS_BYTES));
        EventKind::ApprovalDecided {
            truncated: excerpt.as_ref().is_some_and(|excerpt| excerpt.truncated),
            arguments: excerpt.map(|excerpt| excerpt.json),
            tool_call_id: call.to_owned(),
            decision: self.decision,
            reason: self.reason.clone(),
            by: self.by.clone(),
        }
    }

    pub fn to_change(&self) -> Change {
        Change::by_request(self.claim.as_deref().cloned(), 0)
    }

    /// What the record keeps beside the event.
    pub fn to_step(&self, call: &str) -> Option<Step> {
        Some(Step::ArgumentsChanged {
            call_id: call.to_owned(),
            arguments: Arc::clone(self.arguments.as_ref()?),
        })
    }
}
