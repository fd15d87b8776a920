//! What stops a run: a cancel, its deadline, its budgets, the size of its conversation.

use tokio::time::Instant;

use crate::domain::message::Message;
use crate::engine::history;
use crate::engine::state::active_run::ActiveRun;
use crate::engine::state::budget;
use crate::engine::state::turn_error::TurnError;

/// Checks for a cancel, the deadline and the budgets.
pub fn check_limits(run: &ActiveRun) -> Result<(), TurnError> {
    if run.cancel_token.is_cancelled() {
        return Err(TurnError::Cancelled);
    }
    if run
        .deadline()
        .is_some_and(|deadline| deadline.at <= Instant::now())
    {
        return Err(TurnError::DeadlineExceeded);
    }
    run.check_budgets().map_err(TurnError::Budget)
}

/// The size of a conversation that may be sent: it counts in memory, in the record and in every request.
pub fn check_conversation_size(messages: &[Message], max_bytes: usize) -> Result<usize, TurnError> {
    let bytes: usize = messages
        .iter()
        .map(|message| history::message_bytes(message) + history::attachment_bytes(message))
        .sum();
    if bytes <= max_bytes {
        return Ok(bytes);
    }
    let unit = "bytes of conversation (limits.conversation_bytes)";
    Err(TurnError::Budget(budget::exceeded(bytes, max_bytes, unit)))
}

/// Awaits `work` until the run's deadline passes or it is cancelled.
pub async fn within_deadline<T>(
    run: &ActiveRun,
    work: impl Future<Output = T>,
) -> Result<T, TurnError> {
    let deadline_passed = async {
        match run.deadline() {
            Some(deadline) => tokio::time::sleep_until(deadline.at).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        biased;
        () = run.cancel_token.cancelled() => Err(TurnError::Cancelled),
        done = work => Ok(done),
        () = deadline_passed => Err(TurnError::DeadlineExceeded),
    }
}
