//! The runs of this process that wait for results of their clients' tools, and how the results reach them.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, oneshot};
use tokio_util::sync::CancellationToken;

use crate::domain::attachment::Attachment;
use crate::domain::run::RunId;
use crate::store::{IdempotencyClaim, StoreError};
use crate::telemetry::metrics::Waiting;

#[derive(Default)]
pub struct ClientCalls {
    waiters: Mutex<HashMap<RunId, Waiter>>,
    /// Notified when a run begins to wait.
    pub registered: Notify,
}

struct Waiter {
    turn: u32,
    /// The positions in the reply of the calls that wait.
    positions: Vec<u32>,
    /// `None` if results are on their way.
    sender: Option<oneshot::Sender<ResultsMessage>>,
    settled: CancellationToken,
    /// When the client was given the first of the calls.
    since: Timestamp,
}

/// The result of a call, as its client sends it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ClientResult {
    /// The index of the call in its reply, from 0.
    pub position: u32,
    pub content: String,
    pub is_error: bool,
    pub attachments: Vec<Attachment>,
}

/// The results of the calls of a turn, as a request gives them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ClientResults {
    pub turn: u32,
    pub results: Vec<ClientResult>,
    /// Committed with the results.
    #[serde(default)]
    pub claim: Option<IdempotencyClaim>,
}

/// The results of all calls, and where to confirm their commit.
pub struct ResultsMessage {
    pub results: Vec<ClientResult>,
    /// See [`ClientResults::claim`].
    pub claim: Option<IdempotencyClaim>,
    pub ack: oneshot::Sender<Result<(), StoreError>>,
}

pub enum ResultsDelivery {
    /// The run has the results, and confirms their commit.
    Delivered(oneshot::Receiver<Result<(), StoreError>>),
    /// The call at this position waits and has no result.
    Missing(u32),
    /// Other results came first. The token is cancelled once they are committed or refused.
    AlreadyGiven(CancellationToken),
    /// The calls have results, or are of another turn.
    TooLate,
    /// This process does not know that the run waits.
    Unknown,
}

impl ClientCalls {
    pub fn deliver(&self, run: RunId, given: &ClientResults) -> ResultsDelivery {
        let mut waiters = self.lock();
        let Some(waiter) = waiters.get_mut(&run) else {
            return ResultsDelivery::Unknown;
        };
        if waiter.turn != given.turn {
            return ResultsDelivery::TooLate;
        }
        let has_result = |position: &&u32| given.results.iter().any(|it| it.position == **position);
        if let Some(missing) = waiter.positions.iter().find(|it| !has_result(it)) {
            return ResultsDelivery::Missing(*missing);
        }
        let Some(sender) = waiter.sender.take() else {
            return match waiter.settled.is_cancelled() {
                true => ResultsDelivery::TooLate,
                false => ResultsDelivery::AlreadyGiven(waiter.settled.clone()),
            };
        };
        let (ack, committed) = oneshot::channel();
        let message = ResultsMessage {
            results: given.results.clone(),
            claim: given.claim.clone(),
            ack,
        };
        // If the run has just given up, the receiver of `ack` fails at once.
        let _ = sender.send(message);
        ResultsDelivery::Delivered(committed)
    }

    /// The runs without results.
    pub fn waiting(&self) -> Waiting {
        let waiters = self.lock();
        let open = waiters.values().filter(|it| it.sender.is_some());
        Waiting::since(open.map(|waiter| waiter.since))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RunId, Waiter>> {
        self.waiters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The registration of a run that waits, removed when it is dropped.
pub struct WaitingCalls<'c> {
    calls: &'c ClientCalls,
    run: RunId,
    settled: CancellationToken,
    pub receiver: oneshot::Receiver<ResultsMessage>,
}

impl<'c> WaitingCalls<'c> {
    pub fn register(
        calls: &'c ClientCalls,
        run: RunId,
        (turn, positions): (u32, Vec<u32>),
        since: Timestamp,
    ) -> Self {
        let (sender, receiver) = oneshot::channel();
        let settled = CancellationToken::new();
        let waiter = Waiter {
            turn,
            positions,
            sender: Some(sender),
            settled: settled.clone(),
            since,
        };
        calls.lock().insert(run, waiter);
        calls.registered.notify_waiters();
        Self {
            calls,
            run,
            settled,
            receiver,
        }
    }

    /// The results are committed.
    pub fn settle(&self) {
        self.settled.cancel();
    }

    /// Waits for other results, because those that came were refused.
    pub fn renew(&mut self) {
        let (sender, receiver) = oneshot::channel();
        let settled = CancellationToken::new();
        self.receiver = receiver;
        if let Some(waiter) = self.calls.lock().get_mut(&self.run) {
            waiter.sender = Some(sender);
            waiter.settled = settled.clone();
        }
        self.calls.registered.notify_waiters();
        std::mem::replace(&mut self.settled, settled).cancel();
    }
}

impl Drop for WaitingCalls<'_> {
    fn drop(&mut self) {
        self.calls.lock().remove(&self.run);
        self.settled.cancel();
    }
}
