//! The decision on a tool call that needed approval.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::domain::event::Decision;
use crate::domain::input::ArgumentsHash;
use crate::record::entry::Entry;
use crate::store::{Change, IdempotencyClaim};

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct InputAnswer {
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

impl InputAnswer {
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

    pub fn to_entry(&self, call: &str) -> Entry {
        Entry::CallDecided {
            call_id: call.to_owned(),
            decision: self.decision,
            arguments: self.arguments.clone(),
            reason: self.reason.clone(),
            by: self.by.clone(),
        }
    }

    pub fn to_change(&self) -> Change {
        Change::by_request(self.claim.as_deref().cloned(), 0)
    }
}
