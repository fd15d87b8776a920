//! Adds what other nodes charge to budgets over time to what this one knows.

use std::sync::Arc;
use std::time::Duration;

use crate::domain::run::now;
use crate::engine::context::Engine;

/// A budget may be passed by what all nodes spend within this time.
const REFRESH_INTERVAL: Duration = Duration::from_secs(2);

/// Goes on until the daemon drains: then it accepts no runs.
pub async fn run(engine: Arc<Engine>) {
    let Some(cluster) = engine.journal.store().cluster() else {
        return;
    };
    if engine.period_budgets.is_empty() {
        return;
    }
    loop {
        tokio::select! {
            () = tokio::time::sleep(REFRESH_INTERVAL) => {}
            () = engine.draining.cancelled() => return,
        }
        let store = &**engine.journal.store();
        let budgets = &engine.period_budgets;
        let refreshed = async {
            budgets.refresh(cluster, now()).await?;
            budgets.resolve_doubts(store, cluster, now()).await
        };
        if let Err(error) = refreshed.await {
            tracing::debug!(error = %error, "What other nodes have charged to budgets cannot be read now: {error}");
        }
    }
}
