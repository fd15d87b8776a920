//! What stands still while a tree waits for a person's word: the time of every run that has nothing else to do, and the
//! slot of a root that has not. Knows neither what is asked nor who answers.

use std::pin::pin;

use tokio::time::sleep_until;
use tokio_util::sync::CancellationToken;

use crate::domain::event::EventKind;
use crate::engine::context::RunContext;
use crate::engine::state::active_run::ActiveRun;
use crate::engine::state::clock::{PauseChange, Transition};
use crate::engine::state::pause::{PauseEvent, PauseReason};
use crate::engine::state::turn_error::TurnError;
use crate::store::{Change, StoreError};

/// A call that was at work waits from now on. The event is committed before this returns, and whoever reads it finds the
/// run `waiting` where that is all it does.
pub async fn pause(
    context: &RunContext,
    reason: PauseReason,
    event: Option<EventKind>,
) -> Result<(), StoreError> {
    let _guard = context.run.tree.root_permit.update_lock.lock().await;
    propagate_pause(context, PauseEvent::CallPaused(reason)).await?;
    if let Some(event) = event {
        let journal = &context.engine.journal;
        journal
            .append(&context.run, Change::Unchanged, Vec::new(), vec![event])
            .await?;
    }
    Ok(())
}

/// A call that waited is at work again, once its tree has a slot; without one where the run is stopped or overdue, and
/// so has nothing to do but to end.
pub async fn unpause(context: &RunContext, reason: PauseReason) -> Result<(), StoreError> {
    loop {
        let acquired = reacquire_permit(context).await;
        let _guard = context.run.tree.root_permit.update_lock.lock().await;
        if acquired.is_ok() && !context.run.tree.root_permit.is_held() {
            // Others went on and came to rest in between, and gave it back.
            continue;
        }
        return propagate_pause(context, PauseEvent::CallResumed(reason)).await;
    }
}

/// A call has its result.
pub async fn finish_call(context: &RunContext) -> Result<(), StoreError> {
    {
        let mut clock = context.run.clock();
        if !clock.pause.has_waiting_calls() {
            // The run cannot be paused by this.
            clock.apply(PauseEvent::CallFinished);
            return Ok(());
        }
    }
    let _guard = context.run.tree.root_permit.update_lock.lock().await;
    propagate_pause(context, PauseEvent::CallFinished).await
}

/// Sees to it that a run that goes on has its tree's slot, and does not stand as `waiting` in the record: what an earlier
/// process left waiting begins without one. That it is stopped or overdue is for the caller to find out.
pub async fn ensure_running(context: &RunContext) -> Result<(), StoreError> {
    if context.run.tree.root_permit.is_held() && !context.run.clock().pause.is_recorded() {
        return Ok(());
    }
    let _ = reacquire_permit(context).await;
    let _guard = context.run.tree.root_permit.update_lock.lock().await;
    propagate_pause(context, PauseEvent::Resumed).await
}

/// Waits for something within the run's deadline and as long as nobody stops it, as [`crate::engine::run_loop::turn::bounded`] does,
/// but while the run's time, or an ancestor's, may begin to stand still or to go on.
pub async fn within_deadline<T>(
    run: &ActiveRun,
    work: impl Future<Output = T>,
) -> Result<T, TurnError> {
    let mut work = pin!(work);
    loop {
        // Listens before it looks at the clock.
        let mut changed = pin!(run.tree.root_permit.changed.notified());
        changed.as_mut().enable();
        let deadline_passed = async {
            match run.deadline() {
                Some(deadline) => sleep_until(deadline.at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = run.cancel_token.cancelled() => return Err(TurnError::Cancelled),
            output = &mut work => return Ok(output),
            () = &mut changed => {}
            () = deadline_passed => return Err(TurnError::DeadlineExceeded),
        }
    }
}

/// Returns once the house is being left and all that this root does is to wait, for a person or behind one that does in
/// its session, which `left` tells: whoever returns first leaves the session to nobody.
pub async fn suspended(context: &RunContext, session_suspended: Option<CancellationToken>) {
    context.engine.draining.cancelled().await;
    // Without a session nobody else hears it.
    let session_suspended = session_suspended.unwrap_or_default();
    loop {
        let mut changed = pin!(context.run.tree.root_permit.changed.notified());
        changed.as_mut().enable();
        if context.run.is_waiting() {
            // Before its seat is free.
            session_suspended.cancel();
            return;
        }
        tokio::select! {
            () = session_suspended.cancelled() => return,
            () = changed => {}
        }
    }
}

/// Takes a place in line again where the tree has given its slot back.
async fn reacquire_permit(context: &RunContext) -> Result<(), TurnError> {
    let root_permit = &context.run.tree.root_permit;
    if root_permit.is_held() {
        return Ok(());
    }
    let root = context
        .run
        .self_and_ancestors()
        .last()
        .unwrap_or(&context.run);
    let reacquired = async {
        // One slot for the tree, however many of its calls were decided at once.
        let _guard = root_permit.acquire_lock.lock().await;
        if !root_permit.is_held() {
            let owner = context.run.tree.owner.as_deref();
            let admission = context.engine.queue.enter_accepted(owner, &root.agent.name);
            let _queued = root_permit.mark_queued();
            let permit = admission.permit().await;
            root_permit.set(permit);
        }
    };
    within_deadline(&context.run, reacquired).await
}

/// Applies an event to the run, and what it means to the runs above it, and records which of them were paused or
/// resumed. If that pauses the root, its permit is given back.
async fn propagate_pause(context: &RunContext, event: PauseEvent) -> Result<(), StoreError> {
    let mut next = Some((&*context.run, event));
    while let Some((run, event)) = next {
        let PauseChange { transition, record } = run.clock().apply(event);
        if let Some(change) = record {
            context
                .engine
                .journal
                .enqueue(run, change, Vec::new(), Vec::new())
                .await?;
        }
        if let Some(transition) = transition {
            let is_paused = transition == Transition::Paused;
            run.tree.ad_hoc_quotas.set_paused(run.scope.run, is_paused);
        }
        let parent_event = match transition {
            Some(Transition::Paused) => PauseEvent::ChildPaused,
            Some(Transition::Resumed) => PauseEvent::ChildResumed,
            None if event.is_resumption() => PauseEvent::Resumed,
            None => break,
        };
        next = run.parent.as_deref().map(|parent| (parent, parent_event));
        if next.is_none() && transition == Some(Transition::Paused) {
            drop(run.tree.root_permit.take());
        }
    }
    context.run.tree.root_permit.changed.notify_waiters();
    Ok(())
}
