//! The problems of requests that change a run at work, or a rollout.

use crate::engine::approval::decision::DecideError;
use crate::engine::control::add_message::AddMessageError;
use crate::engine::control::client_results::ClientResultsError;
use crate::engine::control::hold::HoldError;
use crate::engine::rollouts::change::ChangeError;
use crate::web::error::{Problem, RESTART_INTERVAL_SECS, RETRY_INTERVAL_SECS};
use crate::web::problem_code::ProblemCode;

impl From<AddMessageError> for Problem {
    fn from(error: AddMessageError) -> Self {
        let detail = error.to_string();
        match error {
            AddMessageError::RunNotFound(id) => Self::run_not_found(id),
            AddMessageError::RunEnded { .. } => Self::new(ProblemCode::RunEnded, detail),
            AddMessageError::TooManyUnread(_) => Self::new(ProblemCode::TooManyMessages, detail),
            AddMessageError::Draining => {
                Self::new(ProblemCode::Draining, detail).with_retry_after(RESTART_INTERVAL_SECS)
            }
            AddMessageError::Store(error) => error.into(),
        }
    }
}

impl From<ChangeError> for Problem {
    fn from(error: ChangeError) -> Self {
        let detail = error.to_string();
        match error {
            ChangeError::Load(error) => error.into(),
            ChangeError::NoRollout(_) | ChangeError::Promoted(_) => {
                Self::new(ProblemCode::NoRollout, detail)
            }
            ChangeError::Unusable { .. } => Self::new(ProblemCode::CandidateUnusable, detail),
            ChangeError::Store(error) => error.into(),
        }
    }
}

impl From<HoldError> for Problem {
    fn from(error: HoldError) -> Self {
        let detail = error.to_string();
        match error {
            HoldError::RunNotFound(id) => Self::run_not_found(id),
            HoldError::RunEnded { .. } => Self::new(ProblemCode::RunEnded, detail),
            HoldError::Store(error) => error.into(),
        }
    }
}

impl From<DecideError> for Problem {
    fn from(error: DecideError) -> Self {
        let text = error.to_string();
        match error {
            DecideError::RunNotFound(id) => Self::run_not_found(id),
            DecideError::CallNotFound { .. } => Self::new(ProblemCode::CallNotFound, text),
            DecideError::NotPending { .. } => Self::new(ProblemCode::NothingWaits, text),
            DecideError::OtherArguments { .. } => Self::new(ProblemCode::OtherArguments, text),
            DecideError::InvalidAnswer(_) => Self::invalid_field("/answer", text),
            DecideError::InvalidArguments(_) => Self::invalid_field("/arguments", text),
            DecideError::NotReached(_) => {
                Self::new(ProblemCode::CallNotReached, text).with_retry_after(RETRY_INTERVAL_SECS)
            }
            DecideError::Draining => {
                Self::new(ProblemCode::Draining, text).with_retry_after(RESTART_INTERVAL_SECS)
            }
            DecideError::Store(error) => error.into(),
        }
    }
}

impl From<ClientResultsError> for Problem {
    fn from(error: ClientResultsError) -> Self {
        let code = match error {
            ClientResultsError::Store(error) => return error.into(),
            ClientResultsError::NotWaiting(_) | ClientResultsError::Missing(_) => {
                ProblemCode::NothingWaits
            }
            ClientResultsError::NotReached(_) => ProblemCode::CallNotReached,
            ClientResultsError::Draining => ProblemCode::Draining,
        };
        Self::new(code, error.to_string()).with_retry_after(RETRY_INTERVAL_SECS)
    }
}
