//! Pauses a tree that only waits: the time limits of its paused runs are suspended, and its root's permit is released.

use std::pin::pin;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::domain::event::EventKind;
use crate::domain::waiting_for::WaitingFor;
use crate::engine::cluster::permits;
use crate::engine::context::RunContext;
use crate::engine::record::journal;
use crate::engine::state::active_run::ActiveRun;
use crate::engine::state::clock::{PauseChange, Transition};
use crate::engine::state::pause::{BackgroundEvent, PauseEvent, PauseReason};
use crate::engine::state::turn_error::TurnError;
use crate::record::entry::Entry;
use crate::store::{Change, StoreError};

/// Marks a running call as waiting. The event is committed before this returns; a reader of the event finds the run
/// `waiting` if all its calls wait.
pub async fn pause(
    context: &RunContext,
    reason: PauseReason,
    event: Option<EventKind>,
) -> Result<(), StoreError> {
    let guard = context.run.tree.root_permit.update_lock.lock().await;
    let recorded = propagate_pause(context, PauseEvent::CallPaused(reason), event).await?;
    drop(guard);
    commit(context, recorded).await
}

/// Marks a waiting call as running, once its tree has a permit, and commits it if the run waits no more. A run that
/// is cancelled or overdue needs no permit, because it only ends.
pub async fn unpause(context: &RunContext, reason: PauseReason) -> Result<(), StoreError> {
    loop {
        let acquired = reacquire_permit(context).await;
        let guard = context.run.tree.root_permit.update_lock.lock().await;
        if acquired.is_ok() && !context.run.tree.root_permit.is_held() {
            // Other calls were resumed and paused in between, and gave the permit back.
            continue;
        }
        let recorded = propagate_pause(context, PauseEvent::CallResumed(reason), None).await?;
        drop(guard);
        return commit(context, recorded).await;
    }
}

/// Waits while a client has paused the run, or one above it.
///
/// # Errors
/// The run is cancelled or overdue, or the pause could not be recorded.
pub async fn wait_while_held(context: &RunContext, reason: PauseReason) -> Result<(), TurnError> {
    if !context.run.is_held() {
        return Ok(());
    }
    Box::pin(async {
        pause(context, reason, None).await?;
        let released = wait_for_release(&context.run).await;
        unpause(context, reason).await?;
        released
    })
    .await
}

/// Ends the wait of a call for this; if the run is held, the call then waits until it is not.
pub async fn end_call_wait(context: &RunContext, waited_for: WaitingFor) -> Result<(), StoreError> {
    if !context.run.is_held() {
        return unpause(context, PauseReason::Call(waited_for)).await;
    }
    let held = PauseReason::Call(WaitingFor::Resume);
    let change = PauseEvent::CallChanged {
        from: PauseReason::Call(waited_for),
        to: held,
    };
    let guard = context.run.tree.root_permit.update_lock.lock().await;
    let recorded = propagate_pause(context, change, None).await?;
    drop(guard);
    commit(context, recorded).await?;
    // A run that is cancelled or overdue meanwhile ends the call soon.
    let _ = wait_for_release(&context.run).await;
    unpause(context, held).await
}

async fn wait_for_release(run: &ActiveRun) -> Result<(), TurnError> {
    let released = async {
        loop {
            // Subscribe before looking, so that no change is missed.
            let mut changed = pin!(run.tree.root_permit.changed.notified());
            changed.as_mut().enable();
            if !run.is_held() {
                return;
            }
            changed.await;
        }
    };
    within_deadline(run, released).await
}

/// Marks a running call as finished.
pub async fn finish_call(context: &RunContext) -> Result<(), StoreError> {
    finish(context, PauseEvent::CallFinished).await
}

/// Marks a child of the run that worked in the background as ended.
pub async fn finish_in_background(context: &RunContext) -> Result<(), StoreError> {
    finish(context, PauseEvent::Background(BackgroundEvent::Ended)).await
}

