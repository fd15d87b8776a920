//! Trees that wait for people, times and events only. Nothing of them is in memory but this index: the record has the rest, and they
//! continue from there.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::domain::input::InputKind;
use crate::domain::run::{RunId, now};
use crate::engine::state::sessions::SessionGuard;

/// How long a tree has to wait before it is put to sleep: for a shorter wait, that costs more than it saves.
const MIN_WAIT: Duration = Duration::from_secs(1);
/// The time between two looks at the trees that may be put to sleep.
const ROUND: Duration = Duration::from_millis(500);

#[derive(Default)]
pub struct SleepingTrees {
    state: Mutex<State>,
    /// Notified when the next look may have been planned too late.
    pub moved: Notify,
}

#[derive(Default)]
struct State {
    trees: HashMap<RunId, SleepingTree>,
    /// When those wake that are asleep.
    wake_times: BTreeSet<(Timestamp, RunId)>,
    /// Trees that have begun to wait, and when.
    candidates: VecDeque<(Instant, RunId)>,
    last_round: Option<Instant>,
}

struct SleepingTree {
    /// `Timestamp::MAX` if only an event ends its wait.
    wakes_at: Timestamp,
    phase: Phase,
    /// Whether an earlier process, or another node, has left it asleep.
    is_found: bool,
    /// What it needs of people, and since when.
    inputs: Box<[(InputKind, Timestamp)]>,
    /// Its place in its session. Boxed: most trees have none.
    session_guard: Option<Box<SessionGuard>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Its tasks have not ended yet.
    FallingAsleep,
    Asleep,
    /// It is read from its record.
    Waking,
}

impl SleepingTrees {
    /// Notes that a tree has begun to wait. Whether it only sleeps is looked at later.
    pub fn add_candidate(&self, root: RunId) {
        let mut state = self.lock();
        state.candidates.push_back((Instant::now(), root));
        if state.candidates.len() == 1 {
            self.moved.notify_one();
        }
    }

    /// At most this many trees that have waited long enough to be put to sleep.
    pub fn take_candidates(&self, max: usize) -> Vec<RunId> {
        let mut state = self.lock();
        let ready = state.candidates.iter().take(max);
        let count = ready
            .take_while(|(since, _)| since.elapsed() >= MIN_WAIT)
            .count();
        if count < max {
            state.last_round = Some(Instant::now());
        }
        state
            .candidates
            .drain(..count)
            .map(|(_, root)| root)
            .collect()
    }

    /// When there is something to do next.
    pub fn next_look(&self) -> Option<Duration> {
        let state = self.lock();
        let wakes_in = state.wake_times.first().map(|(at, _)| {
            let remaining = now().duration_until(*at);
            Duration::try_from(remaining).unwrap_or_default()
        });
        let round_in = state.candidates.front().map(|(since, _)| {
            let waited = MIN_WAIT.saturating_sub(since.elapsed());
            let rest = state
                .last_round
                .map_or(Duration::ZERO, |last| ROUND.saturating_sub(last.elapsed()));
            waited.max(rest)
        });
        [wakes_in, round_in].into_iter().flatten().min()
    }

    /// Adds a tree whose tasks are about to end: see [`SleepingTrees::settle`].
    pub fn begin(&self, root: RunId) {
        let tree = SleepingTree {
            wakes_at: Timestamp::MAX,
            phase: Phase::FallingAsleep,
            is_found: false,
            inputs: Box::default(),
            session_guard: None,
        };
        self.lock().trees.insert(root, tree);
    }

    /// Adds a tree that an earlier process has left asleep.
    pub fn add(&self, root: RunId, wakes_at: Timestamp, session_guard: Option<SessionGuard>) {
        self.begin(root);
        if let Some(tree) = self.lock().trees.get_mut(&root) {
            tree.is_found = true;
        }
        self.wake_at(root, wakes_at);
        self.settle(root, session_guard);
    }

    /// The tasks of a tree have ended.
    pub fn settle(&self, root: RunId, session_guard: Option<SessionGuard>) {
        let mut state = self.lock();
        let Some(tree) = state.trees.get_mut(&root) else {
            return;
        };
        tree.phase = Phase::Asleep;
        tree.session_guard = session_guard.map(Box::new);
        let wakes_at = tree.wakes_at;
        self.plan(&mut state, root, wakes_at);
    }

