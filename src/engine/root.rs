//! One root run in a task of its own: waits in line for its slot, is driven, and is let go of where it stands when the
//! house is halted. Does not know how it was accepted.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use crate::domain::event::EventKind;
use crate::domain::run::{Run, RunId, Status};
use crate::engine::cancel::{self, Cancels};
use crate::engine::close::{Ending, How};
use crate::engine::entry::{Accepted, Entry};
use crate::engine::live::{Deadline, LiveRun};
use crate::engine::parts::Engine;
use crate::engine::recovery::Revived;
use crate::engine::resolve::Input;
use crate::engine::sessions::{Held, Seat, SessionKey};
use crate::engine::{close, drive, record, recovery, remains, suspension, turn, waiting, workdir};
use crate::fair::queue::{Place, Slot};
use crate::store::{Change, Claim, Continuation, Opening, Step};

/// A root run that has been checked.
pub struct Root {
    /// The run at work.
    pub live: Arc<LiveRun>,
    /// One record for the store, the caller and the run itself: thousands wait at once.
    pub run: Arc<Run>,
    /// What its model is asked, but for what its session holds.
    pub input: Input,
    /// How long it may take from its start.
    pub timeout: Duration,
    /// The idempotency key that accepts it.
    pub claim: Option<Claim>,
    /// Where it begins.
    pub place: Place,
    /// Its place in its session.
    pub seat: Option<Seat>,
    /// Whether those before it in its session are cancelled.
    pub cancels: bool,
}

impl Root {
    /// Commits the run, tells `accepted`, and works until it has ended or the house is halted.
    pub async fn work(mut self, engine: Arc<Engine>, accepted: Accepted) {
        let halt = engine.halt.clone();
        let live = Arc::clone(&self.live);
        let mut seat = self.seat.take();
        let left = seat.as_ref().map(Seat::left);
        tokio::select! {
            () = self.run_to_its_end(&engine, accepted, &mut seat) => {}
            () = halt.cancelled() => return park(&engine, &live),
            () = waiting::in_vain(&engine, &live, left) => return park(&engine, &live),
        }
        if live.is_suspended() {
            suspension::suspend(&engine, &live, seat);
        }
    }

    async fn run_to_its_end(
        self,
        engine: &Arc<Engine>,
        accepted: Accepted,
        seat: &mut Option<Seat>,
    ) {
        let Self {
            live,
            run,
            input,
            timeout,
            claim,
            place,
            cancels,
            ..
        } = self;
        let mut input = input;
        let id = run.id;
        let (slot, entry) = match place {
            Place::Slot(slot) => (
                slot,
                Entry::New {
                    accepted: Some(accepted),
                    claim,
                },
            ),
            place => {
                workdir::remember(engine, &live).await;
                let before = seat.as_ref().filter(|_| cancels).map(Seat::before);
                let before = cancel::those_before(engine, before.unwrap_or_default(), id).await;
                let opening = opening(&live, &run, &input, timeout, claim);
                if !open_queued(engine, &live, &run, opening, before, accepted).await {
                    if !live.is_suspended() {
                        forget(engine, live.scope.run);
                    }
                    return;
                }
                input.drop_data();
                let slot = turn::bounded(&live, its_slot(engine, seat.as_mut(), place)).await;
                match slot {
                    Ok(slot) => (slot, Entry::Queued),
                    Err(_) => {
                        let held = Held {
                            slot: None,
                            seat: Some(seat),
                        };
                        let ending = Ending::of(How::Stopped);
                        close::without_loop(engine, &live, run, ending, held).await;
                        return;
                    }
                }
            }
        };
        // Its time starts when it starts, not while it is queued.
        live.set_deadline(Deadline::within(timeout));
        let held = Held {
            slot: Some(slot),
            seat: Some(seat),
        };
        drive::drive(engine, &live, run, input, entry, held).await;
    }
}

/// A root run that is taken up from its record.
pub struct LeftRoot {
    /// The run at work.
    pub live: Arc<LiveRun>,
    /// Its record.
    pub run: Arc<Run>,
    /// How long it may take from its start, where it has not started.
    pub timeout: Duration,
    /// Where it goes on; none where it waits for a person, and needs no slot before it goes on.
    pub place: Option<Place>,
    /// Its place in its session.
    pub seat: Option<Seat>,
}

impl LeftRoot {
    /// Goes on until it has ended or the house is halted; settles what is left of its tree.
    pub async fn work(mut self, engine: Arc<Engine>) {
        let halt = engine.halt.clone();
        let live = Arc::clone(&self.live);
        let mut seat = self.seat.take();
        let left = seat.as_ref().map(Seat::left);
        tokio::select! {
            () = self.run_to_its_end(&engine, &mut seat) => {}
            () = halt.cancelled() => return park(&engine, &live),
            () = waiting::in_vain(&engine, &live, left) => return park(&engine, &live),
        }
        if !live.is_suspended()
            && let Err(error) = recovery::sweep(&engine, live.scope.run).await
        {
            live.suspend(&error);
        }
        if live.is_suspended() {
            suspension::suspend(&engine, &live, seat);
        }
    }

