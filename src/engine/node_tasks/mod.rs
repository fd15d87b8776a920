//! What a node does beside its runs: ends waits, resumes suspended trees, and serves the other nodes that may share its database.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::domain::run::now;
use crate::engine::cluster::{follow, permits, rate_limits};
use crate::engine::context::Engine;
use crate::standing_task;

pub mod claims;
pub mod ended_waits;
pub mod message_loop;
pub mod other_agents;
pub mod resume_suspended;
pub mod sleep;
pub mod unserved;

/// A budget may be passed by what all nodes spend within this time.
const REFRESH_INTERVAL: Duration = Duration::from_secs(2);

/// Who waits for a task, and what ends it.
type Owner<'e> = (&'e TaskTracker, &'e CancellationToken);

pub fn start(engine: &Arc<Engine>) {
    let drained = (&engine.tasks, &engine.draining);
    spawn(engine, drained, "Ending waits", ended_waits::run);
    spawn(engine, drained, "Waking runs", sleep::run);
    if engine.journal.store().cluster().is_none() {
        return;
    }
    spawn(engine, drained, "Taking over runs", claims::run);
    spawn(engine, drained, "Giving permits to runs", permits::run);
    spawn(engine, drained, "Reading used budgets", add_others_charges);
    spawn(engine, drained, "Looking for unserved runs", unserved::run);
    spawn(engine, drained, "Comparing nodes", other_agents::run);
    let shut_down = (&engine.followed.tasks, &engine.shutdown);
    spawn(engine, shut_down, "Reading messages", message_loop::run);
    spawn(engine, shut_down, "Following runs", follow::poll);
    spawn(engine, shut_down, "Sharing rate limits", rate_limits::run);
}

fn spawn<F>(
    engine: &Arc<Engine>,
    (tasks, stop): Owner<'_>,
    name: &'static str,
    task: impl Fn(Arc<Engine>) -> F + Send + 'static,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let (engine, stop) = (Arc::clone(engine), stop.clone());
    tasks.spawn(async move {
        standing_task::run(name, &stop, move |_| task(Arc::clone(&engine))).await;
    });
}

/// Adds what other nodes charge to budgets over time to what this one knows. Goes on until the daemon drains: then it accepts no runs.
async fn add_others_charges(engine: Arc<Engine>) {
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
