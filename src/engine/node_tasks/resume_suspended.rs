//! Probes a failed store, and resumes the suspended trees from their record once it works.

use std::collections::{HashMap, HashSet};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use crate::domain::counted::counted;
use crate::domain::run::{Run, RunId};
use crate::engine::cluster::follow;
use crate::engine::context::{Engine, RunContext};
use crate::engine::recovery::{self, RecoveredRun};
use crate::engine::root_run;
use crate::engine::state::active_run::MAX_MALFORMED_SUSPENSIONS;
use crate::engine::state::suspension::{INITIAL_PROBE_INTERVAL, MAX_PROBE_INTERVAL, SuspendedTree};
use crate::store::StoreError;
use crate::store::runs::UnfinishedRun;

/// Probes the store and resumes suspended trees until none is left or the daemon drains.
pub fn supervise(engine: Arc<Engine>) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let mut interval = INITIAL_PROBE_INTERVAL;
        let mut has_warned = false;
        loop {
            tokio::select! {
                () = tokio::time::sleep(engine.suspension.next_probe_delay(interval)) => {}
                () = engine.suspension.probe_moved.notified() => continue,
                () = engine.draining.cancelled() => return keep_suspended(&engine),
            }
            match probe(&engine).await {
                Ok(true) => return,
                Ok(false) => (interval, has_warned) = (INITIAL_PROBE_INTERVAL, false),
                Err(StoreError::Closed) => return keep_suspended(&engine),
                Err(error) => {
                    if !std::mem::replace(&mut has_warned, true) {
                        tracing::warn!(error = %error, "The store does not work yet, runs stay suspended: {error}");
                    }
                    interval = (interval * 2).min(MAX_PROBE_INTERVAL);
                }
            }
        }
    })
}

/// Resumes the trees that are due if the store works; true if no suspended tree is left.
async fn probe(engine: &Arc<Engine>) -> Result<bool, StoreError> {
    let suspension = &engine.suspension;
    if let Err(error) = engine.journal.store().check().await {
        suspension.mark_store_failed(&error, Vec::new());
        return Err(error);
    }
    let due = suspension.take_due();
    if !due.is_empty()
        && let Err((error, due)) = resume_trees(engine, due).await
    {
        suspension.mark_store_failed(&error, due);
        return Err(error);
    }
    Ok(suspension.mark_store_working())
}

enum TreeState {
    Resumable(RecoveredRun),
    /// Its end was committed after all, or it was never accepted, or another node drives it now.
    Ended(Option<Arc<Run>>),
}

/// Resumes these trees. Returns all of them if the record could not be read at all; a single tree that cannot be read
/// is suspended again.
async fn resume_trees(
    engine: &Arc<Engine>,
    trees: Vec<SuspendedTree>,
) -> Result<(), (StoreError, Vec<SuspendedTree>)> {
    let _gate = engine.suspension.resume_lock.write().await;
    let roots: HashSet<RunId> = trees.iter().map(|tree| tree.root.scope.run).collect();
    let store = engine.journal.store();
    let read = async {
        let owned = store.clear_failed(roots.iter().copied().collect()).await?;
        store.unfinished_trees(owned.into_iter().collect()).await
    };
    let unfinished = match read.await {
        Ok(unfinished) => unfinished,
        Err(error) => return Err((error, trees)),
    };
    let mut by_root: HashMap<RunId, Vec<UnfinishedRun>> = HashMap::new();
    for unfinished_run in unfinished {
        if roots.contains(&unfinished_run.run.root_id) {
            by_root
                .entry(unfinished_run.run.root_id)
                .or_default()
                .push(unfinished_run);
        }
    }
    let (mut active_runs, mut permits) = (HashMap::new(), HashMap::new());
    let (mut recovered, mut resolved) = (Vec::new(), HashSet::new());
    for tree in trees {
        let id = tree.root.scope.run;
        let runs = by_root.remove(&id).unwrap_or_default();
        let loaded = load_tree(engine, id, tree.attempts, runs);
        // The others go on also if the record of one makes this panic.
        let loaded = AssertUnwindSafe(loaded).catch_unwind().await;
        let panicked = |_| {
            Err(StoreError::Backend(
                "its record makes axed panic".to_owned(),
            ))
        };
        match loaded.unwrap_or_else(panicked) {
            Ok(TreeState::Resumable(recovered_root)) => {
                if !tree.root.tree.suspension.is_by_store() {
                    // The store has refused the reply itself: another one may be recorded.
                    tree.root.tree.suspension.unrecorded_replies().clear();
                }
                recovered_root
                    .active_run
                    .inherit_from(&tree.root, tree.attempts);
                active_runs.insert(id, Arc::clone(&recovered_root.active_run));
                permits.insert(id, (tree.run_permit, tree.session_guard));
                recovered.push(recovered_root);
            }
            Ok(TreeState::Ended(run)) => {
                drop(engine.orphans.take_tree(id));
                engine.cluster_permits.tree_ended(id);
                follow::release(engine, id);
                tree.root.publish_end(run);
            }
            Err(error) => {
                tracing::warn!(run.id = %id, run.root = %id, error = %error, "{id} stays suspended: {error}");
                engine.suspension.retry_later(tree);
                continue;
            }
        }
        resolved.insert(id);
    }
    match recovered.len() {
        0 => tracing::info!("The store works again, and no run of this process waits for it"),
        count => tracing::info!(
            "The store works again: resuming {}",
            counted(count, "root run")
        ),
    }
    // In the order of acceptance.
    recovered.sort_by_key(|revived| revived.run.id);
    engine.active_runs.replace(&resolved, active_runs);
    root_run::resume_all(engine, recovered, permits);
    engine.suspension.changed.notify_waiters();
    Ok(())
}

/// Reads a suspended tree, of which these runs are unfinished.
async fn load_tree(
    engine: &Engine,
    id: RunId,
    attempts: u32,
    unfinished: Vec<UnfinishedRun>,
) -> Result<TreeState, StoreError> {
    let mut recovered = recovery::recover_all(engine, unfinished).await?;
    if let Some(recovered_root) = recovered.pop() {
        return Ok(TreeState::Resumable(recovered_root));
    }
    let store = engine.journal.store();
    match store.run(id).await {
        Ok(Some(run)) if run.status.is_terminal() => Ok(TreeState::Ended(Some(Arc::new(run)))),
        // It could not be read with the others, and can be read again.
        Ok(Some(_)) if store.cluster().is_none() => {
            Err(StoreError::Malformed(format!("the record of {id}")))
        }
        Ok(_) => Ok(TreeState::Ended(None)),
        Err(error @ StoreError::Malformed(_)) if attempts < MAX_MALFORMED_SUSPENSIONS => Err(error),
        // The tree cannot be recovered; the log has the cause.
        Err(error) if error.is_damage() => Ok(TreeState::Ended(None)),
        Err(error) => Err(error),
    }
}

/// The daemon stops: suspended trees stay as last committed, and no later run of their sessions starts.
fn keep_suspended(engine: &Arc<Engine>) {
    for tree in engine.suspension.take_all() {
        if let Some(guard) = &tree.session_guard {
            guard.suspended().cancel();
        }
        root_run::suspend(&RunContext::new(engine, &tree.root));
    }
    engine.suspension.changed.notify_waiters();
}
