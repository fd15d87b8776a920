//! Settles, at start, what an earlier process left unfinished: no run is ever left `running` without an owner.

use crate::engine::endings;
use crate::engine::parts::Engine;
use crate::store::StoreError;

/// Marks every unfinished run as failed with `interrupted`, children before their parents, and returns how many.
pub async fn settle(engine: &Engine) -> Result<usize, StoreError> {
    let unfinished = engine.journal.store().unfinished().await?;
    let count = unfinished.len();
    for found in unfinished {
        // Read again: its children have just been closed and count for it.
        let run = engine.journal.store().run(found.id).await?.unwrap_or(found);
        let message = format!(
            "the daemon stopped while this run was {}",
            run.status.as_str()
        );
        engine
            .journal
            .close_orphan(&run, endings::interrupted(&message))
            .await?;
        tracing::warn!(
            run.id = %run.id, run.root = %run.root_id, agent = %run.agent, depth = run.depth.0,
            "{} was {} when the daemon stopped; it is failed as interrupted", run.id, run.status.as_str()
        );
    }
    Ok(count)
}
