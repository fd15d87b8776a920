//! Probes a store that failed, and once it works takes suspended trees up from their record, as after a restart. Knows no
//! loop.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use futures_util::future::BoxFuture;

use crate::domain::run::{Run, RunId};
use crate::engine::parts::Engine;
use crate::engine::recovery::{self, Revived};
use crate::engine::root;
use crate::engine::suspension::{FIRST_PAUSE, LONGEST_PAUSE, Suspended};
use crate::store::{StoreError, Unfinished};

/// Probes the store, and takes up what is suspended, until nothing is, or the daemon drains.
pub fn supervise(engine: Arc<Engine>) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let mut pause = FIRST_PAUSE;
        loop {
            tokio::select! {
                () = tokio::time::sleep(engine.suspension.next_probe(pause)) => {}
                () = engine.draining.cancelled() => return park_all(&engine),
            }
            match probe(&engine).await {
                Ok(true) => return,
                Ok(false) => pause = FIRST_PAUSE,
                Err(StoreError::Closed) => return park_all(&engine),
                Err(error) => {
                    tracing::warn!(error = %error, "The store does not work yet, runs stay suspended: {error}");
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
            }
        }
    })
}

/// Takes up what is due if the store works; true where nothing is suspended any more.
async fn probe(engine: &Arc<Engine>) -> Result<bool, StoreError> {
    let suspension = &engine.suspension;
    if let Err(error) = engine.journal.store().check().await {
        suspension.store_failed(Vec::new());
        return Err(error);
    }
    let due = suspension.take_due();
    if !due.is_empty()
        && let Err((error, due)) = take_up(engine, due).await
    {
        suspension.store_failed(due);
        return Err(error);
    }
    Ok(suspension.store_works())
}

/// What the record says of a suspended tree.
enum Found {
    /// It can go on.
    Unfinished(Revived),
    /// Its end was committed after all, or it never was accepted.
    Ended(Option<Arc<Run>>),
}

/// Resumes these trees from their record. Gives all of them back if the record as a whole could not be read; a tree that
/// cannot be read is put back alone.
async fn take_up(
    engine: &Arc<Engine>,
    trees: Vec<Suspended>,
) -> Result<(), (StoreError, Vec<Suspended>)> {
    let _gate = engine.suspension.gate.write().await;
    let roots: HashSet<RunId> = trees.iter().map(|tree| tree.live.scope.run).collect();
    let store = engine.journal.store();
    let read = async {
        store.mend(roots.iter().copied().collect()).await?;
        store.unfinished().await
    };
    let unfinished = match read.await {
        Ok(unfinished) => unfinished,
        Err(error) => return Err((error, trees)),
    };
    let mut by_root: HashMap<RunId, Vec<Unfinished>> = HashMap::new();
    for found in unfinished {
        if roots.contains(&found.run.root_id) {
            by_root.entry(found.run.root_id).or_default().push(found);
        }
    }
    let (mut lives, mut kept) = (HashMap::new(), HashMap::new());
    let (mut revived, mut settled) = (Vec::new(), HashSet::new());
    for tree in trees {
        let id = tree.live.scope.run;
        match find(engine, id, by_root.remove(&id).unwrap_or_default()).await {
            Ok(Found::Unfinished(found)) => {
                found.live.take_along(&tree.live, tree.tries);
                lives.insert(id, Arc::clone(&found.live));
                kept.insert(id, (tree.slot, tree.seat));
                revived.push(found);
            }
            Ok(Found::Ended(run)) => {
                engine.journal.bells().silence(id);
                tree.live.announce(run);
            }
            Err(error) => {
                tracing::warn!(run.id = %id, run.root = %id, error = %error, "{id} stays suspended: {error}");
                engine.suspension.put_back(tree);
                continue;
            }
        }
        settled.insert(id);
    }
    tracing::info!(
        "The store works again: going on with {} root runs",
        revived.len()
    );
    // In the order of their acceptance.
    revived.sort_by_key(|revived| revived.run.id);
    engine.live.replace(&settled, lives);
    root::go_on(engine, revived, kept);
    engine.suspension.changed.notify_waiters();
    Ok(())
}

/// Reads a suspended root of which, with its children, this is unfinished.
async fn find(
    engine: &Engine,
    id: RunId,
    unfinished: Vec<Unfinished>,
) -> Result<Found, StoreError> {
    let mut revived = recovery::revive_all(engine, unfinished).await?;
    if let Some(revived) = revived.pop() {
        return Ok(Found::Unfinished(revived));
    }
    match engine.journal.store().run(id).await {
        Ok(run) => Ok(Found::Ended(run.map(Arc::new))),
        // Nothing can be made of it; the log has the cause.
        Err(StoreError::Damaged(_)) => Ok(Found::Ended(None)),
        Err(error) => Err(error),
    }
}

/// The daemon stops: what is suspended stays as last committed, and nobody of its sessions overtakes it.
fn park_all(engine: &Engine) {
    for tree in engine.suspension.give_up() {
        if let Some(seat) = &tree.seat {
            seat.left().cancel();
        }
        root::park(engine, &tree.live);
    }
    engine.suspension.changed.notify_waiters();
}
