//! Recordings of trees: [`capture`] makes them from the record, [`text`] writes them as TOML, [`read`] reads them, and
//! [`accept`] takes over what a test found to be different.

use crate::domain::run::RunId;
use crate::store::StoreError;

pub mod accept;
pub mod capture;
mod capture_run;
pub mod neutral;
mod offer;
pub mod read;
pub mod redact;
pub mod text;

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
