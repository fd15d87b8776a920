//! Child runs that an earlier process left unfinished, until their parents reach the calls that started them.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::domain::run::{RunId, Status};
use crate::store::runs::UnfinishedRun;

#[derive(Default)]
pub struct OrphanedChildren {
    children: Mutex<HashMap<RunId, UnfinishedRun>>,
}

impl OrphanedChildren {
    pub fn insert(&self, child: UnfinishedRun) {
        self.lock().insert(child.run.id, child);
    }

    /// Removes a child and passes it to `recover` before anyone else can look for it here: a cancel finds the child
    /// either here or where `recover` puts it.
    pub fn take<T>(
        &self,
        child: RunId,
        recover: impl FnOnce(UnfinishedRun) -> Option<T>,
    ) -> Option<T> {
        let mut children = self.lock();
        recover(children.remove(&child)?)
    }

    /// Removes the children of a root's tree.
    pub fn take_tree(&self, root: RunId) -> Vec<UnfinishedRun> {
        let mut children = self.lock();
        let of_tree = children.extract_if(|_, child| child.run.root_id == root);
        of_tree.map(|(_, child)| child).collect()
    }

    pub fn contains(&self, child: RunId) -> bool {
        self.lock().contains_key(&child)
    }

    /// Marks a child as cancelled, so that it ends when its parent reaches it; false if it is not here.
    pub fn cancel(&self, child: RunId, reason: &str) -> bool {
        let mut children = self.lock();
        let Some(child) = children.get_mut(&child) else {
            return false;
        };
        child.run.status = Status::Cancelling;
        child.run.cancel_reason = Some(reason.to_owned());
        true
    }

    /// Marks a child as paused by a client, or as resumed; false if it is not here.
    pub fn set_held(&self, child: RunId, is_held: bool) -> bool {
        let mut children = self.lock();
        let state = children.get_mut(&child).map(|it| &mut it.resume_state);
        if let Some(Some(state)) = state {
            state.is_held = is_held;
            return true;
        }
        false
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RunId, UnfinishedRun>> {
        self.children.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
