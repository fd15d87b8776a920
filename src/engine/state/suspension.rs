//! Trees whose writes failed. Their tasks have ended; each keeps its permit and its place in its session until it is
//! resumed from its record.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, RwLock};
use tokio::time::Instant;

use crate::engine::state::active_run::ActiveRun;
use crate::engine::state::sessions::SessionGuard;
use crate::fair::admission::RunPermit;
use crate::store::StoreError;

/// The first delay before the store is probed; it doubles while the store fails.
pub const INITIAL_PROBE_INTERVAL: Duration = Duration::from_millis(100);
/// The longest delay between two probes.
pub const MAX_PROBE_INTERVAL: Duration = Duration::from_secs(2);
/// The longest delay of a tree whose writes fail although the store works: each attempt sends a model request again.
const MAX_BACKOFF: Duration = Duration::from_secs(60);

#[derive(Default)]
pub struct Suspension {
    trees: Mutex<SuspendedTrees>,
    /// Held shared by writers that change a run from outside, and exclusively while trees are resumed.
    pub resume_lock: RwLock<()>,
    /// Notified when runs are driven again, or will not be.
    pub changed: Notify,
    /// Notified when the next probe may have been planned too late: for a single tree that is due much later.
    pub probe_moved: Notify,
}

#[derive(Default)]
struct SuspendedTrees {
    waiting: Vec<SuspendedTree>,
    is_supervised: bool,
    is_store_down: bool,
    /// Whether the last probe found no space.
    is_disk_full: bool,
}

/// A tree whose tasks have ended.
pub struct SuspendedTree {
    pub root: Arc<ActiveRun>,
    pub run_permit: Option<RunPermit>,
    pub session_guard: Option<SessionGuard>,
    /// How often in a row the tree was resumed and suspended again.
    pub attempts: u32,
    retry_at: Instant,
    /// Whether a probe has succeeded since, or only this tree is affected.
    is_probed: bool,
}

impl SuspendedTree {
    /// A tree whose tasks have ended. Takes its permit.
    pub fn new(root: Arc<ActiveRun>, session_guard: Option<SessionGuard>) -> Self {
        let suspension = &root.tree.suspension;
        let attempts = suspension.previous_count();
        // A tree that was resumed was so while the store worked: until a probe fails, only this tree is affected.
        let is_probed = attempts > 0 || suspension.is_by_damage();
        Self {
            run_permit: root.tree.root_permit.take(),
            root,
            session_guard,
            attempts,
            retry_at: Instant::now() + backoff(attempts),
            is_probed,
        }
    }
}

impl Suspension {
    /// Adds a tree; returns whether the supervising task is to be spawned.
    pub fn add(&self, tree: SuspendedTree) -> bool {
        let mut trees = self.lock();
        let is_next = trees.waiting.iter().all(|it| tree.retry_at < it.retry_at);
        let was_store_down = trees.is_store_down;
        trees.is_store_down |= !tree.is_probed;
        if trees.is_supervised && !was_store_down && (trees.is_store_down || is_next) {
            self.probe_moved.notify_one();
        }
        trees.waiting.push(tree);
        !std::mem::replace(&mut trees.is_supervised, true)
    }

    /// Whether a write failed and no probe has succeeded since.
    pub fn is_store_down(&self) -> bool {
        self.lock().is_store_down
    }

    /// Why no run is accepted while the store is down.
    pub fn store_error(&self) -> Option<StoreError> {
        let trees = self.lock();
        trees.is_store_down.then(|| match trees.is_disk_full {
            true => StoreError::DiskFull,
            false => StoreError::Suspended,
        })
    }

    /// Records that a probe failed with `error`, and takes back the trees that were due.
    pub fn mark_store_failed(&self, error: &StoreError, returned: Vec<SuspendedTree>) {
        let mut trees = self.lock();
        trees.is_disk_full = matches!(error, StoreError::DiskFull);
        trees.waiting.splice(0..0, returned);
        trees.is_store_down = true;
    }

    /// Records that the due trees were resumed. Returns true if no suspended tree is left; the supervising task then
    /// ends.
    pub fn mark_store_working(&self) -> bool {
        let mut trees = self.lock();
        trees.is_disk_full = false;
        trees.is_store_down = trees.waiting.iter().any(|tree| !tree.is_probed);
        trees.is_supervised = !trees.waiting.is_empty();
        !trees.is_supervised
    }

    /// Suspends a tree again that could not be read although the store works.
    pub fn retry_later(&self, tree: SuspendedTree) {
        let attempts = tree.attempts + 1;
        let tree = SuspendedTree {
            attempts,
            retry_at: Instant::now() + backoff(attempts),
            ..tree
        };
        self.lock().waiting.push(tree);
    }

    /// Removes all trees; the supervising task then ends.
    pub fn take_all(&self) -> Vec<SuspendedTree> {
        let mut trees = self.lock();
        trees.is_supervised = false;
        std::mem::take(&mut trees.waiting)
    }

    fn lock(&self) -> MutexGuard<'_, SuspendedTrees> {
        self.trees.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes the trees that are due, after a successful probe.
    pub fn take_due(&self) -> Vec<SuspendedTree> {
        let mut trees = self.lock();
        let now = Instant::now();
        for tree in &mut trees.waiting {
            tree.is_probed = true;
        }
        let waiting = std::mem::take(&mut trees.waiting);
        let (due, waiting) = waiting.into_iter().partition(|tree| tree.retry_at <= now);
        trees.waiting = waiting;
        due
    }

    /// The delay until the next probe: `interval` if a tree waits for the store, else until the first tree is due.
    pub fn next_probe_delay(&self, interval: Duration) -> Duration {
        let trees = self.lock();
        if trees.is_store_down {
            return interval;
        }
        let next_retry = trees.waiting.iter().map(|tree| tree.retry_at).min();
        next_retry.map_or(interval, |due| {
            due.saturating_duration_since(Instant::now()).max(interval)
        })
    }
}

/// The delay of a tree that was suspended this often in a row.
fn backoff(attempts: u32) -> Duration {
    match attempts {
        0 => Duration::ZERO,
        attempts => {
            (INITIAL_PROBE_INTERVAL * 2_u32.saturating_pow(attempts.min(16))).min(MAX_BACKOFF)
        }
    }
}
