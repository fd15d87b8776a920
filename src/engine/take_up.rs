//! Probes a store that failed, and once it works takes suspended trees up from their record, as after a restart. Knows no
//! loop.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use futures_util::future::BoxFuture;

use crate::domain::run::RunId;
use crate::engine::parts::Engine;
use crate::engine::recovery::{self, Revived};
use crate::engine::root;
use crate::engine::suspension::{FIRST_PAUSE, LONGEST_PAUSE, Suspended};
use crate::store::StoreError;

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

/// Goes on with these trees from their record; gives them back where it could not be read.
async fn take_up(
    engine: &Arc<Engine>,
    trees: Vec<Suspended>,
) -> Result<(), (StoreError, Vec<Suspended>)> {
    let _gate = engine.suspension.gate.write().await;
    let roots: HashSet<RunId> = trees.iter().map(|tree| tree.live.scope.run).collect();
    let store = engine.journal.store();
    let read = async {
        store.mend(roots.iter().copied().collect()).await?;
        let mut unfinished = store.unfinished().await?;
        unfinished.retain(|found| roots.contains(&found.run.root_id));
        let revived = recovery::revive_all(engine, unfinished).await?;
        let mut ended = HashMap::new();
        let goes_on: HashSet<_> = revived.iter().map(|revived| revived.run.id).collect();
        for id in roots.difference(&goes_on) {
            ended.insert(*id, store.run(*id).await?.map(Arc::new));
        }
        Ok((revived, ended))
    };
    let (revived, mut ended) = match read.await {
        Ok(read) => read,
        Err(error) => return Err((error, trees)),
    };
    tracing::info!(
        "The store works again: going on with {} root runs",
        revived.len()
    );
    let by_id = |revived: &Revived| (revived.run.id, Arc::clone(&revived.live));
    let lives: HashMap<_, _> = revived.iter().map(by_id).collect();
    let mut kept = HashMap::new();
    for tree in trees {
        let id = tree.live.scope.run;
        match lives.get(&id) {
            Some(live) => {
                live.take_along(&tree.live, tree.tries);
                kept.insert(id, (tree.slot, tree.seat));
            }
            None => {
                // Its end was committed after all, or it never was accepted.
                engine.journal.bells().silence(id);
                tree.live.announce(ended.remove(&id).flatten());
            }
        }
    }
    engine.live.replace(&roots, lives);
    root::go_on(engine, revived, kept);
    engine.suspension.changed.notify_waiters();
    Ok(())
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
