//! Counts the messages that a server has not read yet. It may send requests without reading our answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

const MAX_UNREAD_MESSAGES: usize = 1024;
/// Why a connection with too many of them ends.
pub const UNREAD_REASON: &str = "it does not read what it is sent";

#[derive(Default)]
pub struct UnreadMessages(Arc<AtomicUsize>);

impl UnreadMessages {
    /// Counts a message until the guard is dropped.
    pub fn count_one(&self) -> UnreadGuard {
        self.0.fetch_add(1, Ordering::Relaxed);
        UnreadGuard(Arc::clone(&self.0))
    }

    /// Whether no more messages may wait.
    pub fn is_full(&self) -> bool {
        self.0.load(Ordering::Relaxed) >= MAX_UNREAD_MESSAGES
    }
}

/// A message that the server has not read yet.
pub struct UnreadGuard(Arc<AtomicUsize>);

impl Drop for UnreadGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
