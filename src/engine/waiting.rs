//! What stands still while a tree waits for a person's word: the time of every run that has nothing else to do, and the
//! slot of a root that has not. Knows neither what is asked nor who answers.

use std::pin::pin;

use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::domain::event::EventKind;
use crate::domain::run::{WaitingFor, now};
use crate::engine::live::LiveRun;
use crate::engine::parts::Engine;
use crate::engine::record;
use crate::engine::turn_error::TurnError;
use crate::store::{Change, StoreError};

/// What a call of a run does.
#[derive(Clone, Copy, Debug)]
pub enum Call {
    /// It waits for a person's word.
    Asks,
    /// It waits for its turn among its siblings.
    Queues,
    /// No call, but a turn: it waits for its batch.
    Batch,
}

/// A call that was at work waits from now on. The event is committed before this returns, and whoever reads it finds the
/// run `waiting` where that is all it does.
pub async fn rest(
    engine: &Engine,
    live: &LiveRun,
    call: Call,
    event: Option<EventKind>,
) -> Result<(), StoreError> {
    let _turn = live.tree.slot.turn.lock().await;
    {
        let mut clock = live.clock();
        match call {
            Call::Asks => {
                clock.at_work = clock.at_work.saturating_sub(1);
                clock.asking += 1;
                clock.approvals += 1;
            }
            Call::Queues => clock.at_work = clock.at_work.saturating_sub(1),
            Call::Batch => {
                clock.asking += 1;
                clock.in_batch = true;
            }
        }
    }
    settle(engine, live, false).await?;
    if let Some(event) = event {
        let journal = &engine.journal;
        journal
            .record(live, Change::Nothing, Vec::new(), vec![event])
            .await?;
    }
    Ok(())
}

/// A call that waited is at work again, once its tree has a slot; without one where the run is stopped or overdue, and
/// so has nothing to do but to end.
pub async fn go(engine: &Engine, live: &LiveRun, call: Call) -> Result<(), StoreError> {
    loop {
        let held = hold(engine, live).await;
        let _turn = live.tree.slot.turn.lock().await;
        if held.is_ok() && !live.tree.slot.is_held() {
            // Others went on and came to rest in between, and gave it back.
            continue;
        }
        {
            let mut clock = live.clock();
            match call {
                Call::Asks => {
                    clock.at_work += 1;
                    clock.asking = clock.asking.saturating_sub(1);
                    clock.approvals = clock.approvals.saturating_sub(1);
                }
                Call::Queues => clock.at_work += 1,
                Call::Batch => {
                    clock.asking = clock.asking.saturating_sub(1);
                    clock.in_batch = false;
                }
            }
        }
        return settle(engine, live, true).await;
    }
}

/// A call has its result.
pub async fn done(engine: &Engine, live: &LiveRun) -> Result<(), StoreError> {
    {
        let mut clock = live.clock();
        if clock.asking == 0 {
            // Nothing can begin to stand still for it.
            clock.at_work = clock.at_work.saturating_sub(1);
            return Ok(());
        }
    }
    let _turn = live.tree.slot.turn.lock().await;
    {
        let mut clock = live.clock();
        clock.at_work = clock.at_work.saturating_sub(1);
    }
    settle(engine, live, false).await
}

/// Sees to it that a run that goes on has its tree's slot, and does not stand as `waiting` in the record: what an earlier
/// process left waiting begins without one. That it is stopped or overdue is for the caller to find out.
pub async fn resume(engine: &Engine, live: &LiveRun) -> Result<(), StoreError> {
    if live.tree.slot.is_held() && !live.clock().is_told {
        return Ok(());
    }
    let _ = hold(engine, live).await;
    let _turn = live.tree.slot.turn.lock().await;
    settle(engine, live, true).await
}

