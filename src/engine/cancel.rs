//! Cancels runs: the record says so first, then the run and its descendants are stopped. A cancel that cannot be recorded
//! never was.

use std::sync::Arc;

use tokio::sync::RwLockReadGuard;
use tokio_util::sync::CancellationToken;

use crate::domain::event::EventKind;
use crate::domain::run::{RunId, Status};
use crate::engine::journal;
use crate::engine::live::{CancelState, LiveRun};
use crate::engine::parts::Engine;
#[cfg(doc)]
use crate::engine::sessions::Seat;
use crate::store::{Change, StoreError, Write};

/// Cancels a run with its descendants. Returns once the record says so, or the run has ended by itself; does nothing
/// where there is no such run. One that nobody drives at this moment (the daemon drains, or its parent has not come to it
/// since a restart) ends when it is taken up.
pub async fn cancel(engine: &Engine, id: RunId, reason: &str) -> Result<(), StoreError> {
    let live = {
        let _gate = engine.suspension.gate.read().await;
        let live = engine.live.get(id);
        match &live {
            Some(live) => cancel_live(engine, live, reason).await?,
            None => cancel_undriven(engine, id, reason).await?,
        }
        live
    };
    match live {
        Some(live) if live.is_ending() => end_of(&live).await,
        _ => Ok(()),
    }
}

async fn cancel_live(engine: &Engine, live: &LiveRun, reason: &str) -> Result<(), StoreError> {
    let Some(reason) = begin(live, reason) else {
        return Ok(());
    };
    let (change, event) = cancelling(&reason);
    let journal = &engine.journal;
    let recorded = journal.record_request(live, change, event).await;
    match recorded {
        Ok(()) => live.cancel(&reason),
        Err(_) => live.withdraw_cancel(),
    }
    recorded
}

/// The reason to record, `None` if nothing is to be recorded. Two cancels at once record the same reason, that of the
/// first: the store ignores the second write, and either may be it.
fn begin(live: &LiveRun, reason: &str) -> Option<String> {
    match live.begin_cancel(reason) {
        CancelState::Recorded | CancelState::TooLate => None,
        CancelState::Began => Some(reason.to_owned()),
        CancelState::Pending(first) => Some(first),
    }
}

/// Waits for the end of a run that is ending by itself; fails where that cannot be recorded.
async fn end_of(live: &LiveRun) -> Result<(), StoreError> {
    match live.ended().await {
        None if live.is_suspended() => Err(StoreError::Suspended),
        _ => Ok(()),
    }
}

async fn cancel_undriven(engine: &Engine, id: RunId, reason: &str) -> Result<(), StoreError> {
    let Some(run) = engine.journal.store().run(id).await? else {
        return Ok(());
    };
    if run.status.is_terminal() || run.status == Status::Cancelling {
        return Ok(());
    }
    let (change, event) = cancelling(reason);
    engine.journal.record_undriven(&run, change, event).await?;
    if engine.left.cancel(id, reason) {
        return Ok(());
    }
    // Its parent may have come to it meanwhile.
    if let Some(live) = engine.live.get(id) {
        live.cancel(reason);
    }
    Ok(())
}

/// The runs that a new one replaces in its session, whose cancels are recorded with its acceptance.
pub struct Cancels<'e> {
    runs: Vec<(Arc<LiveRun>, String)>,
    /// None of them is taken up from its record meanwhile.
    _gate: Option<RwLockReadGuard<'e, ()>>,
}

/// Those that come before the run `by` in its session (see [`Seat::before`]), once each is on the record.
pub async fn those_before(
    engine: &Engine,
    before: Vec<(RunId, CancellationToken)>,
    by: RunId,
) -> Cancels<'_> {
    let reason = format!("{by} takes its place in the session");
    let mut runs = Vec::new();
    if before.is_empty() {
        return Cancels { runs, _gate: None };
    }
    for (_, accepted) in &before {
        accepted.cancelled().await;
    }
    let gate = engine.suspension.gate.read().await;
    // The last first: none of them is to start because the one before it has ended.
    for (before, _) in before.into_iter().rev() {
        let live = engine.live.get(before);
        runs.extend(live.and_then(|live| {
            let reason = begin(&live, &reason)?;
            Some((live, reason))
        }));
    }
    Cancels {
        runs,
        _gate: Some(gate),
    }
}

impl Cancels<'_> {
    /// Whether there is nobody to cancel.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// What is to be recorded.
    pub fn writes(&self) -> Vec<Write> {
        let write = |(live, reason): &(Arc<LiveRun>, String)| {
            let (change, event) = cancelling(reason);
            journal::entry(live, change, Vec::new(), vec![event])
        };
        self.runs.iter().map(write).collect()
    }

    /// Their cancels are on the record: stops the runs.
    pub fn settle(mut self) {
        for (live, reason) in std::mem::take(&mut self.runs) {
            live.cancel(&reason);
        }
    }
}

impl Drop for Cancels<'_> {
    /// Who is not cancelled by now will not be.
    fn drop(&mut self) {
        for (live, _) in &self.runs {
            live.withdraw_cancel();
        }
    }
}

fn cancelling(reason: &str) -> (Change, EventKind) {
    let reason = reason.to_owned();
    let event = EventKind::RunCancelling {
        reason: reason.clone(),
    };
    (Change::Cancelling { reason }, event)
}
