//! The end of a run's loop, and the state that is kept until then.

use jiff::Timestamp;

use crate::domain::failure::Failure;
use crate::domain::run::Run;
use crate::engine::state::active_run::ActiveRun;
use crate::engine::state::failures;
use crate::engine::state::kept_reply::KeptReply;
use crate::engine::state::turn_error::TurnError;
use crate::record::entry::Entry;
use crate::store::{Progress, StoreError};

/// What is kept if the loop panics.
pub struct LoopState {
    pub progress: Progress,
    /// The model's last text.
    pub partial: Option<String>,
    /// The last reply, until it is recorded.
    pub unrecorded_reply: Option<Box<KeptReply>>,
}

impl LoopState {
    pub fn new(run: &Run) -> Self {
        Self {
            progress: Progress {
                turns: run.turns,
                model: run.model.clone(),
                stop_reason: run.stop_reason.clone(),
                usage: run.usage,
                models: Vec::new(),
                charges: Vec::new(),
            },
            partial: None,
            unrecorded_reply: None,
        }
    }
}

/// The outcome of the loop, with the entries that are not recorded yet.
pub struct Ending {
    /// An error if the record could not be written or read.
    pub outcome: Result<LoopOutcome, StoreError>,
    /// Entries that are committed together with the terminal state.
    pub entries: Vec<Entry>,
    /// Whether its caller was refused with the error: the run has no record and never gets one.
    pub is_refused: bool,
}

pub enum LoopOutcome {
    Completed {
        content: String,
        /// Whether JSON was requested and `content` is valid.
        structured: bool,
        /// The user message that the text answers.
        task: String,
        /// The recorded time of the entry in the agent's memory, if one was chosen.
        memory_time: Option<Timestamp>,
    },
    /// An ad-hoc sub-agent had no turn left; its last text is the result.
    Incomplete,
    Failed(Failure),
    /// Its failure does not say yet where the time went.
    TimedOut(Failure),
    Cancelled,
}

impl Ending {
    pub fn new(outcome: LoopOutcome) -> Self {
        Self {
            outcome: Ok(outcome),
            entries: Vec::new(),
            is_refused: false,
        }
    }

    /// The end of a run that was not accepted.
    pub fn refused(error: StoreError) -> Self {
        Self {
            is_refused: true,
            ..Self::from(error)
        }
    }

    pub fn failed(failure: Failure) -> Self {
        Self::new(LoopOutcome::Failed(failure))
    }

    pub fn with_entries(self, entries: Vec<Entry>) -> Self {
        Self { entries, ..self }
    }
}

impl From<StoreError> for Ending {
    fn from(error: StoreError) -> Self {
        Self {
            outcome: Err(error),
            entries: Vec::new(),
            is_refused: false,
        }
    }
}

/// The ending of a run whose turn failed.
pub fn error_ending(run: &ActiveRun, error: TurnError) -> Ending {
    Ending::new(match error {
        TurnError::Cancelled => LoopOutcome::Cancelled,
        TurnError::Store(error) => return error.into(),
        TurnError::DeadlineExceeded => {
            LoopOutcome::TimedOut(failures::deadline_exceeded(run.deadline()))
        }
        TurnError::Budget(exceeded) => LoopOutcome::Failed(failures::budget_exceeded(&exceeded)),
        TurnError::Provider(error) => LoopOutcome::Failed(failures::provider_error(&error)),
        TurnError::BatchExpired => LoopOutcome::Failed(failures::batch_expired()),
        TurnError::Unavailable(unavailable) => {
            LoopOutcome::Failed(failures::provider_unavailable(&unavailable))
        }
    })
}
