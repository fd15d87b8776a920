//! The slot of a tree's root while its runs are at work, and who waits for it. Knows no runs.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::fair::queue::Slot;

/// The slot of a tree's root, which is given back while the tree waits for a person.
#[derive(Debug, Default)]
pub struct RootSlot {
    held: Mutex<Held>,
    is_in_line: AtomicBool,
    /// Held by who changes what a call of the tree does, until the record has been told: there the changes stand in the
    /// order in which they were made.
    pub turn: tokio::sync::Mutex<()>,
    /// Held by who waits for the slot.
    pub coming: tokio::sync::Mutex<()>,
    /// Told when a run's time has begun to stand still, or to go on, or a cancel has been decided.
    pub changed: Notify,
}

/// The slot, and the child runs that are counted with it.
#[derive(Debug, Default)]
struct Held {
    slot: Option<Slot>,
    children: usize,
}

impl RootSlot {
    /// Whether it has the slot.
    pub fn is_held(&self) -> bool {
        lock(&self.held).slot.is_some()
    }

    /// Takes the slot in. The tree's child runs count for it from now on.
    pub fn put(&self, mut slot: Slot) {
        let mut held = lock(&self.held);
        slot.add_children(held.children);
        held.slot = Some(slot);
    }

    /// Hands the slot out.
    pub fn take(&self) -> Option<Slot> {
        lock(&self.held).slot.take()
    }

    /// Counts a child run until what is returned is dropped; none where as many runs are at work in the daemon as may.
    pub fn child(&self) -> Option<ChildAtWork<'_>> {
        let mut held = lock(&self.held);
        if let Some(slot) = &mut held.slot
            && !slot.take_child()
        {
            return None;
        }
        held.children += 1;
        Some(ChildAtWork(self))
    }

    /// As [`RootSlot::child`] for one that an earlier process let in.
    pub fn child_again(&self) -> ChildAtWork<'_> {
        let mut held = lock(&self.held);
        if let Some(slot) = &mut held.slot {
            slot.add_children(1);
        }
        held.children += 1;
        ChildAtWork(self)
    }

    /// In line for the slot, until what is returned is dropped.
    pub fn in_line(&self) -> InLine<'_> {
        self.is_in_line.store(true, Ordering::Relaxed);
        InLine(self)
    }

    /// Whether it waits in line for the slot.
    pub fn is_in_line(&self) -> bool {
        self.is_in_line.load(Ordering::Relaxed)
    }
}

/// A child run that counts for those at work.
pub struct ChildAtWork<'s>(&'s RootSlot);

impl Drop for ChildAtWork<'_> {
    fn drop(&mut self) {
        let mut held = lock(&self.0.held);
        held.children -= 1;
        if let Some(slot) = &mut held.slot {
            slot.release_child();
        }
    }
}

/// The time in line for a slot.
pub struct InLine<'s>(&'s RootSlot);

impl Drop for InLine<'_> {
    fn drop(&mut self) {
        self.0.is_in_line.store(false, Ordering::Relaxed);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
