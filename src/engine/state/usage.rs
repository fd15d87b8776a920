//! What a run and its descendants have used so far.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::domain::usage::{TreeUsage, Usage};

/// The usage of one run: its own, and that of its whole subtree.
#[derive(Debug, Default)]
pub struct UsageCounter(Mutex<(Usage, TreeUsage)>);

impl UsageCounter {
    pub fn new(own: Usage, tree: TreeUsage) -> Self {
        Self(Mutex::new((own, tree)))
    }

    /// The run's own usage, and that of its subtree.
    pub fn get(&self) -> (Usage, TreeUsage) {
        *self.lock()
    }

    pub fn add_own(&self, usage: &Usage) {
        self.lock().0.add(usage);
    }

    pub fn add_to_tree(&self, usage: &Usage) {
        self.lock().1.usage.add(usage);
    }

    /// Counts one more run in the subtree.
    pub fn count_run(&self) {
        self.lock().1.runs += 1;
    }

    fn lock(&self) -> MutexGuard<'_, (Usage, TreeUsage)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
