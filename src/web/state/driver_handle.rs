//! How requests notify what drives batches, or evaluations, of those that were accepted or cancelled.

use std::collections::HashMap;
use std::hash::Hash;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use tokio_util::sync::CancellationToken;

#[derive(Debug, Default)]
pub struct DriverHandle<Id> {
    changed: Notify,
    finished: Notify,
    /// Of those that are being driven; cancelled with them.
    active: Mutex<HashMap<Id, CancellationToken>>,
}

impl<Id: Copy + Eq + Hash> DriverHandle<Id> {
    /// One was accepted.
    pub fn wake(&self) {
        self.changed.notify_one();
    }

    /// Starts no more runs of it and cancels those that it has started. Its cancel is in the record.
    pub fn cancel(&self, id: Id) {
        match self.active.lock().get(&id) {
            Some(token) => token.cancel(),
            // Perhaps it waits for a budget; it is driven once more, to its end.
            None => self.changed.notify_one(),
        }
    }

    /// Waits until one was accepted, or cancelled while it is not driven.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// It is being driven; returns what its cancel cancels.
    pub fn enter(&self, id: Id) -> CancellationToken {
        let token = CancellationToken::new();
        self.active.lock().insert(id, token.clone());
        token
    }

    /// It is not driven any more: its end is in the record, or it waits for a budget.
    pub fn leave(&self, id: Id) {
        self.active.lock().remove(&id);
        self.finished.notify_waiters();
    }

    /// None is driven any more.
    pub fn leave_all(&self) {
        self.active.lock().clear();
        self.finished.notify_waiters();
    }

    /// Resolves when one is left after the first poll, or after `enable`.
    pub fn finished(&self) -> Notified<'_> {
        self.finished.notified()
    }
}
