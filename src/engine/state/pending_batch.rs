//! The recorded batch that a turn waits for.

use std::sync::{Mutex, PoisonError};

use jiff::Timestamp;

/// A batch that contains a turn's request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubmittedBatch {
    pub turn: u32,
    /// `provider/model`.
    pub model: String,
    /// The provider's id.
    pub batch_id: String,
    pub submitted_at: Timestamp,
}

/// What an earlier process recorded of an unfinished turn.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PendingBatch {
    /// No turn had started.
    #[default]
    Absent,
    /// A turn had started, perhaps with a batch that was not recorded.
    Unknown {
        turn: u32,
    },
    Submitted(Box<SubmittedBatch>),
}

#[derive(Debug, Default)]
pub struct PendingBatchCell(Mutex<PendingBatch>);

impl PendingBatchCell {
    pub fn get(&self) -> PendingBatch {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    pub fn set(&self, pending: PendingBatch) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = pending;
    }
}
