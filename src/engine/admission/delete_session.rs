//! Deletes a session: its name and its conversation; its runs stay.

use std::sync::Arc;

use crate::domain::run::{RunId, Status};
use crate::engine::context::Engine;
use crate::engine::state::sessions::SessionKey;
use crate::store::StoreError;
use crate::store::runs::SessionQuery;

/// Why a session was not deleted.
#[derive(Debug, thiserror::Error)]
pub enum DeleteSessionError {
    #[error("there is no session {0}")]
    NotFound(String),
    #[error("{run} of session {session} has not ended; wait for its end, or cancel it")]
    Busy { session: String, run: RunId },
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Deletes a session in which no run is unfinished. Runs that come meanwhile wait, and begin a new conversation.
pub async fn delete_session(
    engine: &Arc<Engine>,
    key: SessionKey,
) -> Result<(), DeleteSessionError> {
    let busy = |run| DeleteSessionError::Busy {
        session: key.name.clone(),
        run,
    };
    let (_, guard) = engine
        .sessions
        .enter(key.clone(), true)
        .map_err(|(run, _)| busy(run))?;
    // Nobody has to wait until this place is recorded.
    guard.accepted().cancel();
    let store = engine.journal.store();
    // A run that was suspended for a shutdown has left the session.
    for status in Status::ALL.into_iter().filter(|it| !it.is_terminal()) {
        let query = SessionQuery {
            owner: key.owner.clone(),
            name: key.name.clone(),
            status: Some(status),
            limit: 1,
            cut_texts: true,
            ..SessionQuery::default()
        };
        if let Some(run) = store.session_runs(query).await?.first() {
            return Err(busy(run.id));
        }
    }
    match store.delete_session(key.owner, key.name.clone()).await? {
        true => Ok(()),
        false => Err(DeleteSessionError::NotFound(key.name)),
    }
}
