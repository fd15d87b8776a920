//! Cancels runs: the cancel is recorded first, then the run and its descendants are stopped.

use std::pin::pin;
use std::sync::Arc;

use tokio::sync::RwLockReadGuard;
use tokio_util::sync::CancellationToken;

use crate::domain::event::EventKind;
use crate::domain::run::{RunId, Status};
use crate::engine::context::Engine;
use crate::engine::control::second_look;
use crate::engine::record::journal;
use crate::engine::state::active_run::{ActiveRun, CancelState};
use crate::store::run_store::RunStore;
use crate::store::{Change, StoreError, Write};

/// Cancels a run with its descendants. Returns once the cancel is recorded or the run has ended by itself; does nothing
/// if there is no such run. A run that is not driven at the moment (the daemon drains, its tree is suspended, or its parent has
/// not reached it since a restart) ends when it is resumed.
pub async fn cancel(engine: &Arc<Engine>, id: RunId, reason: &str) -> Result<(), StoreError> {
    let run = {
        let _gate = engine.suspension.resume_lock.read().await;
        let run = engine.active_runs.get(id);
        match &run {
            // The store works, so that a cancel can be recorded, although the tree cannot be driven.
            Some(run) if run.is_suspended() && !run.tree.suspension.is_by_store() => {
                cancel_inactive(engine, id, reason).await?;
            }
            Some(run) => cancel_active(engine, run, reason).await?,
            None => cancel_inactive(engine, id, reason).await?,
        }
        run
    };
    match run {
        Some(run) if run.is_ending() => await_end(&run).await,
        _ => Ok(()),
    }
}

async fn cancel_active(
    engine: &Engine,
    run: &Arc<ActiveRun>,
    reason: &str,
) -> Result<(), StoreError> {
    let Some(reason) = begin_cancel(run, reason) else {
        return Ok(());
    };
    let (change, event) = cancel_entry(&reason);
    let recorded = engine
        .journal
        .append_request(run, change, vec![event.into()])
        .await
        .map(drop);
    match &recorded {
        Ok(()) => run.cancel(&reason),
        Err(error) => withdraw(engine, run, error.may_be_recorded()),
    }
    recorded
}

/// Withdraws a cancel that was not recorded. If it may be, the run is stopped once its cancel is found in the record.
fn withdraw(engine: &Engine, run: &Arc<ActiveRun>, may_be_recorded: bool) {
    run.withdraw_cancel();
    if !may_be_recorded {
        return;
    }
    let run = Arc::clone(run);
    let store = Arc::clone(engine.journal.store());
    let cancelled = Arc::clone(&run);
    second_look::spawn(engine, Some(run), move || {
        look(Arc::clone(&store), Arc::clone(&cancelled))
    });
}

/// Returns true if the run needs no further look.
async fn look(store: Arc<dyn RunStore>, run: Arc<ActiveRun>) -> Result<bool, StoreError> {
    let record = store.run(run.scope.run).await?;
    Ok(match record {
        Some(record) if record.status == Status::Cancelling => {
            run.cancel(&record.cancel_reason.unwrap_or_default());
            true
        }
        Some(record) => record.status.is_terminal(),
        None => true,
    })
}

/// The reason to record, `None` if nothing is to be recorded. Two concurrent cancels record the reason of the first:
/// the store ignores the second write, and either may be it.
fn begin_cancel(run: &ActiveRun, reason: &str) -> Option<String> {
    match run.begin_cancel(reason) {
        CancelState::Recorded | CancelState::TooLate => None,
        CancelState::Started => Some(reason.to_owned()),
        CancelState::Pending(first) => Some(first),
    }
}

/// Waits for the end of a run that is ending by itself; fails if the end cannot be recorded.
async fn await_end(run: &ActiveRun) -> Result<(), StoreError> {
    match run.wait_for_end().await {
        None if run.is_suspended() => Err(StoreError::Suspended),
        _ => Ok(()),
    }
}

async fn cancel_inactive(engine: &Arc<Engine>, id: RunId, reason: &str) -> Result<(), StoreError> {
    let Some(run) = engine.journal.store().run(id).await? else {
        return Ok(());
    };
    if run.status.is_terminal() {
        return Ok(());
    }
    if run.status != Status::Cancelling {
        let (change, event) = cancel_entry(reason);
        let journal = &engine.journal;
        let written = journal.append_inactive(&run, change, event.into());
        if let Err(error) = written.await {
            if error.may_be_recorded() {
                let owner = Arc::clone(engine);
                second_look::spawn(engine, None, move || look_inactive(Arc::clone(&owner), id));
            }
            return Err(error);
        }
    }
    // Also for a cancel whose commit succeeded although its answer was lost.
    engine.sleeping_trees.wake(run.root_id);
    stop(engine, id, run.cancel_reason.as_deref().unwrap_or(reason));
    Ok(())
}

