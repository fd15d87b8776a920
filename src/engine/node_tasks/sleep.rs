//! Puts trees to sleep that wait for people, times and events only, and wakes them.

use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use tracing::{debug, warn};

use crate::domain::run::{RunId, now};
use crate::engine::context::Engine;
use crate::engine::node_tasks::claims;
use crate::store::runs::SleepingTree;

/// Trees that are put to sleep or woken at once: clients that change runs wait meanwhile.
const MAX_TREES: usize = 250;
const RETRY_INTERVAL: SignedDuration = SignedDuration::from_secs(1);

/// Goes on until the daemon drains.
pub async fn run(engine: Arc<Engine>) {
    let trees = &engine.sleeping_trees;
    loop {
        // Subscribe before looking, so that no change is missed.
        let moved = trees.moved.notified();
        let delay = trees.next_look().unwrap_or(Duration::MAX);
        tokio::select! {
            () = tokio::time::sleep(delay) => {}
            () = moved => continue,
            () = engine.draining.cancelled() => return trees.suspend_sessions(),
        }
        if engine.suspension.is_store_down() {
            tokio::time::sleep(RETRY_INTERVAL.unsigned_abs()).await;
            continue;
        }
        wake_due(&engine).await;
        put_to_sleep(&engine).await;
    }
}

async fn wake_due(engine: &Arc<Engine>) {
    loop {
        let due = engine.sleeping_trees.take_due(MAX_TREES);
        if due.is_empty() {
            return;
        }
        debug!("Waking {} trees", due.len());
        if let Err(error) = claims::wake(engine, due.clone()).await {
            warn!(error = %error, "Runs whose wait has ended cannot be read, trying again: {error}");
            let at = now().saturating_add(RETRY_INTERVAL).unwrap_or_default();
            return engine.sleeping_trees.retry(&due, at);
        }
    }
}

/// Ends the tasks of trees that only sleep. Their runs stay as they are in the record.
async fn put_to_sleep(engine: &Engine) {
    let candidates = engine.sleeping_trees.take_candidates(MAX_TREES);
    if candidates.is_empty() || engine.playbacks.is_some() {
        return;
    }
    let recorded = recorded_waits(engine, candidates.clone()).await;
    let _gate = engine.suspension.resume_lock.write().await;
    let unreleased = engine.cluster_permits.unreleased();
    let released = recorded.iter().filter(|tree| {
        let is_over = tree.until.is_some_and(|until| until <= now());
        !is_over && !unreleased.iter().any(|(id, _)| *id == tree.root)
    });
    let waits = released.map(|tree| (tree.root, tree.waits)).collect();
    let candidates = candidates.into_iter().collect();
    let trees = &engine.sleeping_trees;
    let asleep = engine.active_runs.take_sleeping(&candidates, &waits, trees);
    if asleep.is_empty() {
        return;
    }
    let roots = asleep.iter().map(|(root, _)| root.scope.run).collect();
    let recorded = recorded_waits(engine, roots).await;
    for (root, waits) in asleep {
        let id = root.scope.run;
        let found = recorded
            .iter()
            .find(|tree| tree.root == id && tree.waits == waits);
        match found {
            Some(tree) => {
                trees.set_inputs(id, tree.inputs.clone());
                trees.wake_at(id, tree.until.unwrap_or(Timestamp::MAX));
            }
            // A wait has ended meanwhile, or it is not known.
            None => trees.wake(id),
        }
        root.cancel_token.cancel();
    }
}

/// Empty if the store cannot say.
async fn recorded_waits(engine: &Engine, roots: Vec<RunId>) -> Vec<SleepingTree> {
    let recorded = engine.journal.store().waits_of(roots).await;
    recorded.unwrap_or_default()
}
