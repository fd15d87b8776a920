//! Trees whose labels no node has: they wait with a warning, and fail in the end. And runs whose tree has ended without them. One
//! node does this for all.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::domain::node::describe_labels;
use crate::domain::run::{RunId, Status};
use crate::domain::warning::{Warning, WarningCode};
use crate::engine::cluster::retry_log::RetryLog;
use crate::engine::context::Engine;
use crate::engine::node_tasks::claims;
use crate::engine::recovery::interrupted_runs;
use crate::engine::state::failures;
use crate::engine::state::run_warnings::RunWarnings;
use crate::store::StoreError;
use crate::store::cluster::{Cluster, UnservedTree};
use crate::store::node_messages::NodeMessage;

const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// How often it looks for runs whose tree has ended.
const ABANDONED_INTERVAL: Duration = Duration::from_secs(60);
/// Trees in one look.
const MAX_TREES: usize = 64;

/// Looks for such trees until the daemon drains.
pub async fn run(engine: Arc<Engine>) {
    let Some(cluster) = engine.journal.store().cluster() else {
        return;
    };
    let max_wait = engine.settings.runs.unserved;
    let mut log = RetryLog::new("Looking for runs that no node can drive");
    let (mut next_abandoned, mut tried) = (Instant::now(), HashSet::new());
    loop {
        tokio::select! {
            () = tokio::time::sleep(POLL_INTERVAL) => {}
            () = engine.draining.cancelled() => return,
        }
        if !engine.leadership.is_leader() || engine.suspension.is_store_down() {
            continue;
        }
        let looked = async {
            let mut outcome = Ok(());
            for tree in cluster.unserved_trees(max_wait, MAX_TREES).await? {
                if cluster.claim_unserved(tree.root).await? {
                    // One that cannot be read does not keep the others waiting.
                    outcome = handle(&engine, cluster, &tree).await.and(outcome);
                }
            }
            if Instant::now() >= next_abandoned {
                next_abandoned = Instant::now() + ABANDONED_INTERVAL;
                outcome = interrupt_abandoned(&engine, cluster, &mut tried)
                    .await
                    .and(outcome);
            }
            outcome
        };
        log.add(&looked.await);
    }
}

/// Fails runs that no node will ever drive, because their root has ended. `tried` has the trees of earlier looks: what is left of
/// them is damaged.
async fn interrupt_abandoned(
    engine: &Engine,
    cluster: &dyn Cluster,
    tried: &mut HashSet<RunId>,
) -> Result<(), StoreError> {
    let except = tried.iter().copied().collect();
    let mut outcome = Ok(());
    for root in cluster.abandoned_trees(except, MAX_TREES).await? {
        let unfinished = engine.journal.store().unfinished_trees(vec![root]).await?;
        let interrupted = interrupted_runs::interrupt_all(engine, unfinished).await;
        if interrupted.is_ok() {
            tried.insert(root);
        }
        outcome = interrupted.and(outcome);
    }
    outcome
}

/// Does what is to be done for a tree that this node may write to now.
async fn handle(
    engine: &Arc<Engine>,
    cluster: &dyn Cluster,
    tree: &UnservedTree,
) -> Result<(), StoreError> {
    let root = tree.root;
    match engine.journal.store().run(root).await? {
        // It ends when it is resumed, and begins nothing.
        Some(run) if run.status == Status::Cancelling => {
            claims::resume(engine, vec![root]).await?;
        }
        Some(_) if tree.is_overdue => {
            let unfinished = engine.journal.store().unfinished_trees(vec![root]).await?;
            let failure = |_: &_| failures::no_node(&tree.labels);
            interrupted_runs::fail_all(engine, unfinished, failure).await?;
        }
        Some(run) => {
            let mut warnings = RunWarnings::restored(run.warnings.clone());
            if warnings.insert(warning(root, &tree.labels).in_turn(None)) {
                engine
                    .journal
                    .warn_inactive(&run, warnings.to_vec())
                    .await?;
            }
            // This node can perform them.
            cluster.send(Some(cluster.node()), NodeMessage::Requests);
        }
        None => {}
    }
    Ok(())
}

fn warning(root: RunId, labels: &[String]) -> Warning {
    let message = format!(
        "no node has {}: the run waits for one that has",
        describe_labels(labels)
    );
    tracing::warn!(run.id = %root, run.root = %root, "{root}: {message}");
    Warning::new(WarningCode::NoNode, &message)
}
