//! Deletes temporary runs after their end, once the clients that wait for them have the result, or have gone away.

use std::sync::Arc;
use std::time::Duration;

use tracing::warn;

use crate::domain::run::{Run, RunId};
use crate::engine::cluster::wait;
use crate::engine::context::{Engine, RunContext};
use crate::store::StoreError;
use crate::store::outbox::DeliveryStatus;

/// The first pause after a failure, or while a webhook is not delivered; it doubles up to [`MAX_RETRY_INTERVAL`].
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(60);
/// How long an ended run stays at least, unless its client has the response: a client may wait at another node, or come back after
/// a restart.
const GRACE: Duration = Duration::from_secs(5);

/// A client that needs the record of a run; it does so until this is dropped.
pub struct RunUse {
    engine: Arc<Engine>,
    run: RunId,
    is_over: bool,
}

impl RunUse {
    /// `None` if the run is kept anyway. The client that comes last decides with `is_kept`.
    pub fn begin(engine: &Arc<Engine>, run: RunId, is_kept: bool) -> Option<Self> {
        if !is_kept {
            add(engine, run);
        }
        let is_temporary = engine.temporary_runs.begin_use(run, is_kept);
        is_temporary.then(|| Self {
            engine: Arc::clone(engine),
            run,
            is_over: false,
        })
    }

    /// Deletes the run, which has ended, unless another client uses it. If that fails, it is tried again later.
    pub async fn finish(mut self) {
        let (engine, run) = (Arc::clone(&self.engine), self.run);
        if !matches!(has_pending_delivery(&engine, run).await, Ok(false)) {
            return;
        }
        self.is_over = engine.temporary_runs.end_unless_last(run);
        if self.is_over {
            return;
        }
        match engine.journal.store().delete(run).await {
            Ok(_) => {
                self.is_over = true;
                engine.temporary_runs.remove(run);
            }
            Err(error) => {
                warn!(run.id = %run, "Cannot delete {run}, trying again: {error}");
            }
        }
    }
}

impl Drop for RunUse {
    fn drop(&mut self) {
        if !self.is_over {
            self.engine.temporary_runs.end_use(self.run);
        }
    }
}

/// Has a new or resumed root run deleted after its end if its client wants that.
pub fn track(context: &RunContext, run: &Run) {
    let client = context.run.agent.client.as_ref();
    // A fork has the definition of its source.
    if run.fork.is_none() && client.is_some_and(|client| client.is_temporary) {
        add(&context.engine, run.id);
    }
}

fn add(engine: &Arc<Engine>, id: RunId) {
    if engine.temporary_runs.add(id) {
        // A drain does not wait for it: the run may outlive this process.
        let tasks = &engine.followed.tasks;
        tasks.spawn(delete_at_end(Arc::clone(engine), id));
    }
}

async fn delete_at_end(engine: Arc<Engine>, id: RunId) {
    let unused = async {
        wait_for_end(&engine, id).await;
        engine.temporary_runs.take(id, GRACE).await
    };
    let is_deleted = tokio::select! {
        biased;
        is_deleted = unused => is_deleted,
        // The run may have ended while the daemon drained.
        () = engine.shutdown.cancelled() => engine.temporary_runs.take_unused(id).unwrap_or(false),
    };
    if is_deleted {
        delete(&engine, id).await;
    }
}

async fn delete(engine: &Engine, id: RunId) {
    let mut pause = RETRY_INTERVAL;
    loop {
        match delete_ended(engine, id).await {
            Ok(true) => return,
            // Its webhooks are delivered first.
            Ok(false) => {}
            Err(error) => {
                warn!(run.id = %id, "Cannot delete {id}: {error}");
                if error.is_damage() || matches!(error, StoreError::Closed) {
                    return;
                }
            }
        }
        tokio::select! {
            () = tokio::time::sleep(pause) => pause = MAX_RETRY_INTERVAL.min(2 * pause),
            () = engine.shutdown.cancelled() => return,
        }
    }
}

async fn has_pending_delivery(engine: &Engine, id: RunId) -> Result<bool, StoreError> {
    let deliveries = engine.journal.store().deliveries(id).await?;
    let mut deliveries = deliveries.into_iter();
    Ok(deliveries.any(|delivery| delivery.status == DeliveryStatus::Pending))
}

/// Returns when the run has ended, or if there is none.
async fn wait_for_end(engine: &Arc<Engine>, id: RunId) {
    loop {
        let ended = match engine.active_runs.get(id) {
            Some(run) => run.wait_for_end().await,
            None => wait::wait(engine, id, |run| run.status.is_terminal()).await,
        };
        if ended.is_some() {
            return;
        }
        match engine.journal.store().run(id).await {
            Ok(None) => return,
            Ok(Some(run)) if run.status.is_terminal() => return,
            // Its tree is suspended, or the daemon shuts down.
            Ok(Some(_)) | Err(_) => tokio::time::sleep(RETRY_INTERVAL).await,
        }
    }
}

/// Returns false if the run cannot be deleted yet.
async fn delete_ended(engine: &Engine, id: RunId) -> Result<bool, StoreError> {
    let store = engine.journal.store();
    match store.run(id).await? {
        Some(run) if run.status.is_terminal() => {
            if has_pending_delivery(engine, id).await? {
                return Ok(false);
            }
            store.delete(id).await?;
            Ok(true)
        }
        _ => Ok(true),
    }
}
