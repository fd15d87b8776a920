//! How requests notify the feeder of batches that were accepted or cancelled.

use std::collections::HashMap;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use tokio_util::sync::CancellationToken;

use crate::domain::batch::BatchId;

#[derive(Debug, Default)]
pub struct FeederHandle {
    changed: Notify,
    finished: Notify,
    /// Of the batches that are being fed; cancelled with the batch.
    active: Mutex<HashMap<BatchId, CancellationToken>>,
}

impl FeederHandle {
    /// A batch was accepted.
    pub fn wake(&self) {
        self.changed.notify_one();
    }

    /// Starts no more runs of a batch and cancels those that it has started. Its cancel is in the record.
    pub fn cancel(&self, id: BatchId) {
        match self.active.lock().get(&id) {
            Some(token) => token.cancel(),
            // Perhaps it waits for a budget; it is fed once more, to its end.
            None => self.changed.notify_one(),
        }
    }

    /// Waits until a batch was accepted, or cancelled while it is not fed.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// A batch is being fed; returns what its cancel cancels.
    pub fn enter(&self, id: BatchId) -> CancellationToken {
        let token = CancellationToken::new();
        self.active.lock().insert(id, token.clone());
        token
    }

    /// A batch is not fed any more: its end is in the record, or it waits for a budget.
    pub fn leave(&self, id: BatchId) {
        self.active.lock().remove(&id);
        self.finished.notify_waiters();
    }

    /// No batch is fed any more.
    pub fn leave_all(&self) {
        self.active.lock().clear();
        self.finished.notify_waiters();
    }

    /// Resolves when a batch is left after the first poll, or after `enable`.
    pub fn finished(&self) -> Notified<'_> {
        self.finished.notified()
    }
}
