//! Trees that lack a posted write that failed: no later write may hide the gap until their owner has stopped them and goes
//! on from what is committed. Knows no writes.

use std::collections::HashSet;

use crate::domain::run::RunId;

/// Which trees lack a write, by root: at most those at work, as their owner stops and mends each.
#[derive(Debug, Default)]
pub struct Broken(HashSet<RunId>);

impl Broken {
    /// A write of the tree was lost.
    pub fn note(&mut self, root: RunId) {
        self.0.insert(root);
    }

    /// Whether a write of the tree was lost.
    pub fn contains(&self, root: RunId) -> bool {
        // Asked for every write, and almost always empty.
        !self.0.is_empty() && self.0.contains(&root)
    }

    /// The tree goes on from what is committed.
    pub fn mend(&mut self, root: RunId) {
        self.0.remove(&root);
    }
}

#[cfg(test)]
mod tests {
    use super::Broken;
    use crate::domain::run::RunId;

    #[test]
    fn a_tree_is_broken_until_it_is_mended() {
        let mut broken = Broken::default();
        let (one, other) = (RunId::new(), RunId::new());
        broken.note(one);
        broken.note(one);
        assert!(broken.contains(one) && !broken.contains(other));
        broken.mend(one);
        broken.mend(other);
        assert!(!broken.contains(one));
    }
}
