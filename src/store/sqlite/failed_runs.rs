//! Trees that lack a posted write that failed: no later write may hide the gap until their owner has stopped them and goes
//! on from what is committed. Knows no writes.

use std::collections::HashSet;

use crate::domain::run::RunId;

/// Which trees lack a write, by root: at most those at work, as their owner stops and mends each.
#[derive(Debug, Default)]
pub struct FailedRuns(HashSet<RunId>);

impl FailedRuns {
    /// A write of the tree was lost.
    pub fn insert(&mut self, root: RunId) {
        self.0.insert(root);
    }

    /// Whether a write of the tree was lost.
    pub fn contains(&self, root: RunId) -> bool {
        // Asked for every write, and almost always empty.
        !self.0.is_empty() && self.0.contains(&root)
    }

    /// The tree goes on from what is committed.
    pub fn remove(&mut self, root: RunId) {
        self.0.remove(&root);
    }
}

#[cfg(test)]
mod tests {
    use super::FailedRuns;
    use crate::domain::run::RunId;

    #[test]
    fn failed_tree_is_listed_until_removed() {
        let mut failed = FailedRuns::default();
        let (one, other) = (RunId::new(), RunId::new());
        failed.insert(one);
        failed.insert(one);
        assert!(failed.contains(one) && !failed.contains(other));
        failed.remove(one);
        failed.remove(other);
        assert!(!failed.contains(one));
    }
}
