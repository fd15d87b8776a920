//! The tool calls of this process that wait for approval, and how a decision reaches them.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use crate::domain::run::RunId;
use crate::engine::state::approval_decision::ApprovalDecision;
use crate::store::StoreError;

/// The calls of this process that wait for a person's word.
#[derive(Default)]
pub struct PendingApprovals {
    waiters: Mutex<Waiters>,
    /// Held while a word is written for a call that an earlier process asked about and that nobody waits at yet, and
    /// while such a call looks for it: one of the two comes first. Rare, and over a read and a write of the store.
    pub early_decision_lock: tokio::sync::Mutex<()>,
}

/// Who waits, by run and call; none for a call whose word is on its way.
type Waiters = HashMap<(RunId, String), Option<oneshot::Sender<DecisionMessage>>>;

/// A word, and who wants to know that it is committed.
pub struct DecisionMessage {
    pub decision: ApprovalDecision,
    pub ack: oneshot::Sender<Result<(), StoreError>>,
}

/// What came of a word.
pub enum DeliveryResult {
    /// The call has it, and says when it is committed.
    Delivered(oneshot::Receiver<Result<(), StoreError>>),
    /// Another word came first.
    AlreadyDecided,
    /// No call of this process waits for it.
    NotWaiting,
}

impl PendingApprovals {
    pub fn deliver(&self, run: RunId, call: &str, decision: &ApprovalDecision) -> DeliveryResult {
        let mut waiters = self.lock();
        let Some(entry) = waiters.get_mut(&(run, call.to_owned())) else {
            return DeliveryResult::NotWaiting;
        };
        let Some(sender) = entry.take() else {
            return DeliveryResult::AlreadyDecided;
        };
        let (ack, committed) = oneshot::channel();
        let decision = decision.clone();
        // Where the call has just given up, the other end tells at once.
        let _ = sender.send(DecisionMessage { decision, ack });
        DeliveryResult::Delivered(committed)
    }

    pub fn is_waiting(&self, run: RunId, call: &str) -> bool {
        self.lock().contains_key(&(run, call.to_owned()))
    }

    fn lock(&self) -> MutexGuard<'_, Waiters> {
        self.waiters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A call's place at the desk, left when it is dropped.
pub struct PendingApproval<'d> {
    approvals: &'d PendingApprovals,
    key: (RunId, String),
    pub receiver: oneshot::Receiver<DecisionMessage>,
}

impl<'d> PendingApproval<'d> {
    pub fn register(approvals: &'d PendingApprovals, run: RunId, call: &str) -> Self {
        let (sender, receiver) = oneshot::channel();
        let key = (run, call.to_owned());
        approvals.lock().insert(key.clone(), Some(sender));
        Self {
            approvals,
            key,
            receiver,
        }
    }
}

impl Drop for PendingApproval<'_> {
    fn drop(&mut self) {
        self.approvals.lock().remove(&self.key);
    }
}
