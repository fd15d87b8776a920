//! Runs of other nodes that somebody waits for. One task reads the record of a run for all who wait for it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use crate::domain::run::{Run, RunId};

/// The record of a run as it was last read.
pub type Records = watch::Sender<Option<Arc<Run>>>;

#[derive(Default)]
pub struct WatchedRuns {
    runs: Mutex<HashMap<RunId, Records>>,
}

impl WatchedRuns {
    /// The records of a run from now on, and what its task needs if none reads them yet.
    pub fn join(&self, id: RunId) -> (watch::Receiver<Option<Arc<Run>>>, Option<Records>) {
        let mut runs = self.lock();
        if let Some(records) = runs.get(&id) {
            return (records.subscribe(), None);
        }
        let (records, receiver) = watch::channel(None);
        runs.insert(id, records.clone());
        (receiver, Some(records))
    }

    /// Removes a run that has ended or that nobody waits for any more; returns whether it has.
    pub fn remove_if_over(&self, id: RunId, records: &Records, has_ended: bool) -> bool {
        let mut runs = self.lock();
        let is_over = has_ended || records.receiver_count() == 0;
        if is_over {
            runs.remove(&id);
        }
        is_over
    }

    pub fn count(&self) -> usize {
        self.lock().len()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RunId, Records>> {
        self.runs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