    /// Wakes a tree at this time at the latest; nothing happens if it does not sleep.
    pub fn wake_at(&self, root: RunId, at: Timestamp) {
        let mut state = self.lock();
        let Some(tree) = state.trees.get_mut(&root).filter(|it| at < it.wakes_at) else {
            return;
        };
        let before = std::mem::replace(&mut tree.wakes_at, at);
        if tree.phase == Phase::Asleep {
            state.wake_times.remove(&(before, root));
            self.plan(&mut state, root, at);
        }
    }

    pub fn wake(&self, root: RunId) {
        self.wake_at(root, Timestamp::MIN);
    }

    /// Begins to wake at most this many trees whose time has come.
    pub fn take_due(&self, max: usize) -> Vec<RunId> {
        let mut state = self.lock();
        let now = now();
        let due = state.wake_times.iter().take(max);
        let due: Vec<_> = due.take_while(|(at, _)| *at <= now).copied().collect();
        for entry in &due {
            state.wake_times.remove(entry);
            if let Some(tree) = state.trees.get_mut(&entry.1) {
                tree.phase = Phase::Waking;
            }
        }
        due.into_iter().map(|(_, root)| root).collect()
    }

    /// Takes the places in their sessions that these trees have.
    pub fn take_session_guards(&self, roots: &[RunId]) -> HashMap<RunId, SessionGuard> {
        let mut state = self.lock();
        let guards = roots.iter().filter_map(|root| {
            let guard = state.trees.get_mut(root)?.session_guard.take()?;
            Some((*root, *guard))
        });
        guards.collect()
    }

    /// These trees are driven again, or will not be.
    pub fn remove(&self, roots: &[RunId]) {
        let mut state = self.lock();
        for root in roots {
            if let Some(tree) = state.trees.remove(root) {
                state.wake_times.remove(&(tree.wakes_at, *root));
            }
        }
    }

    /// These trees could not be read: they are tried again at this time.
    pub fn retry(&self, roots: &[RunId], at: Timestamp) {
        let mut state = self.lock();
        for root in roots {
            if let Some(tree) = state.trees.get_mut(root) {
                tree.phase = Phase::Asleep;
                tree.wakes_at = at;
                self.plan(&mut state, *root, at);
            }
        }
    }

    pub fn contains(&self, root: RunId) -> bool {
        self.lock().trees.contains_key(&root)
    }

    pub fn fell_asleep_here(&self, root: RunId) -> bool {
        self.lock().trees.get(&root).is_some_and(|it| !it.is_found)
    }

    /// Adds what a tree needs of people.
    pub fn set_inputs(&self, root: RunId, inputs: Vec<(InputKind, Timestamp)>) {
        if let Some(tree) = self.lock().trees.get_mut(&root) {
            tree.inputs = inputs.into();
        }
    }

    /// Since when they wait for people, for each input of this kind. Those of a tree whose tasks have not ended are pending still.
    pub fn requested_at(&self, kind: InputKind) -> Vec<Timestamp> {
        let state = self.lock();
        let trees = state.trees.values();
        let asleep = trees.filter(|it| it.phase != Phase::FallingAsleep);
        let inputs = asleep.flat_map(|tree| &tree.inputs);
        let of_kind = inputs.filter(|(it, _)| *it == kind);
        of_kind.map(|(_, at)| *at).collect()
    }

    pub fn count(&self) -> usize {
        self.lock().trees.len()
    }

    /// While the daemon stops, no later run of the sessions starts.
    pub fn suspend_sessions(&self) {
        let state = self.lock();
        let guards = state
            .trees
            .values()
            .filter_map(|tree| tree.session_guard.as_ref());
        guards.for_each(|guard| guard.suspended().cancel());
    }

    fn plan(&self, state: &mut State, root: RunId, at: Timestamp) {
        state.wake_times.insert((at, root));
        if state.wake_times.first() == Some(&(at, root)) {
            self.moved.notify_one();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
