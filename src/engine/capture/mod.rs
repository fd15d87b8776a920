//! Makes recordings of trees that have ended, from their record.

use crate::domain::run::RunId;
use crate::store::StoreError;

pub mod capture_run;
pub mod capture_tree;
pub mod offer;

/// Why a run has no recording.
#[derive(Debug, thiserror::Error)]
pub enum RecordingError {
    #[error("{run} is a child of {root}; a recording is of a whole tree: request that of {root}")]
    NotARoot { run: RunId, root: RunId },
    #[error("{0} has not ended; a recording is made of a run that has")]
    NotEnded(RunId),
    #[error(
        "{0} cannot be recorded: requests are not recorded; set requests = \"full\" in [data] of the configuration"
    )]
    RequestsOff(RunId),
    /// The record lacks something, for the reason given.
    #[error("{run} cannot be recorded: {reason}")]
    Incomplete { run: RunId, reason: String },
    #[error(transparent)]
    Store(#[from] StoreError),
}
