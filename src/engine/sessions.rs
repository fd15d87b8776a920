//! Who is at work in which session: one run at a time, the others in the order in which they were accepted. Knows
//! neither slots nor what is said in a session.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use crate::domain::run::RunId;
use crate::engine::live::LiveRun;
use crate::fair::queue::Slot;

/// What a session is known by.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SessionKey {
    /// The key that it belongs to; none without keys.
    pub owner: Option<String>,
    /// Its name.
    pub name: String,
}

/// What becomes of a run whose session is busy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnBusy {
    /// It waits for those before it.
    #[default]
    Queue,
    /// It is not accepted.
    Reject,
    /// Those before it are cancelled.
    CancelPrevious,
}

/// The sessions that have a run which has not ended.
#[derive(Clone, Default)]
pub struct Sessions(Arc<Mutex<HashMap<SessionKey, Busy>>>);

/// A session with runs.
struct Busy {
    /// Its one permit is held by the run at work.
    turn: Arc<Semaphore>,
    /// Cancelled when the run at work is let go of where it stands: it goes on at the next start, before all others.
    left: CancellationToken,
    /// The run at work and those that wait, in their order, each with what is cancelled once it has been accepted, or
    /// will not be.
    runs: Vec<(RunId, CancellationToken)>,
}

impl Sessions {
    /// The last seat of the session for a run whose id is made here, so that ids are in the order of the seats. Where
    /// the session must be free and is not, the run that is at work in it instead, with what is cancelled once that one is
    /// on the record.
    pub fn enter(
        &self,
        key: SessionKey,
        must_be_free: bool,
    ) -> Result<(RunId, Seat), (RunId, CancellationToken)> {
        let mut open = lock(&self.0);
        let at_work = open.get(&key).and_then(|busy| busy.runs.first());
        if let Some(at_work) = at_work.filter(|_| must_be_free) {
            return Err(at_work.clone());
        }
        let id = RunId::new();
        Ok((id, self.sit(&mut open, key, id)))
    }

    /// The last seat for a run that was accepted before.
    pub fn enter_again(&self, key: SessionKey, id: RunId) -> Seat {
        let seat = self.sit(&mut lock(&self.0), key, id);
        seat.accepted.cancel();
        seat
    }

    fn sit(&self, open: &mut HashMap<SessionKey, Busy>, key: SessionKey, run: RunId) -> Seat {
        let busy = open.entry(key.clone()).or_insert_with(|| Busy {
            turn: Arc::new(Semaphore::new(1)),
            left: CancellationToken::new(),
            runs: Vec::new(),
        });
        let accepted = CancellationToken::new();
        busy.runs.push((run, accepted.clone()));
        // The first poll stands in line, so it must not be put off for the sake of other tasks.
        let wait = tokio::task::unconstrained(Arc::clone(&busy.turn).acquire_owned());
        let mut wait: BoxFuture<'static, _> = Box::pin(wait);
        let turn = match (&mut wait).now_or_never() {
            Some(permit) => Turn::Come {
                _permit: permit.ok(),
            },
            None => Turn::Waits(wait),
        };
        Seat {
            sessions: self.clone(),
            left: busy.left.clone(),
            accepted,
            key,
            run,
            turn,
        }
    }
}

/// A run's place in its session. Whoever drops it has left the session, and the next one's turn comes.
pub struct Seat {
    sessions: Sessions,
    left: CancellationToken,
    accepted: CancellationToken,
    key: SessionKey,
    run: RunId,
    turn: Turn,
}

enum Turn {
    Come {
        _permit: Option<OwnedSemaphorePermit>,
    },
    Waits(BoxFuture<'static, Result<OwnedSemaphorePermit, AcquireError>>),
}

impl Seat {
    /// Whether others come before it.
    pub fn waits(&self) -> bool {
        matches!(self.turn, Turn::Waits(_))
    }

