//! The part of a tree whose events a stream has.

use std::collections::HashSet;

use crate::domain::run::{Run, RunId};

/// The runs of the tree whose events a stream has.
pub enum EventScope {
    /// All runs.
    WholeTree,
    /// One run and its known descendants; `None` before they are read from the store.
    Subtree(Option<HashSet<RunId>>),
    /// One run without its descendants.
    SingleRun(RunId),
}

impl EventScope {
    pub fn new(run: &Run, run_only: bool) -> Self {
        match (run_only, run.id == run.root_id) {
            (true, _) => Self::SingleRun(run.id),
            (false, true) => Self::WholeTree,
            (false, false) => Self::Subtree(None),
        }
    }

    /// Whether the stream has the events of `run`.
    pub fn includes(&self, run: RunId) -> bool {
        match self {
            Self::WholeTree => true,
            Self::Subtree(runs) => runs.as_ref().is_some_and(|runs| runs.contains(&run)),
            Self::SingleRun(only) => run == *only,
        }
    }
}
