//! Pauses runs and resumes them on behalf of clients. A paused run and all below it stop at their next step; the record
//! knows it, so that they stay paused after a restart.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::domain::event::{EventKind, ResumeCause};
use crate::domain::run::{Run, RunId, Status};
use crate::engine::context::Engine;
use crate::engine::control::second_look;
use crate::engine::state::active_run::ActiveRun;
use crate::store::{Change, StoreError};

/// Why a run was not paused or resumed.
#[derive(Debug, thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HoldError {
    #[error("there is no run {0}")]
    RunNotFound(RunId),
    #[error("{run} is {}: it can neither be paused nor resumed", .status.as_str())]
    RunEnded { run: RunId, status: Status },
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Commits the pause, or its end, and puts it in force. Returns false if the record has it already; then it is put in force too,
/// because the commit of an earlier request may have succeeded although its answer was lost.
pub async fn set_held(
    engine: &Arc<Engine>,
    id: RunId,
    is_held: bool,
    by: Option<String>,
) -> Result<bool, HoldError> {
    let _guard = engine.hold_lock.lock().await;
    let _gate = engine.suspension.resume_lock.read().await;
    let run = engine.journal.store().run(id).await?;
    let run = run.ok_or(HoldError::RunNotFound(id))?;
    if run.status.is_terminal() {
        let status = run.status;
        return Err(HoldError::RunEnded { run: id, status });
    }
    let (change, event) = entry(&run, is_held, by);
    let active_run = engine.active_runs.get(id);
    let journal = &engine.journal;
    let written = match &active_run {
        Some(active_run) => {
            journal
                .append_request(active_run, change, vec![event.into()])
                .await
        }
        None => journal.append_inactive(&run, change, event.into()).await,
    };
    let is_changed = match written {
        Ok(event) => event > 0,
        Err(StoreError::AlreadyTerminal(_)) => {
            let run = engine.journal.store().run(id).await?;
            let status = run.map_or(Status::Cancelling, |run| run.status);
            return Err(HoldError::RunEnded { run: id, status });
        }
        Err(error) => {
            if error.may_be_recorded() {
                spawn_look(engine, id, active_run);
            }
            return Err(error.into());
        }
    };
    put_in_force(engine, id, is_held);
    Ok(is_changed)
}

fn put_in_force(engine: &Engine, id: RunId, is_held: bool) {
    // In this order: the parent of an inactive run may reach it meanwhile.
    if !engine.orphans.set_held(id, is_held)
        && let Some(active_run) = engine.active_runs.get(id)
    {
        active_run.set_held(is_held);
        if !is_held {
            engine.sleeping_trees.add_candidate(active_run.scope.root);
        }
    }
}

/// Puts in force what the record has of the run: the commit may have succeeded although its answer was lost.
fn spawn_look(engine: &Arc<Engine>, id: RunId, run: Option<Arc<ActiveRun>>) {
    let owner = Arc::clone(engine);
    second_look::spawn(engine, run, move || look(Arc::clone(&owner), id));
}

/// Returns false: the commit may be on its way.
async fn look(engine: Arc<Engine>, id: RunId) -> Result<bool, StoreError> {
    let _guard = engine.hold_lock.lock().await;
    let _gate = engine.suspension.resume_lock.read().await;
    let is_held = engine.journal.store().is_held(id).await?;
    put_in_force(&engine, id, is_held);
    Ok(false)
}

fn entry(run: &Run, is_held: bool, by: Option<String>) -> (Change, EventKind) {
    match is_held {
        true => (Change::Hold, EventKind::RunPaused { by }),
        false => {
            let event = EventKind::RunResumed {
                attempt: run.attempt,
                cause: ResumeCause::Request,
                by,
            };
            (Change::Release, event)
        }
    }
}
