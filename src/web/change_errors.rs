//! The problems of requests that change a run at work.

use axum::http::StatusCode;

use crate::engine::add_message::AddMessageError;
use crate::engine::approval::decision::DecideError;
use crate::engine::client_results::ClientResultsError;
use crate::engine::hold::HoldError;
use crate::web::error::{Problem, RESTART_INTERVAL_SECS, RETRY_INTERVAL_SECS};
use crate::web::problem_code::ProblemCode;

impl From<AddMessageError> for Problem {
    fn from(error: AddMessageError) -> Self {
        let detail = error.to_string();
        match error {
            AddMessageError::RunNotFound(id) => Self::run_not_found(id),
            AddMessageError::RunEnded { .. } => {
                Self::new(StatusCode::CONFLICT, ProblemCode::RunEnded, detail)
            }
            AddMessageError::TooManyUnread(_) => {
                Self::new(StatusCode::CONFLICT, ProblemCode::TooManyMessages, detail)
            }
            AddMessageError::Draining => Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                ProblemCode::Draining,
                detail,
            )
            .with_retry_after(RESTART_INTERVAL_SECS),
            AddMessageError::Store(error) => error.into(),
        }
    }
}

impl From<HoldError> for Problem {
    fn from(error: HoldError) -> Self {
        let detail = error.to_string();
        match error {
            HoldError::RunNotFound(id) => Self::run_not_found(id),
            HoldError::RunEnded { .. } => {
                Self::new(StatusCode::CONFLICT, ProblemCode::RunEnded, detail)
            }
            HoldError::Store(error) => error.into(),
        }
    }
}

impl From<DecideError> for Problem {
    fn from(error: DecideError) -> Self {
        let text = error.to_string();
        match error {
            DecideError::RunNotFound(id) => Self::run_not_found(id),
            DecideError::NotPending { .. } => {
                Self::new(StatusCode::CONFLICT, ProblemCode::NothingWaits, text)
            }
            DecideError::OtherArguments { .. } => {
                Self::new(StatusCode::CONFLICT, ProblemCode::OtherArguments, text)
            }
            DecideError::InvalidArguments(_) => Self::invalid_field("/arguments", text),
            DecideError::NotReached(_) => Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                ProblemCode::CallNotReached,
                text,
            )
            .with_retry_after(RETRY_INTERVAL_SECS),
            DecideError::Draining => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, ProblemCode::Draining, text)
                    .with_retry_after(RESTART_INTERVAL_SECS)
            }
            DecideError::Store(error) => error.into(),
        }
    }
}

impl From<ClientResultsError> for Problem {
    fn from(error: ClientResultsError) -> Self {
        let (status, code) = match error {
            ClientResultsError::Store(error) => return error.into(),
            ClientResultsError::NotWaiting(_) | ClientResultsError::Missing(_) => {
                (StatusCode::CONFLICT, ProblemCode::NothingWaits)
            }
            ClientResultsError::NotReached(_) => {
                (StatusCode::SERVICE_UNAVAILABLE, ProblemCode::CallNotReached)
            }
            ClientResultsError::Draining => {
                (StatusCode::SERVICE_UNAVAILABLE, ProblemCode::Draining)
            }
        };
        Self::new(status, code, error.to_string()).with_retry_after(RETRY_INTERVAL_SECS)
    }
}
