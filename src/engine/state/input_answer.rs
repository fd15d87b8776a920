//! What a person answered: the decision on a tool call that needed approval, or the answer to a question.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::domain::event::{Decision, EventKind, InputOutcome};
use crate::domain::input::{ArgumentsHash, InputKind};
use crate::record::entry::Entry;
use crate::store::{Change, IdempotencyClaim};

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct InputAnswer {
    /// A question is answered (approved), declined (denied), or nobody answered in time.
    pub decision: Decision,
    /// The reason for the model.
    pub reason: Option<String>,
    /// What the call is executed with instead of the model's arguments, of which events have only the beginning; or the answer to
    /// the question.
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
    /// What it answers.
    pub kind: InputKind,
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
            kind: InputKind::Approval,
        }
    }

    /// The end of a question whose answer nobody waits for any more.
    pub fn withdrawn(kind: InputKind) -> Self {
        Self {
            decision: Decision::Denied,
            reason: Some("withdrawn: nobody waits for the answer any more".to_owned()),
            kind,
            ..Self::timed_out()
        }
    }

    /// The answer to a question, or why a person declines to answer it.
    pub fn to_question(
        answer: Result<Arc<RawValue>, Option<String>>,
        by: Option<String>,
        claim: Option<Box<IdempotencyClaim>>,
    ) -> Self {
        let (decision, arguments, reason) = match answer {
            Ok(answer) => (Decision::Approved, Some(answer), None),
            Err(reason) => (Decision::Denied, None, reason),
        };
        Self {
            decision,
            reason,
            arguments,
            by,
            claim,
            kind: InputKind::Question,
            ..Self::timed_out()
        }
    }

    /// The end of a wait for a time or an event: with the event's data, if it came.
    pub fn to_wait(kind: InputKind, data: Option<Arc<RawValue>>) -> Self {
        Self {
            decision: match data {
                Some(_) => Decision::Approved,
                None => Decision::TimedOut,
            },
            arguments: data,
            kind,
            ..Self::timed_out()
        }
    }

    /// As the event of a question has it.
    pub fn recorded(
        outcome: InputOutcome,
        answer: Option<Arc<RawValue>>,
        reason: Option<String>,
        by: Option<String>,
    ) -> Self {
        Self {
            decision: match outcome {
                InputOutcome::Answered => Decision::Approved,
                InputOutcome::Declined => Decision::Denied,
                InputOutcome::TimedOut => Decision::TimedOut,
            },
            reason,
            arguments: answer,
            by,
            kind: InputKind::Question,
            ..Self::timed_out()
        }
    }

    /// `id` is that of the call or of the question.
    pub fn to_entry(&self, id: &str) -> Entry {
        if matches!(self.kind, InputKind::Sleep | InputKind::Event) {
            return Entry::Event(EventKind::WaitEnded {
                tool_call_id: id.to_owned(),
                data: self.arguments.clone(),
            });
        }
        if self.kind == InputKind::Question {
            return Entry::Event(EventKind::InputAnswered {
                input_id: id.to_owned(),
                outcome: match self.decision {
                    Decision::Approved => InputOutcome::Answered,
                    Decision::Denied => InputOutcome::Declined,
                    Decision::TimedOut => InputOutcome::TimedOut,
                },
                answer: self.arguments.clone(),
                reason: self.reason.clone(),
                by: self.by.clone(),
            });
        }
        Entry::CallDecided {
            call_id: id.to_owned(),
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
