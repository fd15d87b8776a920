//! What stands still while a tree waits for a person's word: the time of every run that has nothing else to do, and the
//! slot of a root that has not. Knows neither what is asked nor who answers.

use std::pin::pin;

use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::domain::event::EventKind;
use crate::domain::run::{WaitingFor, now};
use crate::engine::context::RunContext;
use crate::engine::state::active_run::ActiveRun;
use crate::engine::state::turn_error::TurnError;
use crate::store::{Change, StoreError};

/// What a call of a run does.
#[derive(Clone, Copy, Debug)]
pub enum PauseReason {
    /// It waits for a person's word.
    Approval,
    /// It waits for its turn among its siblings.
    Queue,
    /// No call, but a turn: it waits for its batch.
    Batch,
}

/// A call that was at work waits from now on. The event is committed before this returns, and whoever reads it finds the
/// run `waiting` where that is all it does.
pub async fn pause(
    context: &RunContext,
    reason: PauseReason,
    event: Option<EventKind>,
) -> Result<(), StoreError> {
    let _guard = context.run.tree.root_permit.update_lock.lock().await;
    {
        let mut clock = context.run.clock();
        match reason {
            PauseReason::Approval => {
                clock.running_calls = clock.running_calls.saturating_sub(1);
                clock.waiting_calls += 1;
                clock.pending_approvals += 1;
            }
            PauseReason::Queue => clock.running_calls = clock.running_calls.saturating_sub(1),
            PauseReason::Batch => {
                clock.waiting_calls += 1;
                clock.has_pending_batch = true;
            }
        }
    }
    propagate_pause(context, false).await?;
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
        {
            let mut clock = context.run.clock();
            match reason {
                PauseReason::Approval => {
                    clock.running_calls += 1;
                    clock.waiting_calls = clock.waiting_calls.saturating_sub(1);
                    clock.pending_approvals = clock.pending_approvals.saturating_sub(1);
                }
                PauseReason::Queue => clock.running_calls += 1,
                PauseReason::Batch => {
                    clock.waiting_calls = clock.waiting_calls.saturating_sub(1);
                    clock.has_pending_batch = false;
                }
            }
        }
        return propagate_pause(context, true).await;
    }
}

/// A call has its result.
pub async fn finish_call(context: &RunContext) -> Result<(), StoreError> {
    {
        let mut clock = context.run.clock();
        if clock.waiting_calls == 0 {
            // Nothing can begin to stand still for it.
            clock.running_calls = clock.running_calls.saturating_sub(1);
            return Ok(());
        }
    }
    let _guard = context.run.tree.root_permit.update_lock.lock().await;
    {
        let mut clock = context.run.clock();
        clock.running_calls = clock.running_calls.saturating_sub(1);
    }
    propagate_pause(context, false).await
}

/// Sees to it that a run that goes on has its tree's slot, and does not stand as `waiting` in the record: what an earlier
/// process left waiting begins without one. That it is stopped or overdue is for the caller to find out.
pub async fn ensure_running(context: &RunContext) -> Result<(), StoreError> {
    if context.run.tree.root_permit.is_held() && !context.run.clock().is_pause_recorded {
        return Ok(());
    }
    let _ = reacquire_permit(context).await;
    let _guard = context.run.tree.root_permit.update_lock.lock().await;
    propagate_pause(context, true).await
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

/// Finds out who stands still now, from this run upwards, and writes it down. `goes` says that this run is at work: then
/// neither it nor what is above it stands as `waiting` in the record.
async fn propagate_pause(context: &RunContext, is_running: bool) -> Result<(), StoreError> {
    let mut next = Some(&*context.run);
    while let Some(run) = next {
        let (pause_change, change) = update_pause(run, is_running);
        if let Some(change) = change {
            context
                .engine
                .journal
                .enqueue(run, change, Vec::new(), Vec::new())
                .await?;
        }
        next = run.parent.as_deref();
        if let Some(is_paused) = pause_change {
            run.tree.ad_hoc_quotas.set_paused(run.scope.run, is_paused);
        }
        match (pause_change, next) {
            (Some(true), Some(parent)) => {
                let mut clock = parent.clock();
                clock.running_calls = clock.running_calls.saturating_sub(1);
                clock.waiting_calls += 1;
            }
            (Some(false), Some(parent)) => {
                let mut clock = parent.clock();
                clock.running_calls += 1;
                clock.waiting_calls = clock.waiting_calls.saturating_sub(1);
            }
            (Some(true), None) => drop(context.run.tree.root_permit.take()),
            (None, _) if !is_running => break,
            (Some(false) | None, _) => {}
        }
    }
    context.run.tree.root_permit.changed.notify_waiters();
    Ok(())
}

/// Stops or starts a run's clock: whether it stands still now, where that is new, and what the record is to be told.
fn update_pause(run: &ActiveRun, is_running: bool) -> (Option<bool>, Option<Change>) {
    let mut clock = run.clock();
    let is_paused = clock.waiting_calls > 0 && clock.running_calls == 0;
    let pause_change = match (is_paused, clock.paused_since) {
        (true, None) => {
            clock.paused_since = Some(Instant::now());
            Some(true)
        }
        (false, Some(since)) => {
            clock.paused_since = None;
            if let Some(deadline) = clock.deadline.as_mut().filter(|it| it.at > since) {
                deadline.at += since.elapsed();
            }
            Some(false)
        }
        _ => None,
    };
    let change = match (is_paused, clock.is_pause_recorded) {
        (true, false) => {
            clock.is_pause_recorded = true;
            let waiting_for = match (clock.has_pending_batch, clock.pending_approvals) {
                (true, _) => WaitingFor::Batch,
                (false, 0) => WaitingFor::Children,
                (false, _) => WaitingFor::Approval,
            };
            Some(Change::Pause {
                since: now(),
                waiting_for,
            })
        }
        (false, true) if is_running => {
            clock.is_pause_recorded = false;
            clock.deadline.map(|deadline| Change::Unpause {
                deadline: deadline.to_wall_clock(),
            })
        }
        _ => None,
    };
    (pause_change, change)
}
