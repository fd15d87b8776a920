//! One root run in a task of its own: waits in line for its slot, is driven, and is let go of where it stands when the
//! house is halted. Does not know how it was accepted.

use std::sync::Arc;
use std::time::Duration;

use crate::domain::event::EventKind;
use crate::domain::run::{Run, RunId};
use crate::engine::entry::{Accepted, Entry};
use crate::engine::live::{Deadline, LiveRun};
use crate::engine::parts::Engine;
use crate::engine::queue::Place;
use crate::engine::{close, drive, record, recovery, remains, turn, waiting};
use crate::store::{Change, Claim, Continuation, Opening, Step};

/// A root run that has been checked.
pub struct Root {
    /// The run at work.
    pub live: Arc<LiveRun>,
    /// One record for the store, the caller and the run itself: thousands wait at once.
    pub run: Arc<Run>,
    /// Its user message.
    pub message: String,
    /// How long it may take from its start.
    pub timeout: Duration,
    /// The idempotency key that accepts it.
    pub claim: Option<Claim>,
    /// Where it begins.
    pub place: Place,
}

impl Root {
    /// Commits the run, tells `accepted`, and works until it has ended or the house is halted.
    pub async fn work(self, engine: Arc<Engine>, accepted: Accepted) {
        let halt = engine.halt.clone();
        let live = Arc::clone(&self.live);
        tokio::select! {
            () = self.run_to_its_end(&engine, accepted) => {}
            () = halt.cancelled() => park(&engine, &live),
            () = waiting::in_vain(&engine, &live) => park(&engine, &live),
        }
    }

    async fn run_to_its_end(self, engine: &Arc<Engine>, accepted: Accepted) {
        let Self {
            live,
            run,
            message,
            timeout,
            claim,
            place,
        } = self;
        let (slot, entry) = match place {
            Place::Slot(slot) => (
                slot,
                Entry::New {
                    accepted: Some(accepted),
                    claim,
                },
            ),
            Place::InLine(place) => {
                if !open_queued(engine, &live, &run, &message, timeout, claim, accepted).await {
                    forget(engine, live.scope.run);
                    return;
                }
                match turn::bounded(&live, place).await {
                    Ok(slot) => (slot, Entry::Queued),
                    Err(_) => return close::cancel_queued(engine, &live, run).await,
                }
            }
        };
        // Its time starts when it starts, not while it is queued.
        live.set_deadline(Deadline::within(timeout));
        drive::drive(engine, &live, run, message, entry, Some(slot)).await;
    }
}

/// A root run that an earlier process left.
pub struct LeftRoot {
    /// The run at work.
    pub live: Arc<LiveRun>,
    /// Its record.
    pub run: Arc<Run>,
    /// How long it may take from its start, where it has not started.
    pub timeout: Duration,
    /// Where it goes on; none where it waits for a person, and needs no slot before it goes on.
    pub place: Option<Place>,
}

impl LeftRoot {
    /// Goes on until it has ended or the house is halted; settles what is left of its tree.
    pub async fn work(self, engine: Arc<Engine>) {
        let halt = engine.halt.clone();
        let live = Arc::clone(&self.live);
        let id = live.scope.run;
        tokio::select! {
            () = self.run_to_its_end(&engine) => {}
            () = halt.cancelled() => return park(&engine, &live),
            () = waiting::in_vain(&engine, &live) => return park(&engine, &live),
        }
        if let Err(error) = recovery::sweep(&engine, id).await {
            tracing::error!(run.root = %id, "What is left of {id} could not be settled: {error}");
        }
    }

    async fn run_to_its_end(self, engine: &Arc<Engine>) {
        let Self {
            live,
            run,
            timeout,
            place,
        } = self;
        let is_queued = run.started_at.is_none();
        // One that had started ends in order without a slot, its children first, where it is stopped or overdue.
        let slot = match place {
            Some(place) => turn::bounded(&live, place.slot()).await.ok(),
            None => None,
        };
        if is_queued && slot.is_none() {
            return close::cancel_queued(engine, &live, run).await;
        }
        let remains = match remains::load(engine, &run).await {
            Ok(remains) => remains,
            Err(error) => {
                tracing::error!(
                    run.id = %run.id, run.root = %run.root_id, agent = %run.agent, depth = run.depth.0,
                    "{} cannot go on, its record cannot be read: {error}", run.id
                );
                return drop(close::leave(engine, &live, Err(error)));
            }
        };
        // What a queued run was asked stands in its record; its prompt is assembled when it starts.
        let message = match &remains.prompt {
            Some((_, message)) => message.clone(),
            None => run.input.clone(),
        };
        tracing::info!(
            run.id = %run.id, run.root = %run.root_id, agent = %run.agent, depth = run.depth.0,
            "Going on with {}, which an earlier process left after {} replies", run.id, remains.replies.len()
        );
        let entry = match is_queued {
            true => {
                live.set_deadline(Deadline::within(timeout));
                Entry::Queued
            }
            false => Entry::Resumed(Box::new(remains)),
        };
        drive::drive(engine, &live, run, message, entry, slot).await;
    }
}

/// Lets go of a root run where it stands.
fn park(engine: &Engine, live: &LiveRun) {
    let id = live.scope.run;
    tracing::info!(run.id = %id, run.root = %id, depth = 0, "{id} stays as last committed; the next start goes on with it");
    forget(engine, id);
    // Who waits for its end waits in vain, and reads how it stands.
    live.announce(None);
}

/// Takes a root run off the list of those at work, and its bell down.
fn forget(engine: &Engine, id: RunId) {
    engine.live.remove(id);
    engine.journal.bells().silence(id);
}

/// Commits a run that waits for a slot; false where that failed.
async fn open_queued(
    engine: &Engine,
    live: &LiveRun,
    run: &Arc<Run>,
    message: &str,
    timeout: Duration,
    claim: Option<Claim>,
    accepted: Accepted,
) -> bool {
    let queued = vec![EventKind::RunQueued {
        parent_id: None,
        tool_call_id: None,
    }];
    // Its context is in no other place; the whole prompt takes this one's place when it starts.
    let asked = Step::Prompt {
        system: String::new(),
        message: message.to_owned(),
    };
    let continuation = Continuation {
        timeout: timeout.as_secs(),
        ..record::continuation(live)
    };
    let change = Change::Open(Box::new(Opening {
        run: Arc::clone(run),
        continuation,
        claim,
    }));
    let committed = engine
        .journal
        .record(live, change, vec![asked], queued)
        .await;
    let is_committed = committed.is_ok();
    // A caller that went away does not stop the run.
    let _ = accepted.send(committed.map(|_| Arc::clone(run)));
    is_committed
}