/// Waits for something within the run's deadline and as long as nobody stops it, as [`crate::engine::turn::bounded`] does,
/// but while the run's time, or an ancestor's, may begin to stand still or to go on.
pub async fn until<T>(live: &LiveRun, work: impl Future<Output = T>) -> Result<T, TurnError> {
    let mut work = pin!(work);
    loop {
        // Listens before it looks at the clock.
        let mut changed = pin!(live.tree.slot.changed.notified());
        changed.as_mut().enable();
        let overdue = async {
            match live.deadline() {
                Some(deadline) => sleep_until(deadline.at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = live.stop.cancelled() => return Err(TurnError::Stopped),
            done = &mut work => return Ok(done),
            () = &mut changed => {}
            () = overdue => return Err(TurnError::Overdue),
        }
    }
}

/// Returns once the house is being left and all that this root does is to wait, for a person or behind one that does in
/// its session, which `left` tells: whoever returns first leaves the session to nobody.
pub async fn in_vain(engine: &Engine, root: &LiveRun, left: Option<CancellationToken>) {
    engine.draining.cancelled().await;
    // Without a session nobody else hears it.
    let left = left.unwrap_or_default();
    loop {
        let mut changed = pin!(root.tree.slot.changed.notified());
        changed.as_mut().enable();
        if root.is_waiting() {
            // Before its seat is free.
            left.cancel();
            return;
        }
        tokio::select! {
            () = left.cancelled() => return,
            () = changed => {}
        }
    }
}

/// Takes a place in line again where the tree has given its slot back.
async fn hold(engine: &Engine, live: &LiveRun) -> Result<(), TurnError> {
    let seat = &live.tree.slot;
    if seat.is_held() {
        return Ok(());
    }
    let root = live.upwards().last().unwrap_or(live);
    let entered = async {
        // One slot for the tree, however many of its calls were decided at once.
        let _first = seat.coming.lock().await;
        if !seat.is_held() {
            let owner = live.tree.owner.as_deref();
            let place = engine.queue.enter_again(owner, &root.agent.name);
            let _in_line = seat.in_line();
            let slot = place.slot().await;
            seat.put(slot);
        }
    };
    until(live, entered).await
}

/// Finds out who stands still now, from this run upwards, and writes it down. `goes` says that this run is at work: then
/// neither it nor what is above it stands as `waiting` in the record.
async fn settle(engine: &Engine, live: &LiveRun, goes: bool) -> Result<(), StoreError> {
    let mut next = Some(live);
    while let Some(run) = next {
        let (turned, change) = turn_over(run, goes);
        if let Some(change) = change {
            engine
                .journal
                .note(run, change, Vec::new(), Vec::new())
                .await?;
        }
        next = run.parent.as_deref();
        if let Some(stands) = turned {
            run.tree.quotas.stand_still(run.scope.run, stands);
        }
        match (turned, next) {
            (Some(true), Some(parent)) => {
                let mut clock = parent.clock();
                clock.at_work = clock.at_work.saturating_sub(1);
                clock.asking += 1;
            }
            (Some(false), Some(parent)) => {
                let mut clock = parent.clock();
                clock.at_work += 1;
                clock.asking = clock.asking.saturating_sub(1);
            }
            (Some(true), None) => drop(live.tree.slot.take()),
            (None, _) if !goes => break,
            (Some(false) | None, _) => {}
        }
    }
    live.tree.slot.changed.notify_waiters();
    Ok(())
}

/// Stops or starts a run's clock: whether it stands still now, where that is new, and what the record is to be told.
fn turn_over(run: &LiveRun, goes: bool) -> (Option<bool>, Option<Change>) {
    let mut clock = run.clock();
    let stands = clock.asking > 0 && clock.at_work == 0;
    let turned = match (stands, clock.stands_since) {
        (true, None) => {
            clock.stands_since = Some(Instant::now());
            Some(true)
        }
        (false, Some(since)) => {
            clock.stands_since = None;
            if let Some(deadline) = clock.deadline.as_mut().filter(|it| it.at > since) {
                deadline.at += since.elapsed();
            }
            Some(false)
        }
        _ => None,
    };
    let change = match (stands, clock.is_told) {
        (true, false) => {
            clock.is_told = true;
            let on = match (clock.in_batch, clock.approvals) {
                (true, _) => WaitingFor::Batch,
                (false, 0) => WaitingFor::Children,
                (false, _) => WaitingFor::Approval,
            };
            Some(Change::Waiting { since: now(), on })
        }
        (false, true) if goes => {
            clock.is_told = false;
            clock.deadline.map(|deadline| Change::Going {
                deadline: record::on_the_calendar(deadline),
            })
        }
        _ => None,
    };
    (turned, change)
}
