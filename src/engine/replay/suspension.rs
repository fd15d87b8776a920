//! Trees about which a write failed: each has stopped, and keeps its slot and its place in its session until it is taken
//! up from its record. Knows neither the store nor the record.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, RwLock};
use tokio::time::Instant;

use crate::engine::admission::sessions::SessionGuard;
use crate::engine::state::active_run::ActiveRun;
use crate::fair::admission::RunPermit;

/// The first wait before the store is probed; it doubles while the store fails.
pub const INITIAL_PROBE_INTERVAL: Duration = Duration::from_millis(100);
/// The longest wait between two probes.
pub const MAX_PROBE_INTERVAL: Duration = Duration::from_secs(2);
/// The longest wait of a tree whose writes fail although the store works: each time it asks its models again.
const MAX_BACKOFF: Duration = Duration::from_secs(60);
/// A tree that was at work for so long is taken up at once when it is suspended again.
const BACKOFF_RESET_AFTER: Duration = Duration::from_secs(60);

/// The suspended trees of this process.
#[derive(Default)]
pub struct Suspension {
    trees: Mutex<SuspendedTrees>,
    /// Held, shared, by whoever changes the record of a run from outside, and alone while trees are taken up.
    pub resume_lock: RwLock<()>,
    /// Notified when runs that nobody drove are driven again, or will not be.
    pub changed: Notify,
}

#[derive(Default)]
struct SuspendedTrees {
    waiting: Vec<SuspendedTree>,
    is_supervised: bool,
    is_store_down: bool,
}

/// A tree all of whose tasks have ended.
pub struct SuspendedTree {
    /// Its root, as it was at work.
    pub root: Arc<ActiveRun>,
    /// Its slot, if it had one.
    pub run_permit: Option<RunPermit>,
    /// Its place in its session.
    pub session_guard: Option<SessionGuard>,
    /// How often it was taken up in a row and suspended again.
    pub attempts: u32,
    /// When it may be taken up.
    retry_at: Instant,
    /// Whether the store was seen to work since.
    is_probed: bool,
}

impl SuspendedTree {
    /// A tree whose tasks have ended. Takes its permit.
    pub fn new(root: Arc<ActiveRun>, session_guard: Option<SessionGuard>) -> Self {
        let attempts = match root.tree.suspension.last_resume.get() {
            Some((at, attempts)) if at.elapsed() < BACKOFF_RESET_AFTER => attempts + 1,
            _ => 0,
        };
        Self {
            run_permit: root.tree.root_permit.take(),
            root,
            session_guard,
            attempts,
            retry_at: Instant::now() + backoff(attempts),
            // It was taken up from a store that worked: until a probe says otherwise, it alone fails.
            is_probed: attempts > 0,
        }
    }
}

impl Suspension {
    /// Adds a tree; returns whether the supervising task is to be spawned.
    pub fn add(&self, tree: SuspendedTree) -> bool {
        let mut trees = self.lock();
        trees.is_store_down |= !tree.is_probed;
        trees.waiting.push(tree);
        !std::mem::replace(&mut trees.is_supervised, true)
    }

    /// Whether a write failed, and the store has not been seen to work since.
    pub fn is_store_down(&self) -> bool {
        self.lock().is_store_down
    }

    /// A probe found the store failing; what it took out to take up comes back.
    pub fn mark_store_failed(&self, returned: Vec<SuspendedTree>) {
        let mut trees = self.lock();
        trees.waiting.splice(0..0, returned);
        trees.is_store_down = true;
    }

    /// What was due is taken up. Returns whether nothing is suspended any more; then the supervising task ends.
    pub fn mark_store_working(&self) -> bool {
        let mut trees = self.lock();
        trees.is_store_down = trees.waiting.iter().any(|tree| !tree.is_probed);
        trees.is_supervised = !trees.waiting.is_empty();
        !trees.is_supervised
    }

    /// A tree that could not be read although the store works is taken up later.
    pub fn retry_later(&self, tree: SuspendedTree) {
        let attempts = tree.attempts + 1;
        let tree = SuspendedTree {
            attempts,
            retry_at: Instant::now() + backoff(attempts),
            ..tree
        };
        self.lock().waiting.push(tree);
    }

    /// Hands out everything; the supervising task ends.
    pub fn take_all(&self) -> Vec<SuspendedTree> {
        let mut trees = self.lock();
        trees.is_supervised = false;
        std::mem::take(&mut trees.waiting)
    }

    fn lock(&self) -> MutexGuard<'_, SuspendedTrees> {
        self.trees.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands out what is due, after a probe that found the store working.
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

    /// Until the next probe: `pause` where a tree waits for the store, else until the first tree is due.
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

/// How long a tree waits that was suspended so often in a row after it had been taken up.
fn backoff(attempts: u32) -> Duration {
    match attempts {
        0 => Duration::ZERO,
        attempts => {
            (INITIAL_PROBE_INTERVAL * 2_u32.saturating_pow(attempts.min(16))).min(MAX_BACKOFF)
        }
    }
}
