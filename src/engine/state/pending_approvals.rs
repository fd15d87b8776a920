//! The tool calls of this process that wait for approval, and how a decision reaches them.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use crate::domain::run::RunId;
use crate::engine::state::approval_decision::ApprovalDecision;
use crate::store::StoreError;

#[derive(Default)]
pub struct PendingApprovals {
    waiters: Mutex<Waiters>,
    /// Held while a decision is recorded for a call of an earlier process that nobody waits for yet, and while such a
    /// call looks for its decision, so that one of the two comes first. Rare; spans a read and a write of the store.
    pub early_decision_lock: tokio::sync::Mutex<()>,
}

/// The waiting calls by run and call id; `None` for a call whose decision is on its way.
type Waiters = HashMap<(RunId, String), Option<oneshot::Sender<DecisionMessage>>>;

/// A decision, and where to confirm its commit.
pub struct DecisionMessage {
    pub decision: ApprovalDecision,
    pub ack: oneshot::Sender<Result<(), StoreError>>,
}

pub enum DeliveryResult {
    /// The call has the decision, and confirms its commit.
    Delivered(oneshot::Receiver<Result<(), StoreError>>),
    /// Another decision came first.
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
        // If the call has just given up, the receiver of `ack` fails at once.
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

/// The registration of a waiting call, removed when it is dropped.
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