    /// Comes back when all before it have left.
    pub async fn turn(&mut self) {
        if let Turn::Waits(wait) = &mut self.turn {
            // Nobody closes the semaphore.
            let permit = wait.await.ok();
            self.turn = Turn::Come { _permit: permit };
        }
    }

    /// Cancelled by the run at work when it is let go of where it stands: nobody's turn comes after that.
    pub fn left(&self) -> CancellationToken {
        self.left.clone()
    }

    /// To be cancelled once the run is on the record.
    pub fn accepted(&self) -> CancellationToken {
        self.accepted.clone()
    }

    /// Those that come before it now, in their order, each with what is cancelled once it has been accepted, or will not
    /// be.
    pub fn before(&self) -> Vec<(RunId, CancellationToken)> {
        let open = lock(&self.sessions.0);
        let runs = open
            .get(&self.key)
            .map_or(&[][..], |busy| busy.runs.as_slice());
        runs.iter()
            .take_while(|(run, _)| *run != self.run)
            .cloned()
            .collect()
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        // Its permit goes after this, so that whoever finds the session free can enter it at once.
        self.accepted.cancel();
        let mut open = lock(&self.sessions.0);
        if let Some(busy) = open.get_mut(&self.key) {
            busy.runs.retain(|(run, _)| *run != self.run);
            if busy.runs.is_empty() {
                open.remove(&self.key);
            }
        }
    }
}

/// What a root run gives back when it has ended, before anybody hears of that.
#[derive(Default)]
pub struct Held<'s> {
    /// Its slot, once it has one.
    pub slot: Option<Slot>,
    /// Its seat in a session, which outlives a suspension.
    pub seat: Option<&'s mut Option<Seat>>,
}

impl Held<'_> {
    /// Gives everything back, unless the run's tree is suspended before it `has_ended`: then it keeps its order.
    pub fn release(self, live: &LiveRun, has_ended: bool) {
        if live.is_suspended() && !has_ended {
            if let Some(slot) = self.slot {
                live.tree.slot.put(slot);
            }
            return;
        }
        if live.parent.is_none() {
            drop(live.tree.slot.take());
        }
        drop(self.slot);
        if let Some(seat) = self.seat {
            drop(seat.take());
        }
    }
}

fn lock(open: &Mutex<HashMap<SessionKey, Busy>>) -> MutexGuard<'_, HashMap<SessionKey, Busy>> {
    open.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::{Seat, SessionKey, Sessions};

    fn key(owner: Option<&str>) -> SessionKey {
        SessionKey {
            owner: owner.map(str::to_owned),
            name: "talk".to_owned(),
        }
    }

    fn has_come(seat: &mut Seat) -> bool {
        seat.turn().now_or_never().is_some()
    }

    #[test]
    fn one_at_a_time_in_the_order_of_their_coming() {
        let sessions = Sessions::default();
        let enter = || sessions.enter(key(None), false).expect("a seat");
        let (first_id, first) = enter();
        let (second_id, mut second) = enter();
        let (third_id, mut third) = enter();
        let (_, mut fourth) = enter();
        assert!(first_id < second_id && second_id < third_id);
        assert!(!first.waits() && second.waits() && third.waits());
        let before: Vec<_> = third.before().into_iter().map(|(run, _)| run).collect();
        assert_eq!(before, [first_id, second_id]);
        assert_eq!(
            sessions
                .enter(key(None), true)
                .err()
                .map(|at_work| at_work.0),
            Some(first_id)
        );
        assert!(sessions.enter(key(Some("ada")), true).is_ok());
        // One that goes before its turn lets nobody pass the one at work.
        drop(third);
        assert!(!has_come(&mut second) && !has_come(&mut fourth));
        drop(first);
        assert!(!has_come(&mut fourth));
        assert!(has_come(&mut second));
        drop(second);
        assert!(has_come(&mut fourth));
        drop(fourth);
        assert!(super::lock(&sessions.0).is_empty());
        third = sessions.enter(key(None), true).expect("free").1;
        assert!(!third.waits());
    }
}
