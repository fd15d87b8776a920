//! The permit of a tree's root, and who waits for it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::engine::state::queued_bytes::HeldBytes;
use crate::fair::admission::RunPermit;

/// The permit of a tree's root. It is given back while the tree is paused.
#[derive(Debug, Default)]
pub struct RootPermit {
    state: Arc<Mutex<PermitState>>,
    is_queued: AtomicBool,
    /// Held while the state of a call changes and until that is recorded, so that the record has the changes in their
    /// order.
    pub update_lock: tokio::sync::Mutex<()>,
    /// Held while waiting for the permit.
    pub acquire_lock: tokio::sync::Mutex<()>,
    /// Notified when a run was paused or resumed, or a cancel was decided.
    pub changed: Arc<Notify>,
}

/// The permit, and the child runs that count with it.
#[derive(Debug, Default)]
struct PermitState {
    permit: Option<RunPermit>,
    children: usize,
    /// What the tree keeps in memory while it waits.
    held_bytes: Option<HeldBytes>,
}

impl RootPermit {
    pub fn is_held(&self) -> bool {
        lock(&self.state).permit.is_some()
    }

    /// Takes the permit, which counts the tree's child runs from now on.
    pub fn set(&self, mut permit: RunPermit) {
        let mut state = lock(&self.state);
        permit.add_children(state.children);
        state.permit = Some(permit);
        state.held_bytes = None;
    }

    /// Gives the permit back while the tree waits.
    pub fn release(&self, held_bytes: HeldBytes) {
        let mut state = lock(&self.state);
        let permit = state.permit.take();
        state.held_bytes = Some(held_bytes);
        drop(state);
        // Without the lock: the next run starts.
        drop(permit);
    }

    pub fn take(&self) -> Option<RunPermit> {
        lock(&self.state).permit.take()
    }

    /// Counts a child run until the result is dropped; `None` if the daemon has as many active runs as it allows.
    pub fn add_child(&self) -> Option<ChildPermit> {
        let mut state = lock(&self.state);
        if let Some(permit) = &mut state.permit
            && !permit.try_add_child()
        {
            return None;
        }
        state.children += 1;
        Some(ChildPermit(Arc::clone(&self.state)))
    }

    /// Like [`RootPermit::add_child`], for a child that an earlier process accepted.
    pub fn restore_child(&self) -> ChildPermit {
        let mut state = lock(&self.state);
        if let Some(permit) = &mut state.permit {
            permit.add_children(1);
        }
        state.children += 1;
        ChildPermit(Arc::clone(&self.state))
    }

    /// Marks the tree as queued for a permit until the result is dropped.
    pub fn mark_queued(&self) -> QueuedGuard<'_> {
        self.is_queued.store(true, Ordering::Relaxed);
        QueuedGuard(self)
    }

    pub fn is_queued(&self) -> bool {
        self.is_queued.load(Ordering::Relaxed)
    }
}

/// Counts a child run until it is dropped.
pub struct ChildPermit(Arc<Mutex<PermitState>>);

impl Drop for ChildPermit {
    fn drop(&mut self) {
        let mut state = lock(&self.0);
        state.children -= 1;
        if let Some(permit) = &mut state.permit {
            permit.release_child();
        }
    }
}

pub struct QueuedGuard<'s>(&'s RootPermit);

impl Drop for QueuedGuard<'_> {
    fn drop(&mut self) {
        self.0.is_queued.store(false, Ordering::Relaxed);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
