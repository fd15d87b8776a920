//! Gives permits to the root runs of all nodes, and takes them.

use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::domain::run::RunId;
use crate::engine::cluster::retry_log::RetryLog;
use crate::engine::context::Engine;
use crate::engine::state::active_run::ActiveRun;
use crate::store::StoreError;
use crate::store::cluster::{Cluster, PermitChange};
use crate::store::node_messages::NodeMessage;

const REFRESH_INTERVAL: Duration = Duration::from_secs(1);

/// Gives permits until the daemon drains: then no run starts here.
pub async fn run(engine: Arc<Engine>) {
    let Some(cluster) = engine.journal.store().cluster() else {
        return;
    };
    let permits = &engine.cluster_permits;
    let mut log = RetryLog::new("Giving permits to runs");
    loop {
        let jitter = Duration::from_millis(fastrand::u64(0..100));
        tokio::select! {
            () = permits.wake.notified() => {}
            () = tokio::time::sleep(REFRESH_INTERVAL + jitter) => {}
            () = engine.draining.cancelled() => return,
        }
        let give = async {
            release_again(&engine, cluster).await;
            permits.give(cluster).await
        };
        let given = tokio::select! {
            given = give => given,
            () = engine.draining.cancelled() => return,
        };
        // What suspends runs is logged with them.
        if given.is_ok() || !engine.suspension.is_store_down() {
            log.add(&given);
        }
    }
}

/// Gives back the permit of a tree that waits for a person.
pub async fn release(engine: &Engine, root: RunId) {
    if let Some(cluster) = engine.journal.store().cluster() {
        if let Err(error) = cluster.change_permit(root, PermitChange::Release).await {
            tracing::warn!(run.id = %root, error = %error, "The permit of {root} was not given back, trying again: {error}");
            if let Some(root) = engine.active_runs.get(root) {
                engine.cluster_permits.keep_unreleased(&root);
            }
        }
        engine.cluster_permits.permit_freed();
    }
}

/// Gives back the permits of trees that wait for a person whose release has failed.
async fn release_again(engine: &Engine, cluster: &dyn Cluster) {
    let permits = &engine.cluster_permits;
    let unreleased = permits.unreleased();
    if unreleased.is_empty() {
        return;
    }
    // A tree that is resumed from its record has another permit.
    let Ok(_not_resumed) = engine.suspension.resume_lock.try_read() else {
        return;
    };
    for (id, root) in unreleased {
        let driven = engine.active_runs.get(id);
        let driven = driven.filter(|it| Weak::ptr_eq(&Arc::downgrade(it), &root));
        let Some(root) = driven.filter(|it| !it.is_suspended()) else {
            // It has ended, another node has it, or it is resumed, and then gives its permit back if it waits.
            permits.forget_unreleased(id);
            continue;
        };
        // Until the permit is released, the tree does not wait for it again.
        let Ok(_not_acquired) = root.tree.root_permit.acquire_lock.try_lock() else {
            continue;
        };
        if root.tree.root_permit.is_held() {
            continue;
        }
        if let Err(error) = cluster.change_permit(id, PermitChange::Release).await {
            tracing::debug!(run.id = %id, error = %error, "The permit of {id} was not given back again: {error}");
            return;
        }
        permits.forget_unreleased(id);
    }
}

/// Takes the permit of a tree that nothing can drive, and its place in its session.
pub async fn give_up(
    engine: &Engine,
    cluster: &dyn Cluster,
    root: RunId,
) -> Result<(), StoreError> {
    cluster.change_permit(root, PermitChange::GiveUp).await?;
    engine.cluster_permits.permit_freed();
    Ok(())
}

/// Leaves a tree that waits for a permit to other nodes: this one drains, and would not start it.
pub async fn hand_over(engine: &Engine, root: RunId) {
    if let Some(cluster) = engine.journal.store().cluster() {
        match cluster.change_permit(root, PermitChange::HandOver).await {
            Ok(()) => cluster.send(None, NodeMessage::FreeTrees),
            // Others take it when this node leaves.
            Err(error) => {
                tracing::debug!(run.id = %root, error = %error, "{root} was not handed over: {error}");
            }
        }
    }
}

/// Waits for a permit again, before the trees that have not started.
pub async fn acquire_again(engine: &Engine, root: &ActiveRun) {
    if let Some(cluster) = engine.journal.store().cluster() {
        if let Err(error) = cluster
            .change_permit(root.scope.run, PermitChange::Return)
            .await
        {
            root.suspend(&error);
        }
        engine.cluster_permits.granted(root.scope.run).await;
    }
}
