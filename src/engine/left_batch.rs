//! The batch that a turn waits for, as the record knows it. Only data.

use std::sync::{Mutex, PoisonError};

use jiff::Timestamp;
use serde::Deserialize;

/// A batch that a turn's request was handed over in.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Submitted {
    /// The turn.
    pub turn: u32,
    /// `provider/model`.
    pub model: String,
    /// Its id at the service.
    #[serde(rename = "batch_id")]
    pub batch: String,
    /// When.
    #[serde(rename = "time")]
    pub since: Timestamp,
}

/// What an earlier process left of a turn.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum LeftBatch {
    /// No turn that had begun.
    #[default]
    Nothing,
    /// A turn that had begun, perhaps with a batch that did not come to the record.
    Unknown {
        /// The turn.
        turn: u32,
    },
    /// A batch that is on the record.
    Known(Submitted),
}

/// Where a run keeps what was left of it.
#[derive(Debug, Default)]
pub struct LeftCell(Mutex<LeftBatch>);

impl LeftCell {
    /// What is left.
    pub fn get(&self) -> LeftBatch {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Remembers what is left, or that its turn was taken.
    pub fn set(&self, left: LeftBatch) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = left;
    }
}
