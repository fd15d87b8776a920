//! The batch that a turn waits for, as the record knows it. Only data.

use std::sync::{Mutex, PoisonError};

use jiff::Timestamp;
use serde::Deserialize;

/// A batch that a turn's request was handed over in.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct SubmittedBatch {
    /// The turn.
    pub turn: u32,
    /// `provider/model`.
    pub model: String,
    /// Its id at the service.
    #[serde(rename = "batch_id")]
    pub batch_id: String,
    /// When.
    #[serde(rename = "time")]
    pub submitted_at: Timestamp,
}

/// What an earlier process left of a turn.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PendingBatch {
    /// No turn that had begun.
    #[default]
    Absent,
    /// A turn that had begun, perhaps with a batch that did not come to the record.
    Unknown {
        /// The turn.
        turn: u32,
    },
    /// A batch that is on the record.
    Submitted(SubmittedBatch),
}

/// Where a run keeps what was left of it.
#[derive(Debug, Default)]
pub struct PendingBatchCell(Mutex<PendingBatch>);

impl PendingBatchCell {
    /// What is left.
    pub fn get(&self) -> PendingBatch {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Remembers what is left, or that its turn was taken.
    pub fn set(&self, pending: PendingBatch) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = pending;
    }
}
