//! The caller of a new run waits until it is committed.

use std::sync::Arc;

use tokio::sync::oneshot;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::domain::run::Run;
use crate::engine::state::cluster_permits::QueuedTree;
use crate::engine::state::sessions::SessionGuard;
use crate::store::StoreError;

/// Belongs to the run's task until the run is committed, or cannot be: the run is counted so long, even if its caller disconnects.
pub struct Acceptance {
    caller: oneshot::Sender<Result<Arc<Run>, StoreError>>,
    /// The run's place in the queue of all nodes.
    entry: Option<QueuedTree>,
    /// Notifies those that wait for the end of the run's acceptance in its session.
    session: Option<DropGuard>,
}

pub type AcceptedReceiver = oneshot::Receiver<Result<Arc<Run>, StoreError>>;

impl Acceptance {
    pub fn new(
        session_guard: Option<&SessionGuard>,
        entry: Option<QueuedTree>,
    ) -> (Self, AcceptedReceiver) {
        let (caller, receiver) = oneshot::channel();
        let token = session_guard.map(SessionGuard::accepted);
        let acceptance = Self {
            caller,
            entry,
            session: token.map(CancellationToken::drop_guard),
        };
        (acceptance, receiver)
    }

    /// Answers the caller, who may have disconnected.
    pub fn answer(self, accepted: Result<Arc<Run>, StoreError>) {
        let Self {
            caller,
            entry,
            session,
        } = self;
        // First, so that the caller's next run is not counted beside this one twice.
        drop((entry, session));
        let _ = caller.send(accepted);
    }
}
