//! Cancels runs that any node may drive.

use std::sync::Arc;

use crate::domain::run::RunId;
use crate::engine::cancel;
use crate::engine::cluster::run_change::RunChange;
use crate::engine::cluster::send_change;
use crate::engine::context::Engine;
use crate::store::StoreError;

/// Like [`cancel::cancel`], by the node that drives the run.
pub async fn cancel(engine: &Arc<Engine>, id: RunId, reason: &str) -> Result<(), StoreError> {
    let change = || RunChange::Cancel {
        reason: reason.to_owned(),
    };
    match send_change::send(engine, id, change).await {
        Some(cancelled) => cancelled,
        None => cancel::cancel(engine, id, reason).await,
    }
}

/// Cancels the unfinished runs before `successor` in its session, after it was accepted.
pub fn cancel_predecessors(engine: &Arc<Engine>, predecessors: Vec<RunId>, successor: RunId) {
    if predecessors.is_empty() {
        return;
    }
    let tasks = engine.tasks.clone();
    let engine = Arc::clone(engine);
    tasks.spawn(async move {
        let reason = format!("{successor} takes its place in the session");
        // The last one first, so that none starts because the run before it ended.
        for id in predecessors.into_iter().rev() {
            if let Err(error) = cancel(&engine, id, &reason).await {
                tracing::warn!(run.id = %id, error = %error, "Cannot cancel {id}: {error}");
            }
        }
    });
}
