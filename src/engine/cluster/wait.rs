//! Waits for runs that another node drives, or that nothing does while the daemon stops.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::OptionFuture;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::watch;

use crate::domain::event::{EventName, StoredEvent};
use crate::domain::run::{Run, RunId};
use crate::engine::cluster::follow;
use crate::engine::context::Engine;
use crate::engine::state::broadcaster::{StreamEvent, Subscription};
use crate::engine::state::watched_runs::Records;
use crate::store::StoreError;

/// The pause after a failure.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// How often a record is read without a sign that it has changed: the more rarely, the more runs are waited for.
const MIN_READ_INTERVAL: Duration = Duration::from_secs(1);
const MAX_READS_PER_SECOND: usize = 50;

/// The first record of a run that is `awaited`, whichever node drives the run. `None` if there is no such run, if the daemon shuts
/// down, or if it neither stops nor shares the database with other nodes: then nothing drives the run.
///
/// While the daemon stops, this node drives no run that it has put aside. Clients wait on nevertheless, until the end of the
/// drain: a response without a change would only make them send the request again.
pub async fn wait(
    engine: &Arc<Engine>,
    id: RunId,
    awaited: impl Fn(&Run) -> bool,
) -> Option<Arc<Run>> {
    if engine.journal.store().cluster().is_none() && !engine.draining.is_cancelled() {
        return None;
    }
    tokio::select! {
        found = wait_for_record(engine, id, awaited) => found,
        () = engine.shutdown.cancelled() => None,
    }
}

async fn wait_for_record(
    engine: &Arc<Engine>,
    id: RunId,
    awaited: impl Fn(&Run) -> bool,
) -> Option<Arc<Run>> {
    let current = read(engine, id).await?;
    if awaited(&current) {
        return Some(current);
    }
    let mut records = join(engine, &current);
    loop {
        if let Some(record) = records.borrow_and_update().as_ref()
            // Others may have read it before.
            && record.last_event >= current.last_event
            && awaited(record)
        {
            return Some(Arc::clone(record));
        }
        records.changed().await.ok()?;
    }
}

/// `None` if there is no such run, or if the store is closed.
async fn read(engine: &Engine, id: RunId) -> Option<Arc<Run>> {
    loop {
        match engine.journal.store().run(id).await {
            Ok(run) => return run.map(Arc::new),
            Err(StoreError::Closed) => return None,
            Err(error) if error.is_damage() => return None,
            Err(_) => tokio::time::sleep(RETRY_INTERVAL).await,
        }
    }
}

/// The records of a run from now on.
fn join(engine: &Arc<Engine>, run: &Run) -> watch::Receiver<Option<Arc<Run>>> {
    let (receiver, records) = engine.watched_runs.join(run.id);
    if let Some(records) = records {
        let (engine, id, root) = (Arc::clone(engine), run.id, run.root_id);
        let tasks = engine.followed.tasks.clone();
        tasks.spawn(async move {
            tokio::select! {
                () = watch_run(&engine, id, root, &records) => {}
                () = engine.shutdown.cancelled() => {}
            }
        });
    }
    receiver
}

/// Reads the record of a run until it has ended or nobody waits for it any more.
async fn watch_run(engine: &Arc<Engine>, id: RunId, root: RunId, records: &Records) {
    let mut events = None;
    loop {
        if events.is_none() {
            // First the subscriptions, then the record: no change is missed.
            events = match follow::subscribe_here(engine, root) {
                Some(events) => Some(events),
                None => follow::subscribe(engine, root, false).await,
            };
        }
        let tree = engine.followed.get(root);
        let changed = tree.as_ref().map(|tree| tree.changed.notified());
        let run = read(engine, id).await;
        let has_ended = run.as_ref().is_none_or(|run| run.status.is_terminal());
        records.send_replace(run);
        if engine.watched_runs.remove_if_over(id, records, has_ended) {
            return;
        }
        tokio::select! {
            is_open = next_change(&mut events, id) => {
                if !is_open {
                    events = None;
                }
            }
            Some(()) = OptionFuture::from(changed) => {}
            () = records.closed() => {}
            () = tokio::time::sleep(read_interval(engine.watched_runs.count())) => {}
        }
    }
}

fn read_interval(watched: usize) -> Duration {
    let seconds = u64::try_from(watched / MAX_READS_PER_SECOND).unwrap_or(u64::MAX);
    let jitter = Duration::from_millis(fastrand::u64(0..100));
    MIN_READ_INTERVAL.max(Duration::from_secs(seconds)) + jitter
}

/// Waits for an event that may change what somebody waits for; false if the subscription has ended.
async fn next_change(events: &mut Option<Subscription>, id: RunId) -> bool {
    let Some(events) = events else {
        return std::future::pending().await;
    };
    loop {
        match events.recv().await {
            Ok(StreamEvent::Stored(event)) if may_matter(&event, id) => return true,
            Ok(_) => {}
            Err(RecvError::Lagged(_)) => return true,
            Err(RecvError::Closed) => return false,
        }
    }
}

fn may_matter(event: &StoredEvent, id: RunId) -> bool {
    match event.name {
        EventName::ApprovalRequested
        | EventName::ApprovalDecided
        | EventName::InputRequested
        | EventName::InputAnswered => true,
        name => event.run_id == id && (name.is_about_run() || name == EventName::TurnCompleted),
    }
}
