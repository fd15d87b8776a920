//! What a node does not begin while it cannot reach the database.

use std::time::Duration;

use crate::engine::context::RunContext;
use crate::store::StoreError;

const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// Waits while this node is cut off from a database that others share: they may drive the run by now. Fails if they do, or may.
pub async fn wait_until_connected(context: &RunContext) -> Result<(), StoreError> {
    let Some(cluster) = context.engine.journal.store().cluster() else {
        return Ok(());
    };
    while cluster.is_cut_off() && !context.run.is_suspended() {
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    match context.run.is_suspended() {
        true => Err(StoreError::Suspended),
        false => Ok(()),
    }
}
