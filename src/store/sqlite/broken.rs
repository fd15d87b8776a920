//! Runs that a posted write failed of: their record has a gap, and no later write may hide it. Knows no writes.

use std::collections::HashSet;

use crate::domain::run::RunId;

/// Broken runs that are known one by one; beyond it every run up to the newest of them counts as broken.
const KNOWN: usize = 4_096;

/// Which runs are broken, in bounded memory.
#[derive(Debug, Default)]
pub struct Broken {
    runs: HashSet<RunId>,
    up_to: Option<RunId>,
}

impl Broken {
    /// A write of it was lost.
    pub fn note(&mut self, run: RunId) {
        self.runs.insert(run);
        if self.runs.len() > KNOWN {
            // Ids sort by time, so this breaks older runs that are whole too; but the memory for it has a bound.
            self.up_to = self.runs.drain().max().max(self.up_to);
        }
    }

    /// Whether it is one.
    pub fn contains(&self, run: RunId) -> bool {
        self.up_to.is_some_and(|newest| run <= newest) || self.runs.contains(&run)
    }
}

#[cfg(test)]
mod tests {
    use super::{Broken, KNOWN};
    use crate::domain::run::RunId;

    #[test]
    fn broken_runs_stay_broken_in_bounded_memory() {
        let mut broken = Broken::default();
        let ids: Vec<_> = (0..3 * KNOWN).map(|_| RunId::new()).collect();
        for id in &ids {
            broken.note(*id);
            assert!(broken.runs.len() <= KNOWN);
        }
        assert!(ids.iter().all(|id| broken.contains(*id)));
        assert!(!broken.contains(RunId::new()));
    }
}
