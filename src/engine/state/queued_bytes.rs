//! Counts the bytes that queued and waiting runs keep in memory, so that the queue is bounded by bytes too.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

#[derive(Debug)]
pub struct QueuedBytes {
    max_bytes: usize,
    used: Arc<AtomicUsize>,
}

/// Counted until it is dropped.
#[derive(Debug)]
pub struct HeldBytes {
    used: Arc<AtomicUsize>,
    bytes: usize,
}

impl QueuedBytes {
    pub fn new(max_bytes: usize) -> Self {
        Self {
            max_bytes,
            used: Arc::default(),
        }
    }

    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// `None` if they are too many beside those that are kept. A single run is never too large.
    pub fn try_hold(&self, bytes: usize) -> Option<HeldBytes> {
        let used = self.used();
        (used == 0 || used + bytes <= self.max_bytes).then(|| self.hold(bytes))
    }

    /// Of a run that was accepted before.
    pub fn hold(&self, bytes: usize) -> HeldBytes {
        self.used.fetch_add(bytes, Ordering::Relaxed);
        HeldBytes {
            used: Arc::clone(&self.used),
            bytes,
        }
    }
}

impl Drop for HeldBytes {
    fn drop(&mut self) {
        self.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
