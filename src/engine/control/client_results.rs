//! Gives a run the results of tools that its client executes.

use std::pin::pin;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::domain::run::RunId;
use crate::engine::context::Engine;
use crate::engine::state::client_calls::{ClientResults, ResultsDelivery};
use crate::store::StoreError;

/// How long results wait until their run has reached its calls again after a restart.
const REACH_TIMEOUT: Duration = Duration::from_secs(10);

/// Why results were not accepted.
#[derive(Debug, thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ClientResultsError {
    /// The run does not wait for these calls.
    #[error("{0} does not wait for these results")]
    NotWaiting(RunId),
    /// Other calls of the same reply wait too.
    #[error("the call at position {0} of the same reply has no result")]
    Missing(u32),
    #[error("{0} has not reached its calls again since the daemon was restarted; try again")]
    NotReached(RunId),
    #[error("the daemon is stopping; try again")]
    Draining,
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Returns once the results of all calls of the turn that wait are committed.
pub async fn deliver(
    engine: &Engine,
    id: RunId,
    given: &ClientResults,
) -> Result<(), ClientResultsError> {
    let delivered = async {
        loop {
            // Subscribe before looking, so that no run is missed.
            let mut registered = pin!(engine.client_calls.registered.notified());
            registered.as_mut().enable();
            match engine.client_calls.deliver(id, given) {
                ResultsDelivery::Delivered(committed) => return Ok(committed),
                ResultsDelivery::Missing(position) => {
                    return Err(ClientResultsError::Missing(position));
                }
                // If the others are refused, these count.
                ResultsDelivery::AlreadyGiven(settled) => {
                    settled.cancelled().await;
                    continue;
                }
                ResultsDelivery::TooLate => return Err(ClientResultsError::NotWaiting(id)),
                ResultsDelivery::Unknown => {}
            }
            let run = engine.journal.store().run(id).await?;
            if !run.is_some_and(|run| run.waits_for_client() && run.turns == given.turn) {
                return Err(ClientResultsError::NotWaiting(id));
            }
            tokio::select! {
                () = registered => {}
                () = engine.draining.cancelled() => return Err(ClientResultsError::Draining),
            }
        }
    };
    let committed = match tokio::time::timeout(REACH_TIMEOUT, delivered).await {
        Ok(delivered) => delivered?,
        Err(_) => return Err(ClientResultsError::NotReached(id)),
    };
    match committed.await {
        Ok(committed) => Ok(committed?),
        Err(_) if engine.draining.is_cancelled() => Err(ClientResultsError::Draining),
        // The end of the wait, or of the run, came first.
        Err(_) => Err(ClientResultsError::NotWaiting(id)),
    }
}
