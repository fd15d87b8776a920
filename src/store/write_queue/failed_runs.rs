//! Trees with a failed fire-and-forget write. Later writes are rejected, so that the record has no gap, until the owner has
//! stopped the tree and resumes it from the last commit.

use std::collections::HashSet;

use crate::domain::run::RunId;

/// The roots of these trees. Bounded by the number of active trees, because the owner clears each.
#[derive(Debug, Default)]
pub struct FailedRuns(HashSet<RunId>);

impl FailedRuns {
    pub fn insert(&mut self, root: RunId) {
        self.0.insert(root);
    }

    pub fn contains(&self, root: RunId) -> bool {
        // Called for every write, and almost always empty.
        !self.0.is_empty() && self.0.contains(&root)
    }

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
