//! Runs that are deleted after their end, once no client needs their record any more.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

use crate::domain::run::RunId;

/// Has unfinished root runs, and those that have ended and that a client still uses.
#[derive(Default)]
pub struct TemporaryRuns {
    runs: Mutex<HashMap<RunId, TemporaryRun>>,
}

#[derive(Default)]
struct TemporaryRun {
    /// How many clients need its record.
    uses: usize,
    /// Whether the client that came last wants it to stay.
    is_kept: bool,
    /// Notified of each change of the above.
    changed: Arc<Notify>,
}

impl TemporaryRuns {
    /// Returns false if it was added before.
    pub fn add(&self, id: RunId) -> bool {
        match self.lock().entry(id) {
            Entry::Occupied(_) => false,
            Entry::Vacant(vacant) => {
                vacant.insert(TemporaryRun::default());
                true
            }
        }
    }

    /// Returns false if there is no such run.
    pub fn begin_use(&self, id: RunId, is_kept: bool) -> bool {
        let mut runs = self.lock();
        let Some(run) = runs.get_mut(&id) else {
            return false;
        };
        run.uses += 1;
        run.is_kept = is_kept;
        run.changed.notify_one();
        true
    }

    pub fn end_use(&self, id: RunId) {
        if let Some(run) = self.lock().get_mut(&id) {
            run.uses = run.uses.saturating_sub(1);
            run.changed.notify_one();
        }
    }

    /// Ends a use and returns true, unless it is the last one of a run that is to be deleted: the caller then deletes the run.
    pub fn end_unless_last(&self, id: RunId) -> bool {
        let mut runs = self.lock();
        let Some(run) = runs.get_mut(&id) else {
            return true;
        };
        let is_last = run.uses == 1 && !run.is_kept;
        if !is_last {
            run.uses = run.uses.saturating_sub(1);
            run.changed.notify_one();
        }
        !is_last
    }

    pub fn remove(&self, id: RunId) {
        if let Some(run) = self.lock().remove(&id) {
            run.changed.notify_one();
        }
    }

    /// Removes a run that no client uses, and returns whether it is to be deleted; `None` if a client uses it.
    pub fn take_unused(&self, id: RunId) -> Option<bool> {
        let mut runs = self.lock();
        let is_used = runs.get(&id).is_some_and(|run| run.uses > 0);
        (!is_used).then(|| runs.remove(&id).is_some_and(|run| !run.is_kept))
    }

    /// Like [`TemporaryRuns::take_unused`] once no client uses the run, and not before `grace` has passed: clients at other nodes are
    /// not known here, nor those that are about to come. For one caller a run.
    pub async fn take(&self, id: RunId, grace: Duration) -> bool {
        let removed = async {
            while let Some(changed) = self.changes(id) {
                changed.notified().await;
            }
        };
        let _ = tokio::time::timeout(grace, removed).await;
        loop {
            let Some(changed) = self.changes(id) else {
                return false;
            };
            if let Some(is_deleted) = self.take_unused(id) {
                return is_deleted;
            }
            changed.notified().await;
        }
    }

    /// What is notified of changes.
    fn changes(&self, id: RunId) -> Option<Arc<Notify>> {
        Some(Arc::clone(&self.lock().get(&id)?.changed))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RunId, TemporaryRun>> {
        self.runs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::TemporaryRuns;
    use crate::domain::run::RunId;

    #[test]
    fn the_last_client_decides() {
        let (runs, id) = (TemporaryRuns::default(), RunId::new());
        assert!(!runs.begin_use(id, true), "a run that is not temporary");
        assert!(runs.add(id) && !runs.add(id));
        assert!(runs.begin_use(id, false) && runs.begin_use(id, false));
        assert!(runs.end_unless_last(id));
        assert!(!runs.end_unless_last(id), "the last one");
        assert_eq!(runs.take_unused(id), None, "a client uses it");
        runs.end_use(id);
        assert_eq!(runs.take_unused(id), Some(true));
        assert_eq!(runs.take_unused(id), Some(false), "it is gone");

        assert!(runs.add(id) && runs.begin_use(id, false) && runs.begin_use(id, true));
        assert!(runs.end_unless_last(id) && runs.end_unless_last(id));
        assert_eq!(runs.take_unused(id), Some(false), "the last one keeps it");
    }

    #[tokio::test]
    async fn a_run_is_taken_after_its_last_use() {
        let (runs, id) = (TemporaryRuns::default(), RunId::new());
        let hour = Duration::from_secs(3600);
        runs.add(id);
        let use_twice = async {
            runs.begin_use(id, false);
            tokio::task::yield_now().await;
            runs.begin_use(id, false);
            runs.end_use(id);
            tokio::task::yield_now().await;
            assert!(!runs.end_unless_last(id));
            runs.end_use(id);
        };
        let (is_deleted, ()) = tokio::join!(runs.take(id, Duration::ZERO), use_twice);
        assert!(is_deleted);

        runs.add(id);
        assert!(runs.take(id, Duration::ZERO).await, "no client has come");

        runs.add(id);
        runs.begin_use(id, false);
        let (is_deleted, ()) = tokio::join!(runs.take(id, hour), async { runs.remove(id) });
        assert!(!is_deleted, "its client has deleted it");
    }
}