    async fn run_to_its_end(self, engine: &Arc<Engine>, seat: &mut Option<Seat>) {
        let Self {
            live,
            run,
            timeout,
            place,
            ..
        } = self;
        let is_queued = run.started_at.is_none();
        // One that had started ends in order without a slot, its children first, where it is stopped or overdue.
        let slot = match place {
            Some(place) => {
                let slot = its_slot(engine, seat.as_mut(), place);
                turn::bounded(&live, slot).await.ok()
            }
            None => None,
        };
        let held = Held {
            slot,
            seat: Some(seat),
        };
        if is_queued && held.slot.is_none() {
            let ending = Ending::of(How::Stopped);
            close::without_loop(engine, &live, run, ending, held).await;
            return;
        }
        let remains = match remains::load(engine, &run).await {
            Ok(remains) => remains,
            Err(error) => {
                close::without_loop(engine, &live, run, error.into(), held).await;
                return;
            }
        };
        // What a queued run was asked stands in its record; its prompt is assembled when it starts.
        let input = match &remains.prompt {
            Some(prompt) => prompt.input.clone(),
            None => Input::from(run.input.clone()),
        };
        tracing::info!(
            run.id = %run.id, run.root = %run.root_id, agent = %run.agent, depth = run.depth.0,
            "Going on with {} from its record, after {} replies", run.id, remains.replies.len()
        );
        let entry = match is_queued {
            true => {
                live.set_deadline(Deadline::within(timeout));
                Entry::Queued
            }
            false => Entry::Resumed(Box::new(remains)),
        };
        drive::drive(engine, &live, run, input, entry, held).await;
    }
}

/// Sets recovered root runs to work. What a suspended one kept of its order is in `kept`.
pub fn go_on(
    engine: &Arc<Engine>,
    mut revived: Vec<Revived>,
    mut kept: HashMap<RunId, (Option<Slot>, Option<Seat>)>,
) {
    // Those that had a slot come first: their time runs. The others keep their order, all before anybody new.
    revived.sort_by_key(|revived| revived.run.started_at.is_none());
    for Revived { live, run, timeout } in revived {
        engine.live.add(&live);
        let owner = run.owner.as_deref();
        let (slot, seat) = kept.remove(&run.id).unwrap_or_default();
        let seat = seat.or_else(|| {
            let key = SessionKey {
                owner: run.owner.clone(),
                name: run.session.clone()?,
            };
            Some(engine.sessions.enter_again(key, run.id))
        });
        // One that waits for a person needs no slot before it goes on.
        let is_ready = run.status != Status::Waiting;
        let place = match slot {
            Some(slot) => Some(Place::Slot(slot)),
            None => is_ready.then(|| match seat.as_ref().is_some_and(Seat::waits) {
                true => engine.queue.stand_aside_again(owner, &live.agent.name),
                false => engine.queue.enter_again(owner, &live.agent.name),
            }),
        };
        let left = LeftRoot {
            live,
            run,
            timeout: Duration::from_secs(timeout),
            place,
            seat,
        };
        engine.tasks.spawn(left.work(Arc::clone(engine)));
    }
}

/// The run's slot: first its turn in its session comes, where it has one.
async fn its_slot(engine: &Engine, seat: Option<&mut Seat>, place: Place) -> Slot {
    if let Some(seat) = seat {
        seat.turn().await;
        if engine.halt.is_cancelled() || seat.left().is_cancelled() {
            // The one before it was let go of where it stands, and goes on before it at the next start.
            std::future::pending::<()>().await;
        }
    }
    place.slot().await
}

/// Lets go of a root run where it stands.
pub fn park(engine: &Engine, live: &LiveRun) {
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

/// The first entry of a run that waits for a slot.
fn opening(
    live: &LiveRun,
    run: &Arc<Run>,
    input: &Input,
    timeout: Duration,
    claim: Option<Claim>,
) -> (Change, Step) {
    // Its context is in no other place; the whole prompt takes this one's place when it starts.
    let asked = Step::Prompt {
        system: String::new(),
        message: input.message.clone(),
        earlier: input.earlier.clone(),
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
    (change, asked)
}

/// Commits a run that waits for a slot together with the cancels of those that it replaces; false where that failed.
async fn open_queued(
    engine: &Engine,
    live: &LiveRun,
    run: &Arc<Run>,
    (change, asked): (Change, Step),
    before: Cancels<'_>,
    accepted: Accepted,
) -> bool {
    let queued = vec![EventKind::RunQueued {
        parent_id: None,
        tool_call_id: None,
    }];
    let journal = &engine.journal;
    let committed = match before.is_empty() {
        true => journal.record(live, change, vec![asked], queued).await,
        false => {
            let opened = journal.record_with(live, change, asked, queued, before.writes());
            opened.await
        }
    };
    let is_committed = committed.is_ok();
    if is_committed {
        before.settle();
    }
    // A caller that went away does not stop the run.
    let _ = accepted.send(committed.map(|_| Arc::clone(run)));
    is_committed
}
