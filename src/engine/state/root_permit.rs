//! The slot of a tree's root while its runs are at work, and who waits for it. Knows no runs.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::fair::admission::RunPermit;

/// The slot of a tree's root, which is given back while the tree waits for a person.
#[derive(Debug, Default)]
pub struct RootPermit {
    state: Mutex<PermitState>,
    is_queued: AtomicBool,
    /// Held by who changes what a call of the tree does, until the record has been told: there the changes stand in the
    /// order in which they were made.
    pub update_lock: tokio::sync::Mutex<()>,
    /// Held by who waits for the slot.
    pub acquire_lock: tokio::sync::Mutex<()>,
    /// Told when a run's time has begun to stand still, or to go on, or a cancel has been decided.
    pub changed: Notify,
}

/// The slot, and the child runs that are counted with it.
#[derive(Debug, Default)]
struct PermitState {
    permit: Option<RunPermit>,
    children: usize,
}

impl RootPermit {
    /// Whether it has the slot.
    pub fn is_held(&self) -> bool {
        lock(&self.state).permit.is_some()
    }

    /// Takes the slot in. The tree's child runs count for it from now on.
    pub fn set(&self, mut permit: RunPermit) {
        let mut state = lock(&self.state);
        permit.add_children(state.children);
        state.permit = Some(permit);
    }

    /// Hands the slot out.
    pub fn take(&self) -> Option<RunPermit> {
        lock(&self.state).permit.take()
    }

    /// Counts a child run until what is returned is dropped; none where as many runs are at work in the daemon as may.
    pub fn add_child(&self) -> Option<ChildPermit<'_>> {
        let mut state = lock(&self.state);
        if let Some(permit) = &mut state.permit
            && !permit.try_add_child()
        {
            return None;
        }
        state.children += 1;
        Some(ChildPermit(self))
    }

    /// As [`RootSlot::child`] for one that an earlier process let in.
    pub fn restore_child(&self) -> ChildPermit<'_> {
        let mut state = lock(&self.state);
        if let Some(permit) = &mut state.permit {
            permit.add_children(1);
        }
        state.children += 1;
        ChildPermit(self)
    }

    /// In line for the slot, until what is returned is dropped.
    pub fn mark_queued(&self) -> QueuedGuard<'_> {
        self.is_queued.store(true, Ordering::Relaxed);
        QueuedGuard(self)
    }

    /// Whether it waits in line for the slot.
    pub fn is_queued(&self) -> bool {
        self.is_queued.load(Ordering::Relaxed)
    }
}

/// A child run that counts for those at work.
pub struct ChildPermit<'s>(&'s RootPermit);

impl Drop for ChildPermit<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.children -= 1;
        if let Some(permit) = &mut state.permit {
            permit.release_child();
        }
    }
}

/// The time in line for a slot.
pub struct QueuedGuard<'s>(&'s RootPermit);

impl Drop for QueuedGuard<'_> {
    fn drop(&mut self) {
        self.0.is_queued.store(false, Ordering::Relaxed);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