/// Stops a run whose cancel is recorded, or whose caller ends.
pub fn stop(engine: &Engine, id: RunId, reason: &str) {
    // In this order: its parent may reach it meanwhile.
    if !engine.orphans.cancel(id, reason)
        && let Some(active_run) = engine.active_runs.get(id)
    {
        active_run.cancel(reason);
    }
}

/// As [`look`], for a run that was not driven when its cancel was requested.
async fn look_inactive(engine: Arc<Engine>, id: RunId) -> Result<bool, StoreError> {
    let _gate = engine.suspension.resume_lock.read().await;
    let record = engine.journal.store().run(id).await?;
    Ok(match record {
        Some(record) if record.status == Status::Cancelling => {
            engine.sleeping_trees.wake(record.root_id);
            stop(&engine, id, &record.cancel_reason.unwrap_or_default());
            true
        }
        Some(record) => record.status.is_terminal(),
        None => true,
    })
}

/// The runs that a new one replaces in its session. Their cancels are recorded together with its acceptance.
pub struct PendingCancels<'e> {
    engine: &'e Engine,
    runs: Vec<(Arc<ActiveRun>, String)>,
    /// Prevents that the runs are resumed in the meantime.
    _gate: Option<RwLockReadGuard<'e, ()>>,
}

/// The reason for the cancel of a run whose place in its session `successor` takes.
pub fn replaced_by(successor: RunId) -> String {
    format!("{successor} takes its place in the session")
}

/// Begins to cancel the runs before `successor` in its session, once each is recorded.
pub async fn begin_cancels(
    engine: &Engine,
    predecessors: Vec<(RunId, CancellationToken)>,
    successor: RunId,
) -> PendingCancels<'_> {
    let reason = replaced_by(successor);
    let mut runs = Vec::new();
    if predecessors.is_empty() {
        return PendingCancels {
            engine,
            runs,
            _gate: None,
        };
    }
    for (root, accepted) in &predecessors {
        accepted.cancelled().await;
        wake(engine, *root).await;
    }
    let gate = engine.suspension.resume_lock.read().await;
    // The last one first, so that none starts because the run before it ended.
    for (id, _) in predecessors.into_iter().rev() {
        let run = engine.active_runs.get(id);
        runs.extend(run.and_then(|run| {
            let reason = begin_cancel(&run, &reason)?;
            Some((run, reason))
        }));
    }
    PendingCancels {
        engine,
        runs,
        _gate: Some(gate),
    }
}

/// Waits until a tree is awake.
async fn wake(engine: &Engine, root: RunId) {
    while engine.sleeping_trees.contains(root) {
        // Subscribe before looking, so that no change is missed.
        let mut changed = pin!(engine.suspension.changed.notified());
        changed.as_mut().enable();
        engine.sleeping_trees.wake(root);
        if engine.sleeping_trees.contains(root) {
            tokio::select! {
                () = changed => {}
                () = engine.draining.cancelled() => return,
            }
        }
    }
}

impl PendingCancels<'_> {
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    pub fn writes(&self) -> Vec<Write> {
        let write = |(run, reason): &(Arc<ActiveRun>, String)| {
            let (change, event) = cancel_entry(reason);
            journal::build_write(run, change, vec![event.into()])
        };
        self.runs.iter().map(write).collect()
    }

    /// Stops the runs if their cancels were recorded with this outcome, else withdraws these.
    pub fn settle<T>(mut self, committed: &Result<T, StoreError>) {
        match committed {
            Ok(_) => {
                for (run, reason) in std::mem::take(&mut self.runs) {
                    run.cancel(&reason);
                }
            }
            Err(error) => self.withdraw(error.may_be_recorded()),
        }
    }

    fn withdraw(&mut self, may_be_recorded: bool) {
        for (run, _) in std::mem::take(&mut self.runs) {
            withdraw(self.engine, &run, may_be_recorded);
        }
    }
}

impl Drop for PendingCancels<'_> {
    /// Without [`PendingCancels::settle`] nobody knows whether they were recorded.
    fn drop(&mut self) {
        self.withdraw(true);
    }
}

fn cancel_entry(reason: &str) -> (Change, EventKind) {
    let reason = reason.to_owned();
    let event = EventKind::RunCancelling {
        reason: reason.clone(),
    };
    (Change::RequestCancel { reason }, event)
}
