//! The runs that this process drives, by id.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::domain::run::RunId;
use crate::engine::state::active_run::ActiveRun;
use crate::store::StoreError;

/// All runs at work, by id.
#[derive(Default)]
pub struct ActiveRuns {
    runs: Mutex<HashMap<RunId, Arc<ActiveRun>>>,
}

impl ActiveRuns {
    /// Adds one.
    pub fn add(&self, run: &Arc<ActiveRun>) {
        self.lock().insert(run.scope.run, Arc::clone(run));
    }

    /// Finds one.
    pub fn get(&self, id: RunId) -> Option<Arc<ActiveRun>> {
        self.lock().get(&id).cloned()
    }

    /// How many of them do nothing: they are suspended, or wait for an approval and are not queued for a slot to resume.
    pub fn idle_count(&self) -> usize {
        let is_idle = |run: &&Arc<ActiveRun>| {
            let is_queued = run.parent.is_none() && run.tree.root_permit.is_queued();
            !is_queued && (run.is_waiting() || run.is_suspended())
        };
        self.lock().values().filter(is_idle).count()
    }

    /// How many there are, those that wait for a slot included.
    pub fn count(&self) -> usize {
        self.lock().len()
    }

    /// Suspends a tree, if it is at work.
    pub fn suspend(&self, root: RunId, error: &StoreError) {
        if let Some(run) = self.get(root) {
            run.suspend(error);
        }
    }

    /// Puts these roots in the place of all runs of `trees`.
    pub fn replace(&self, trees: &HashSet<RunId>, roots: HashMap<RunId, Arc<ActiveRun>>) {
        let mut runs = self.lock();
        runs.retain(|_, run| !trees.contains(&run.scope.root));
        runs.extend(roots);
    }

    /// Removes one that has ended.
    pub fn remove(&self, id: RunId) {
        self.lock().remove(&id);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RunId, Arc<ActiveRun>>> {
        self.runs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
