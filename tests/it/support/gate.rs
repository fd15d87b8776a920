//! A door that a story opens when it wants to: what waits for it waits for that, never for the clock.

use std::sync::Arc;

use tokio::sync::watch;

/// Shut until [`Gate::open`]; open for ever then. Clones are the same gate.
#[derive(Clone, Debug)]
pub struct Gate(Arc<watch::Sender<bool>>);

impl Gate {
    /// A shut one.
    pub fn closed() -> Self {
        Self(Arc::new(watch::Sender::new(false)))
    }

    /// Opens the gate for all waiting and later answers.
    pub fn open(&self) {
        self.0.send_replace(true);
    }

    /// Whether it is open.
    pub fn is_open(&self) -> bool {
        *self.0.borrow()
    }

    /// Comes back when the gate is open.
    pub async fn wait_until_open(&self) {
        // The sender lives in `self`, so waiting cannot fail.
        let _ = self.0.subscribe().wait_for(|open| *open).await;
    }
}
