//! Runs that nothing can resume: they fail as `interrupted`, or as the caller says.

use std::sync::Arc;

use crate::domain::failure::Failure;
use crate::domain::run::{Outcome, Run, RunId, Status, now};
use crate::domain::webhook::Webhook;
use crate::engine::context::Engine;
use crate::engine::record::run_record::log_end;
use crate::engine::state::failures;
use crate::store::StoreError;
use crate::store::runs::UnfinishedRun;

/// Fails the remaining orphans of a tree whose root is about to end, deepest first: a child that could not be resumed may
/// have left children.
pub async fn fail_orphans(engine: &Engine, root: RunId) -> Result<(), StoreError> {
    let mut orphans = engine.orphans.take_tree(root);
    if orphans.is_empty() {
        return Ok(());
    }
    orphans.sort_by_key(|orphan| (orphan.run.depth, orphan.run.id));
    let mut outcome = Ok(());
    for orphan in orphans.into_iter().rev() {
        // One that cannot be failed does not keep the others.
        outcome = interrupt(engine, orphan.run.id).await.and(outcome);
    }
    outcome
}

/// Fails runs that no process drives, which have parents before their children: children first.
pub async fn fail_all(
    engine: &Engine,
    unfinished: Vec<UnfinishedRun>,
    failure: impl Fn(&Run) -> Failure,
) -> Result<(), StoreError> {
    for orphan in unfinished.into_iter().rev() {
        let webhooks = orphan.resume_state.as_ref();
        let webhooks = webhooks.map_or(&[][..], |continuation| &continuation.webhooks);
        fail(engine, orphan.run.id, webhooks, &failure).await?;
    }
    Ok(())
}

/// As [`fail_all`], as `interrupted`.
pub async fn interrupt_all(
    engine: &Engine,
    unfinished: Vec<UnfinishedRun>,
) -> Result<(), StoreError> {
    fail_all(engine, unfinished, interruption).await
}

/// Why a run fails that was at work when the daemon stopped and cannot be resumed.
fn interruption(run: &Run) -> Failure {
    failures::interrupted(run.status)
}

/// Fails a child run that cannot be resumed.
pub async fn interrupt(engine: &Engine, id: RunId) -> Result<(), StoreError> {
    fail(engine, id, &[], interruption).await
}

async fn fail(
    engine: &Engine,
    id: RunId,
    webhooks: &[Arc<Webhook>],
    failure: impl Fn(&Run) -> Failure,
) -> Result<(), StoreError> {
    let run = match engine.journal.store().run(id).await {
        Ok(Some(run)) => run,
        Ok(None) => return Ok(()),
        // Its end cannot be recorded either; it must not delay other runs.
        Err(error) if error.is_damage() => {
            tracing::error!(run.id = %id, error = %error, "{id} cannot be failed: {error}");
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    let failure = failure(&run);
    let journal = &engine.journal;
    let closed = journal.close_orphan(&run, webhooks, failure.clone()).await;
    // Who waits for it looks at its record again.
    engine.suspension.changed.notify_waiters();
    match closed {
        Ok(()) => {}
        Err(StoreError::AlreadyTerminal(_) | StoreError::RunNotFound(_)) => return Ok(()),
        Err(error) if error.is_damage() => {
            tracing::error!(run.id = %id, error = %error, "{id} cannot be failed: {error}");
            return Ok(());
        }
        Err(error) => return Err(error),
    }
    let outcome = Outcome::Failed {
        failure: failure.clone(),
        partial: None,
    };
    engine.metrics.run_finished(&run.agent, &outcome, None);
    tracing::warn!(
        run.id = %run.id, run.root = %run.root_id, agent = %run.agent, depth = run.depth.0,
        "{} was {} and nothing can resume it; it fails as {}: {}", run.id, run.status.as_str(), failure.code, failure.message
    );
    log_end(&Run {
        status: Status::Failed,
        error: Some(failure),
        finished_at: Some(now()),
        ..run
    });
    Ok(())
}
