//! The trees that a writer removes in parts, between other writes.

use std::collections::VecDeque;

use crate::domain::run::RunId;

/// Roots whose trees are being removed. They are marked in a table: readers do not see them, and the next start continues.
#[derive(Debug, Default)]
pub struct Deletions {
    roots: VecDeque<RunId>,
    /// Whether a part could not be removed since the last write.
    is_paused: bool,
}

impl Deletions {
    pub fn new(roots: VecDeque<RunId>) -> Self {
        Self {
            roots,
            is_paused: false,
        }
    }

    pub fn add(&mut self, root: RunId) {
        if !self.roots.contains(&root) {
            self.roots.push_back(root);
        }
    }

    /// The next root, in turn.
    pub fn next_root(&mut self) -> Option<RunId> {
        self.roots.rotate_left(1.min(self.roots.len()));
        self.is_paused = false;
        self.roots.back().copied()
    }

    pub fn remove(&mut self, root: RunId) {
        self.roots.retain(|other| *other != root);
    }

    /// Stops removing until the next write.
    pub fn pause(&mut self) {
        self.is_paused = true;
    }

    /// Whether the next part is to be removed. `writes` is the number of writes since the last part.
    pub fn is_due(&self, writes: usize) -> bool {
        !self.roots.is_empty() && (writes > 0 || !self.is_paused)
    }
}
