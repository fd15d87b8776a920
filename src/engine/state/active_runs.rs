//! The runs that this process drives, by id.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::domain::run::RunId;
use crate::domain::suspension::SuspensionCause;
use crate::engine::state::active_run::{ActiveRun, SleepAttempt};
use crate::engine::state::kept_reply::ReplySpace;
use crate::engine::state::sleeping_trees::SleepingTrees;
use crate::engine::state::turn_log::LargeBodies;
use crate::store::StoreError;

#[derive(Default)]
pub struct ActiveRuns {
    runs: Mutex<HashMap<RunId, Arc<ActiveRun>>>,
    /// What their turn logs keep together.
    pub large_bodies: LargeBodies,
    /// What their trees keep of replies that could not be recorded.
    pub reply_space: ReplySpace,
}

impl ActiveRuns {
    pub fn add(&self, run: &Arc<ActiveRun>) {
        self.lock().insert(run.scope.run, Arc::clone(run));
    }

    pub fn get(&self, id: RunId) -> Option<Arc<ActiveRun>> {
        self.lock().get(&id).cloned()
    }

    /// The number of runs that are suspended, or wait for approval and are not queued for a permit.
    pub fn idle_count(&self) -> usize {
        let is_idle = |run: &&Arc<ActiveRun>| {
            let is_queued = run.parent.is_none() && run.tree.root_permit.is_queued();
            !is_queued && (run.is_waiting() || run.is_suspended())
        };
        self.lock().values().filter(is_idle).count()
    }

    /// The number of root runs that are suspended.
    pub fn suspended_count(&self) -> usize {
        let runs = self.lock();
        let roots = runs.values().filter(|run| run.parent.is_none());
        roots.filter(|root| root.is_suspended()).count()
    }

    /// The number of runs, including queued ones.
    pub fn count(&self) -> usize {
        self.lock().len()
    }

    /// Why the tree of this root is suspended; `None` if it is not, or if this process does not drive it.
    pub fn suspension(&self, root: RunId) -> Option<SuspensionCause> {
        self.get(root)?.tree.suspension.cause()
    }

    pub fn suspend(&self, root: RunId, error: &StoreError) {
        if let Some(run) = self.get(root) {
            run.suspend(error);
        }
    }

    /// Replaces all runs of `trees` by these roots.
    pub fn replace(&self, trees: &HashSet<RunId>, roots: HashMap<RunId, Arc<ActiveRun>>) {
        let mut runs = self.lock();
        runs.retain(|_, run| !trees.contains(&run.scope.root));
        runs.extend(roots);
    }

    /// Removes those of these trees that only sleep, and adds them to `sleeping`. Returns each root with the number of calls
    /// that wait in its tree. One whose record has another number, in `recorded`, would wake at once: it is looked at again.
    pub fn take_sleeping(
        &self,
        roots: &HashSet<RunId>,
        recorded: &HashMap<RunId, u32>,
        sleeping: &SleepingTrees,
    ) -> Vec<(Arc<ActiveRun>, u32)> {
        let mut runs = self.lock();
        let mut waits: HashMap<RunId, u32> = HashMap::new();
        let mut awake = HashSet::new();
        for run in runs.values().filter(|run| roots.contains(&run.scope.root)) {
            let sleeping = run.clock().pause.sleeping();
            // The time that a person has stands still while a run is held.
            match sleeping.filter(|_| !run.cancel_token.is_cancelled() && !run.is_held()) {
                Some(count) => *waits.entry(run.scope.root).or_default() += count,
                None => drop(awake.insert(run.scope.root)),
            }
            if run.parent.is_some() {
                // It is among what its parent waits for.
                let waits = waits.entry(run.scope.root).or_default();
                *waits = waits.wrapping_sub(1);
            }
        }
        waits.retain(|root, _| !awake.contains(root));
        let asleep = waits.into_iter().filter_map(|(id, waits)| {
            let root = Arc::clone(runs.get(&id)?);
            let attempt = match recorded.get(&id) == Some(&waits) {
                true => root.fall_asleep(),
                false => SleepAttempt::Busy,
            };
            match attempt {
                SleepAttempt::Asleep => return Some((root, waits)),
                SleepAttempt::Busy => sleeping.add_candidate(id),
                SleepAttempt::Awake => {}
            }
            None
        });
        let asleep: Vec<_> = asleep.collect();
        for (root, _) in &asleep {
            sleeping.begin(root.scope.run);
        }
        runs.retain(|_, run| !run.tree.suspension.is_asleep());
        asleep
    }

    pub fn remove(&self, id: RunId) {
        self.lock().remove(&id);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RunId, Arc<ActiveRun>>> {
        self.runs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