async fn finish(context: &RunContext, event: PauseEvent) -> Result<(), StoreError> {
    {
        let mut clock = context.run.clock();
        if !clock.pause.has_waiting_calls() {
            // This cannot pause the run.
            clock.apply(event);
            return Ok(());
        }
    }
    let guard = context.run.tree.root_permit.update_lock.lock().await;
    let recorded = propagate_pause(context, event, None).await?;
    drop(guard);
    commit(context, recorded).await
}

/// Ensures that the tree has a permit and that the record does not say `waiting`: a run that an earlier process left
/// waiting starts without a permit. The caller checks whether the run is cancelled or overdue.
pub async fn ensure_running(context: &RunContext) -> Result<(), StoreError> {
    if context.run.tree.root_permit.is_held() && !context.run.clock().pause.is_recorded() {
        return Ok(());
    }
    // Boxed: every turn has space for it, and few runs come here.
    Box::pin(resume_tree(context)).await
}

async fn resume_tree(context: &RunContext) -> Result<(), StoreError> {
    let _ = reacquire_permit(context).await;
    let guard = context.run.tree.root_permit.update_lock.lock().await;
    let recorded = propagate_pause(context, PauseEvent::Resumed, None).await?;
    drop(guard);
    commit(context, recorded).await
}

/// Where the changes of a call are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Recorded {
    /// In the record, or there were none. Those of other calls may be in the queue, ahead of what this one records next.
    Settled,
    /// In the queue of the store.
    Queued,
}

/// Waits until queued changes are in the record, and notifies again those who have looked before. It is done
/// without the lock, so that ends of waits share a commit.
async fn commit(context: &RunContext, recorded: Recorded) -> Result<(), StoreError> {
    if recorded == Recorded::Queued {
        let journal = &context.engine.journal;
        let committed = journal.append(&context.run, Change::Unchanged, Vec::new());
        committed.await?;
        context.run.tree.root_permit.changed.notify_waiters();
    }
    Ok(())
}

/// Waits for `work` until the run's deadline or its cancel. In contrast to the function of the same name in `limits`,
/// the deadline may move because the run, or one above it, is paused meanwhile.
pub async fn within_deadline<T>(
    run: &ActiveRun,
    work: impl Future<Output = T>,
) -> Result<T, TurnError> {
    let mut work = pin!(work);
    loop {
        // Subscribe before reading the deadline, so that no change is missed.
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

/// Sleeps for this time, to which the time does not count for which a client has paused the run.
pub async fn sleep_unless_held(run: &ActiveRun, mut remaining: Duration) {
    loop {
        // Subscribe before looking, so that no change is missed.
        let mut changed = pin!(run.tree.root_permit.changed.notified());
        changed.as_mut().enable();
        if run.is_held() {
            changed.await;
            continue;
        }
        let since = Instant::now();
        tokio::select! {
            () = tokio::time::sleep(remaining) => return,
            () = changed => remaining = remaining.saturating_sub(since.elapsed()),
        }
    }
}

/// Resolves when the daemon drains and this root only waits, or is queued behind such a run of its session, or waits for a permit
/// that any node may give: another one takes it over.
/// `session_suspended` is that session's token: no other run of the session starts afterwards.
pub async fn suspended(context: &RunContext, session_suspended: Option<CancellationToken>) {
    context.engine.draining.cancelled().await;
    // Without a session, nobody else has the token.
    let session_suspended = session_suspended.unwrap_or_default();
    let permits = &context.engine.cluster_permits;
    loop {
        let mut changed = pin!(context.run.tree.root_permit.changed.notified());
        let mut began_waiting = pin!(permits.began_waiting.notified());
        changed.as_mut().enable();
        began_waiting.as_mut().enable();
        if context.run.is_idle() || permits.is_waiting(context.run.scope.root) {
            // Before its place in the session is free.
            session_suspended.cancel();
            return;
        }
        tokio::select! {
            () = session_suspended.cancelled() => return,
            () = changed => {}
            () = began_waiting => {}
        }
    }
}

/// Queues for a permit again if the tree gave its permit back.
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
        // One permit for the tree, however many of its calls were decided at once.
        let _guard = root_permit.acquire_lock.lock().await;
        if !root_permit.is_held() {
            let owner = context.run.tree.owner.as_deref();
            let _queued = root_permit.mark_queued();
            permits::acquire_again(&context.engine, root).await;
            let admission = context.engine.queue.enter_again(owner, &root.agent.name);
            let permit = admission.permit().await;
            root_permit.set(permit);
        }
    };
    within_deadline(&context.run, reacquired).await
}

