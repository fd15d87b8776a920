//! Trees about which a write failed: each has stopped, and keeps its slot and its place in its session until it is taken
//! up from its record. Knows neither the store nor the record.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::sync::{Notify, RwLock};
use tokio::time::Instant;

use crate::engine::live::LiveRun;
use crate::engine::parts::Engine;
use crate::engine::sessions::Seat;
use crate::fair::queue::Slot;

/// The first wait before the store is probed; it doubles while the store fails.
pub const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// The longest wait between two probes.
pub const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// The longest wait of a tree whose writes fail although the store works: each time it asks its models again.
const LONGEST_BACKOFF: Duration = Duration::from_secs(60);
/// A tree that was at work for so long is taken up at once when it is suspended again.
const STEADY: Duration = Duration::from_secs(60);

/// The task that takes up what is suspended, and ends when nothing is.
pub type Supervise = fn(Arc<Engine>) -> BoxFuture<'static, ()>;

/// The suspended trees of this process.
pub struct Suspension {
    trees: Mutex<Trees>,
    supervise: Supervise,
    /// Held, shared, by whoever changes the record of a run from outside, and alone while trees are taken up.
    pub gate: RwLock<()>,
    /// Notified when runs that nobody drove are driven again, or will not be.
    pub changed: Notify,
}

#[derive(Default)]
struct Trees {
    waiting: Vec<Suspended>,
    is_supervised: bool,
    is_down: bool,
}

/// A tree all of whose tasks have ended.
pub struct Suspended {
    /// Its root, as it was at work.
    pub live: Arc<LiveRun>,
    /// Its slot, if it had one.
    pub slot: Option<Slot>,
    /// Its place in its session.
    pub seat: Option<Seat>,
    /// How often it was taken up in a row and suspended again.
    pub tries: u32,
    /// When it may be taken up.
    due: Instant,
    /// Whether the store was seen to work since.
    is_probed: bool,
}

impl Suspension {
    /// With the task that is spawned when a tree is suspended and it is not there.
    pub fn new(supervise: Supervise) -> Self {
        Self {
            trees: Mutex::default(),
            supervise,
            gate: RwLock::default(),
            changed: Notify::default(),
        }
    }

    /// Whether a write failed, and the store has not been seen to work since.
    pub fn is_down(&self) -> bool {
        self.lock().is_down
    }

    /// A probe found the store failing; what it took out to take up comes back.
    pub fn store_failed(&self, due: Vec<Suspended>) {
        let mut trees = self.lock();
        trees.waiting.splice(0..0, due);
        trees.is_down = true;
    }

    /// What was due is taken up. Returns whether nothing is suspended any more; then the supervising task ends.
    pub fn store_works(&self) -> bool {
        let mut trees = self.lock();
        trees.is_down = trees.waiting.iter().any(|tree| !tree.is_probed);
        trees.is_supervised = !trees.waiting.is_empty();
        !trees.is_supervised
    }

    /// A tree that could not be read although the store works is taken up later.
    pub fn put_back(&self, tree: Suspended) {
        let tries = tree.tries + 1;
        let tree = Suspended {
            tries,
            due: Instant::now() + backoff(tries),
            ..tree
        };
        self.lock().waiting.push(tree);
    }

    /// Hands out everything; the supervising task ends.
    pub fn give_up(&self) -> Vec<Suspended> {
        let mut trees = self.lock();
        trees.is_supervised = false;
        std::mem::take(&mut trees.waiting)
    }

    fn lock(&self) -> MutexGuard<'_, Trees> {
        self.trees.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands out what is due, after a probe that found the store working.
    pub fn take_due(&self) -> Vec<Suspended> {
        let mut trees = self.lock();
        let now = Instant::now();
        for tree in &mut trees.waiting {
            tree.is_probed = true;
        }
        let waiting = std::mem::take(&mut trees.waiting);
        let (due, waiting) = waiting.into_iter().partition(|tree| tree.due <= now);
        trees.waiting = waiting;
        due
    }

    /// Until the next probe: `pause` where a tree waits for the store, else until the first tree is due.
    pub fn next_probe(&self, pause: Duration) -> Duration {
        let trees = self.lock();
        if trees.is_down {
            return pause;
        }
        let due = trees.waiting.iter().map(|tree| tree.due).min();
        due.map_or(pause, |due| {
            due.saturating_duration_since(Instant::now()).max(pause)
        })
    }
}

/// Keeps a tree whose tasks have ended until the store works.
pub fn suspend(engine: &Arc<Engine>, live: &Arc<LiveRun>, seat: Option<Seat>) {
    let tries = match live.tree.suspension.taken_up.get() {
        Some((at, tries)) if at.elapsed() < STEADY => tries + 1,
        _ => 0,
    };
    let tree = Suspended {
        live: Arc::clone(live),
        slot: live.tree.slot.take(),
        seat,
        tries,
        due: Instant::now() + backoff(tries),
        // It was taken up from a store that worked: until a probe says otherwise, it alone fails.
        is_probed: tries > 0,
    };
    let mut trees = engine.suspension.lock();
    trees.is_down |= !tree.is_probed;
    trees.waiting.push(tree);
    if !trees.is_supervised {
        trees.is_supervised = true;
        let supervise = engine.suspension.supervise;
        engine.tasks.spawn(supervise(Arc::clone(engine)));
    }
}

/// How long a tree waits that was suspended so often in a row after it had been taken up.
fn backoff(tries: u32) -> Duration {
    match tries {
        0 => Duration::ZERO,
        tries => (FIRST_PAUSE * 2_u32.saturating_pow(tries.min(16))).min(LONGEST_BACKOFF),
    }
}
