//! The inputs of people that calls of this process wait for, and how an answer reaches them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use jiff::Timestamp;
use tokio::sync::{Notify, oneshot};
use tokio_util::sync::CancellationToken;

use crate::domain::input::InputKind;
use crate::domain::message::ToolCall;
use crate::domain::run::RunId;
use crate::engine::state::input_answer::InputAnswer;
use crate::store::StoreError;
use crate::tools::toolbox::Toolbox;

#[derive(Default)]
pub struct PendingInputs {
    waiters: Mutex<Waiters>,
    /// See [`PendingInputs::early_decision_lock`]. Thousands of sleeping runs may get an event at once.
    early_decision_locks: [tokio::sync::Mutex<()>; 32],
    /// Notified when a call begins to wait.
    pub registered: Notify,
}

/// What waits, by run and the id of the call or the question.
type Waiters = HashMap<(RunId, String), Waiter>;

struct Waiter {
    /// `None` if an answer is on its way.
    sender: Option<oneshot::Sender<AnswerMessage>>,
    settled: CancellationToken,
    kind: InputKind,
    /// Of a call that waits for approval; `None` for a question.
    tool: Option<WaitingTool>,
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

/// An answer, and where to confirm its commit.
pub struct AnswerMessage {
    pub answer: InputAnswer,
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
    /// Held while a decision is recorded for a call of this run that nobody waits for, because an earlier process requested it or the
    /// run sleeps, and while such a call looks for its decision, so that one of the two comes first. Spans a read and a write of the
    /// store.
    pub fn early_decision_lock(&self, run: RunId) -> &tokio::sync::Mutex<()> {
        let [.., last] = run.0.as_bytes();
        &self.early_decision_locks[usize::from(*last) % self.early_decision_locks.len()]
    }

    pub fn deliver(&self, run: RunId, id: &str, answer: &InputAnswer) -> DeliveryResult {
        let mut waiters = self.lock();
        let entry = waiters.get_mut(&(run, id.to_owned()));
        let is_of_kind = |entry: &&mut Waiter| entry.kind == answer.kind;
        let Some(entry) = entry.filter(is_of_kind) else {
            return DeliveryResult::NotWaiting;
        };
        let Some(sender) = entry.sender.take() else {
            return DeliveryResult::AlreadyDecided(entry.settled.clone());
        };
        let (ack, committed) = oneshot::channel();
        let answer = answer.clone();
        // If the call has just given up, the receiver of `ack` fails at once.
        let _ = sender.send(AnswerMessage { answer, ack });
        DeliveryResult::Delivered(committed)
    }

    pub fn is_waiting(&self, run: RunId, call: &str, kind: InputKind) -> bool {
        let waiters = self.lock();
        let waiter = waiters.get(&(run, call.to_owned()));
        waiter.is_some_and(|waiter| waiter.kind == kind)
    }

    /// The tool of a call that waits for approval; `None` if no call of this process does.
    pub fn tool(&self, run: RunId, call: &str) -> Option<WaitingTool> {
        let waiters = self.lock();
        let waiter = waiters.get(&(run, call.to_owned()))?;
        waiter.tool.clone()
    }

    /// Since when they wait, for each input of this kind without an answer.
    pub fn requested_at(&self, kind: InputKind) -> Vec<Timestamp> {
        let waiters = self.lock();
        let open = waiters
            .values()
            .filter(|it| it.kind == kind && it.sender.is_some());
        open.map(|waiter| waiter.requested_at).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Waiters> {
        self.waiters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The registration of what waits, removed when it is dropped.
pub struct InputWait<'d> {
    inputs: &'d PendingInputs,
    key: (RunId, String),
    settled: CancellationToken,
    pub receiver: oneshot::Receiver<AnswerMessage>,
}

impl<'d> InputWait<'d> {
    /// `tool` is that of a call that waits for approval; `None` for a question.
    pub fn register(
        inputs: &'d PendingInputs,
        key: (RunId, String),
        (kind, tool): (InputKind, Option<WaitingTool>),
        requested_at: Timestamp,
    ) -> Self {
        let (sender, receiver) = oneshot::channel();
        let settled = CancellationToken::new();
        let waiter = Waiter {
            sender: Some(sender),
            settled: settled.clone(),
            kind,
            tool,
            requested_at,
        };
        inputs.lock().insert(key.clone(), waiter);
        inputs.registered.notify_waiters();
        Self {
            inputs,
            key,
            settled,
            receiver,
        }
    }

    /// Waits for another answer, because the one that came was refused.
    pub fn renew(&mut self) {
        let (sender, receiver) = oneshot::channel();
        let settled = CancellationToken::new();
        self.receiver = receiver;
        if let Some(waiter) = self.inputs.lock().get_mut(&self.key) {
            waiter.sender = Some(sender);
            waiter.settled = settled.clone();
        }
        self.inputs.registered.notify_waiters();
        std::mem::replace(&mut self.settled, settled).cancel();
    }
}

impl Drop for InputWait<'_> {
    fn drop(&mut self) {
        self.inputs.lock().remove(&self.key);
        self.settled.cancel();
    }
}