/// Applies an event to the run and its consequences to the runs above it, and records which runs were paused or
/// resumed. A paused root gives its permit back. `event_kind` is an event of this run: who sees it sees the runs wait, and who
/// sees one of them wait sees all that it waits for.
async fn propagate_pause(
    context: &RunContext,
    event: PauseEvent,
    event_kind: Option<EventKind>,
) -> Result<Recorded, StoreError> {
    let mut changes = Vec::new();
    let mut paused_root = None;
    let mut next = Some((&*context.run, event));
    while let Some((run, event)) = next {
        let PauseChange { transition, record } = run.clock().apply(event);
        changes.extend(record.map(|change| (run, change)));
        if let Some(transition) = transition {
            let is_paused = !matches!(transition, Transition::Resumed(_));
            run.tree.ad_hoc_quotas.set_paused(run.scope.run, is_paused);
        }
        let parent_event = match transition {
            Some(Transition::Paused(reason)) => PauseEvent::ChildPaused(reason),
            Some(Transition::Resumed(reason)) => PauseEvent::ChildResumed(reason),
            Some(Transition::Changed { from, to }) => PauseEvent::ChildChanged { from, to },
            None if event.is_work() => PauseEvent::Resumed,
            None => break,
        };
        next = run.parent.as_deref().map(|parent| {
            let is_background = parent.has_in_background(run.scope.run);
            match is_background {
                true => (parent, parent_event.in_background()),
                false => (parent, parent_event),
            }
        });
        if next.is_none() && matches!(transition, Some(Transition::Paused(_))) {
            paused_root = Some(run);
        }
        if next.is_none() && run.clock().pause.sleeping().is_some() {
            context.engine.sleeping_trees.add_candidate(run.scope.run);
        }
    }
    let recorded = record_changes(context, changes, event_kind).await?;
    if let Some(root) = paused_root {
        // Another call must not queue for the permit before it is given back: that would remove the tree from the queue.
        let _not_acquired = root.tree.root_permit.acquire_lock.lock().await;
        let bytes = root.tree.conversation_bytes.load(Ordering::Relaxed);
        let held_bytes = context.engine.queued_bytes.hold(bytes);
        root.tree.root_permit.release(held_bytes);
        permits::release(&context.engine, root.scope.run).await;
    }
    context.run.tree.root_permit.changed.notify_waiters();
    Ok(recorded)
}

/// Records the changes of a run and of those above it. Pauses and the event are committed together before anyone is notified:
/// clients that wait for them find them in the record. Ends of waits are queued.
async fn record_changes(
    context: &RunContext,
    changes: Vec<(&ActiveRun, Change)>,
    event: Option<EventKind>,
) -> Result<Recorded, StoreError> {
    let journal = &context.engine.journal;
    if event.is_none() && changes.is_empty() {
        return Ok(Recorded::Settled);
    }
    let is_pause = |(_, change): &(&ActiveRun, Change)| matches!(change, Change::Pause { .. });
    if event.is_none() && !changes.iter().any(is_pause) {
        for (run, change) in changes {
            let queued = journal.enqueue(run, change, Vec::new());
            queued.await?;
        }
        return Ok(Recorded::Queued);
    }
    let (mut own, mut others) = (Change::Unchanged, Vec::new());
    for (run, change) in changes {
        match run.scope.run == context.run.scope.run {
            true => own = change,
            false => others.push(journal::build_write(run, change, Vec::new())),
        }
    }
    let entries = event.into_iter().map(Entry::from).collect();
    let write = journal::build_write(&context.run, own, entries);
    let committed = journal.append_with(&context.run, write, others);
    committed.await.map(|_| Recorded::Settled)
}
