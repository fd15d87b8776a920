//! Deletes temporary runs after their end, once the clients that wait for them have the result, or have gone away.

use std::sync::Arc;
use std::time::Duration;

use tracing::warn;

use crate::domain::run::{Run, RunId};
use crate::engine::cluster::wait;
use crate::engine::context::{Engine, RunContext};
use crate::store::StoreError;

/// The pause after a failure.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// How long an ended run stays of which this process has seen no client: its client may wait at another node, or come back after
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
    loop {
        let Err(error) = delete_ended(engine, id).await else {
            return;
        };
        warn!(run.id = %id, "Cannot delete {id}: {error}");
        if matches!(error, StoreError::Closed | StoreError::Corrupt(_)) {
            return;
        }
        tokio::select! {
            () = tokio::time::sleep(RETRY_INTERVAL) => {}
            () = engine.shutdown.cancelled() => return,
        }
    }
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

async fn delete_ended(engine: &Engine, id: RunId) -> Result<(), StoreError> {
    let store = engine.journal.store();
    match store.run(id).await? {
        Some(run) if run.status.is_terminal() => store.delete(id).await.map(drop),
        _ => Ok(()),
    }
}
