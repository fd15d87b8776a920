//! The tool calls of this process that wait for approval, and how a decision reaches them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use jiff::Timestamp;
use tokio::sync::{Notify, oneshot};
use tokio_util::sync::CancellationToken;

use crate::domain::message::ToolCall;
use crate::domain::run::RunId;
use crate::engine::state::input_answer::InputAnswer;
use crate::store::StoreError;
use crate::telemetry::metrics::Waiting;
use crate::tools::toolbox::Toolbox;

#[derive(Default)]
pub struct PendingInputs {
    waiters: Mutex<Waiters>,
    /// Held while a decision is recorded for a call of an earlier process that nobody waits for yet, and while such a
    /// call looks for its decision, so that one of the two comes first. Rare; spans a read and a write of the store.
    pub early_decision_lock: tokio::sync::Mutex<()>,
    /// Notified when a call begins to wait.
    pub registered: Notify,
}

/// The waiting calls by run and call id.
type Waiters = HashMap<(RunId, String), Waiter>;

struct Waiter {
    /// `None` if a decision is on its way.
    sender: Option<oneshot::Sender<DecisionMessage>>,
    settled: CancellationToken,
    tool: WaitingTool,
    requested_at: Timestamp,
}

/// The tool of a waiting call, which checks other arguments for it.
#[derive(Clone)]
pub struct WaitingTool {
    pub toolbox: Arc<Toolbox>,
    pub call: ToolCall,
    /// The key of the run.
    pub owner: Option<String>,
}

/// A decision, and where to confirm its commit.
pub struct DecisionMessage {
    pub decision: InputAnswer,
    pub ack: oneshot::Sender<Result<(), StoreError>>,
}

pub enum DeliveryResult {
    /// The call has the decision, and confirms its commit.
    Delivered(oneshot::Receiver<Result<(), StoreError>>),
    /// Another decision came first. The token is cancelled once it is committed, or has failed.
    AlreadyDecided(CancellationToken),
    /// No call of this process waits for it.
    NotWaiting,
}

impl PendingInputs {
    pub fn deliver(&self, run: RunId, call: &str, decision: &InputAnswer) -> DeliveryResult {
        let mut waiters = self.lock();
        let Some(entry) = waiters.get_mut(&(run, call.to_owned())) else {
            return DeliveryResult::NotWaiting;
        };
        let Some(sender) = entry.sender.take() else {
            return DeliveryResult::AlreadyDecided(entry.settled.clone());
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

    /// The tool of a call that waits; `None` if no call of this process does.
    pub fn tool(&self, run: RunId, call: &str) -> Option<WaitingTool> {
        let waiters = self.lock();
        let waiter = waiters.get(&(run, call.to_owned()))?;
        Some(waiter.tool.clone())
    }

    /// The calls without a decision.
    pub fn waiting(&self) -> Waiting {
        let waiters = self.lock();
        let undecided = waiters.values().filter(|it| it.sender.is_some());
        Waiting::since(undecided.map(|waiter| waiter.requested_at))
    }

    fn lock(&self) -> MutexGuard<'_, Waiters> {
        self.waiters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The registration of a waiting call, removed when it is dropped.
pub struct InputWait<'d> {
    approvals: &'d PendingInputs,
    key: (RunId, String),
    settled: CancellationToken,
    pub receiver: oneshot::Receiver<DecisionMessage>,
}

impl<'d> InputWait<'d> {
    pub fn register(
        approvals: &'d PendingInputs,
        run: RunId,
        tool: WaitingTool,
        requested_at: Timestamp,
    ) -> Self {
        let (sender, receiver) = oneshot::channel();
        let key = (run, tool.call.id.clone());
        let settled = CancellationToken::new();
        let waiter = Waiter {
            sender: Some(sender),
            settled: settled.clone(),
            tool,
            requested_at,
        };
        approvals.lock().insert(key.clone(), waiter);
        approvals.registered.notify_waiters();
        Self {
            approvals,
            key,
            settled,
            receiver,
        }
    }

    /// Waits for another decision, because the one that came was refused.
    pub fn renew(&mut self) {
        let (sender, receiver) = oneshot::channel();
        let settled = CancellationToken::new();
        self.receiver = receiver;
        if let Some(waiter) = self.approvals.lock().get_mut(&self.key) {
            waiter.sender = Some(sender);
            waiter.settled = settled.clone();
        }
        self.approvals.registered.notify_waiters();
        std::mem::replace(&mut self.settled, settled).cancel();
    }
}

impl Drop for InputWait<'_> {
    fn drop(&mut self) {
        self.approvals.lock().remove(&self.key);
        self.settled.cancel();
    }
}
