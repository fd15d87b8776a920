//! Sessions: one run at a time, in the order of acceptance.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use crate::domain::run::RunId;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SessionKey {
    /// The key that the session belongs to; `None` without keys.
    pub owner: Option<String>,
    pub name: String,
}

/// What happens to a new run if its session has an unfinished one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnBusy {
    /// The run waits.
    #[default]
    Queue,
    /// The run is rejected.
    Reject,
    /// The unfinished runs are cancelled.
    CancelPrevious,
}

/// The sessions that have unfinished runs.
#[derive(Clone, Default)]
pub struct Sessions(Arc<Mutex<HashMap<SessionKey, ActiveSession>>>);

struct ActiveSession {
    /// The running run holds the only permit.
    semaphore: Arc<Semaphore>,
    /// Cancelled if the running run is suspended for a shutdown: it is resumed before the others at the next start.
    suspended: CancellationToken,
    /// The unfinished runs in their order, each with a token that is cancelled once the run was accepted or rejected.
    runs: Vec<(RunId, CancellationToken)>,
}

impl Sessions {
    /// Adds a new run at the end of the session. Its id is made here, so that ids are in the order of the session. If
    /// the session must be free and is not, returns its running run and the token that is cancelled once that one is
    /// recorded.
    pub fn enter(
        &self,
        key: SessionKey,
        must_be_free: bool,
    ) -> Result<(RunId, SessionGuard), (RunId, CancellationToken)> {
        let mut sessions = lock(&self.0);
        let active = sessions.get(&key).and_then(|session| session.runs.first());
        if let Some(active) = active.filter(|_| must_be_free) {
            return Err(active.clone());
        }
        let id = RunId::new();
        Ok((id, self.enqueue(&mut sessions, key, id)))
    }

    /// Adds a run that was accepted before.
    pub fn enter_accepted(&self, key: SessionKey, id: RunId) -> SessionGuard {
        let guard = self.enqueue(&mut lock(&self.0), key, id);
        guard.accepted.cancel();
        guard
    }

    fn enqueue(
        &self,
        sessions: &mut HashMap<SessionKey, ActiveSession>,
        key: SessionKey,
        run: RunId,
    ) -> SessionGuard {
        let session = sessions
            .entry(key.clone())
            .or_insert_with(|| ActiveSession {
                semaphore: Arc::new(Semaphore::new(1)),
                suspended: CancellationToken::new(),
                runs: Vec::new(),
            });
        let accepted = CancellationToken::new();
        session.runs.push((run, accepted.clone()));
        // The first poll enters the semaphore's queue, so it must not be deferred in favour of other tasks.
        let acquire = tokio::task::unconstrained(Arc::clone(&session.semaphore).acquire_owned());
        let mut acquire: BoxFuture<'static, _> = Box::pin(acquire);
        let state = match (&mut acquire).now_or_never() {
            Some(permit) => GuardState::Acquired {
                _permit: permit.ok(),
            },
            None => GuardState::Waiting(acquire),
        };
        SessionGuard {
            sessions: self.clone(),
            suspended: session.suspended.clone(),
            accepted,
            key,
            run,
            state,
        }
    }
}

/// A run's place in its session. Dropping it lets the next run start.
pub struct SessionGuard {
    sessions: Sessions,
    suspended: CancellationToken,
    accepted: CancellationToken,
    key: SessionKey,
    run: RunId,
    state: GuardState,
}

enum GuardState {
    Acquired {
        _permit: Option<OwnedSemaphorePermit>,
    },
    Waiting(BoxFuture<'static, Result<OwnedSemaphorePermit, AcquireError>>),
}

impl SessionGuard {
    pub fn is_waiting(&self) -> bool {
        matches!(self.state, GuardState::Waiting(_))
    }

    /// Waits until all earlier runs have left the session.
    pub async fn acquire(&mut self) {
        if let GuardState::Waiting(acquire) = &mut self.state {
            // The semaphore is never closed.
            let permit = acquire.await.ok();
            self.state = GuardState::Acquired { _permit: permit };
        }
    }

    /// Cancelled if the running run is suspended for a shutdown: no other run of the session starts after that.
    pub fn suspended(&self) -> CancellationToken {
        self.suspended.clone()
    }

    /// To be cancelled once the run is recorded.
    pub fn accepted(&self) -> CancellationToken {
        self.accepted.clone()
    }

    /// The runs before this one in their order, each with a token that is cancelled once the run was accepted or
    /// rejected.
    pub fn preceding_runs(&self) -> Vec<(RunId, CancellationToken)> {
        let sessions = lock(&self.sessions.0);
        let runs = sessions
            .get(&self.key)
            .map_or(&[][..], |session| session.runs.as_slice());
        runs.iter()
            .take_while(|(run, _)| *run != self.run)
            .cloned()
            .collect()
    }
}

impl Drop for SessionGuard {
    fn drop(&mut self) {
        // The permit is released after this, so that a caller that finds the session free can enter it at once.
        self.accepted.cancel();
        let mut sessions = lock(&self.sessions.0);
        if let Some(session) = sessions.get_mut(&self.key) {
            session.runs.retain(|(run, _)| *run != self.run);
            if session.runs.is_empty() {
                sessions.remove(&self.key);
            }
        }
    }
}

fn lock(
    sessions: &Mutex<HashMap<SessionKey, ActiveSession>>,
) -> MutexGuard<'_, HashMap<SessionKey, ActiveSession>> {
    sessions.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::{SessionGuard, SessionKey, Sessions};

    fn key(owner: Option<&str>) -> SessionKey {
        SessionKey {
            owner: owner.map(str::to_owned),
            name: "talk".to_owned(),
        }
    }

    fn has_acquired(guard: &mut SessionGuard) -> bool {
        guard.acquire().now_or_never().is_some()
    }

    #[test]
    fn one_run_at_a_time_in_order_of_arrival() {
        let sessions = Sessions::default();
        let enter = || sessions.enter(key(None), false).expect("a free slot");
        let (first_id, first) = enter();
        let (second_id, mut second) = enter();
        let (third_id, mut third) = enter();
        let (_, mut fourth) = enter();
        assert!(first_id < second_id && second_id < third_id);
        assert!(!first.is_waiting() && second.is_waiting() && third.is_waiting());
        let before: Vec<_> = third
            .preceding_runs()
            .into_iter()
            .map(|(run, _)| run)
            .collect();
        assert_eq!(before, [first_id, second_id]);
        assert_eq!(
            sessions
                .enter(key(None), true)
                .err()
                .map(|at_work| at_work.0),
            Some(first_id)
        );
        assert!(sessions.enter(key(Some("ada")), true).is_ok());
        // A waiting run that leaves does not let others pass the running one.
        drop(third);
        assert!(!has_acquired(&mut second) && !has_acquired(&mut fourth));
        drop(first);
        assert!(!has_acquired(&mut fourth));
        assert!(has_acquired(&mut second));
        drop(second);
        assert!(has_acquired(&mut fourth));
        drop(fourth);
        assert!(super::lock(&sessions.0).is_empty());
        third = sessions.enter(key(None), true).expect("free").1;
        assert!(!third.is_waiting());
    }
}
