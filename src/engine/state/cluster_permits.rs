//! The permits of root runs over all nodes that share the database. A run that no limit is near to starts at once; the others wait
//! until a node gives them their permit, fair between keys as within one process.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

use crate::domain::run::RunId;
use crate::engine::state::active_run::ActiveRun;
use crate::fair::Limits;
use crate::fair::admission::QueueFull;
use crate::fair::fair_queue::FairQueue;
use crate::store::StoreError;
use crate::store::cluster::{Cluster, PermitDemand, PermitLoad, RunningTrees};
use crate::store::node_messages::NodeMessage;

/// How far each node may pass the limits: it starts at most this part of all permits before the others see it. With fewer permits than
/// `MIN_RUNNING` in all, every run waits until it is given one.
const UNREAD_PARTS: usize = 20;
const MIN_RUNNING: usize = 200;
/// The pause while another node gives permits, which takes it less.
const BUSY_PAUSE: Duration = Duration::from_millis(20);

/// What this node knows of the permits. Without other nodes it is not used.
pub struct ClusterPermits {
    limits: Limits,
    /// Locked before `entering`.
    view: Mutex<View>,
    entering: Arc<Mutex<EnteringRuns>>,
    /// The trees of this node that wait for a permit.
    waiting: Mutex<HashMap<RunId, oneshot::Sender<()>>>,
    /// Roots whose permit the database may have although they gave it back: that could not be recorded.
    unreleased: Mutex<HashMap<RunId, Weak<ActiveRun>>>,
    /// Loads are read one after the other: an older one does not replace a newer one.
    reading: tokio::sync::Mutex<()>,
    pub wake: Notify,
    /// Notified when a tree of this node begins to wait for a permit.
    pub began_waiting: Notify,
}

/// The load of all nodes as last read, with what this node has added since.
struct View {
    queue: FairQueue<RunId>,
    has_waiting: bool,
    /// When the load began to be read; `None` if none was read.
    read_at: Option<Instant>,
}

/// A new run.
#[derive(Clone)]
pub struct EnteringRun {
    pub owner: Option<String>,
    pub agent: String,
    /// Whether it has a session, whose runs wait for each other.
    pub has_session: bool,
    /// Whether its session has unfinished runs, or another node has to claim it.
    pub is_behind: bool,
}

/// New runs that a load which is being read may not have, by their numbers.
#[derive(Default)]
struct EnteringRuns {
    runs: HashMap<u64, CountedRun>,
    /// How many of them have started at once.
    started: usize,
    last_number: u64,
}

/// A new run that is counted beside the loads.
struct CountedRun {
    run: EnteringRun,
    has_permit: bool,
    /// Whether the store has it, or will never have it: then a load that is read from now on is right.
    is_settled: bool,
}

/// A new run that this node counts beside each load until one is read after the entry was dropped; to be kept until the run is
/// committed.
pub struct QueuedTree {
    /// Whether it starts at once. If not, it waits for its permit.
    pub has_permit: bool,
    number: u64,
    entering: Arc<Mutex<EnteringRuns>>,
}

impl Drop for QueuedTree {
    fn drop(&mut self) {
        if let Some(counted) = lock(&self.entering).runs.get_mut(&self.number) {
            counted.is_settled = true;
        }
    }
}

impl View {
    /// Counts a new run; returns whether it starts at once, which it does only if it `may_start`.
    fn add(&mut self, run: &EnteringRun, may_start: bool) -> Result<bool, QueueFull> {
        let queue = &mut self.queue;
        let quota_key = queue.quota_key(run.owner.as_deref(), &run.agent);
        let is_free = may_start && !run.has_session && !run.is_behind;
        if is_free && queue.is_far_from_limits(quota_key) {
            queue.add_running(quota_key, 1);
            return Ok(true);
        }
        if run.is_behind || !queue.try_acquire(quota_key) {
            if !queue.has_queue_capacity(quota_key) {
                let (running, queued) = queue.load();
                return Err(QueueFull { running, queued });
            }
            queue.add_deferred(quota_key);
        }
        Ok(false)
    }
}

impl ClusterPermits {
    pub fn new(limits: Limits) -> Self {
        // The number of live runs is a limit of each node.
        let limits = Limits {
            max_live: usize::MAX,
            ..limits
        };
        Self {
            view: Mutex::new(View {
                queue: FairQueue::new(limits.clone()),
                has_waiting: false,
                read_at: None,
            }),
            limits,
            entering: Arc::default(),
            waiting: Mutex::default(),
            unreleased: Mutex::default(),
            reading: tokio::sync::Mutex::default(),
            wake: Notify::new(),
            began_waiting: Notify::new(),
        }
    }

    /// Enters a new run. If what this node knows leaves no place, the load is read again.
    ///
    /// # Errors
    /// It could not start now, and the key's share of the queue is full; or the load cannot be read.
    pub async fn enter(
        &self,
        cluster: &dyn Cluster,
        run: EnteringRun,
    ) -> Result<Result<QueuedTree, QueueFull>, StoreError> {
        let entered = self.try_enter(&run);
        if entered.is_ok() {
            return Ok(entered);
        }
        self.refresh(cluster).await?;
        Ok(self.try_enter(&run))
    }

    fn try_enter(&self, run: &EnteringRun) -> Result<QueuedTree, QueueFull> {
        let max_unread = match self.limits.max_running {
            ..MIN_RUNNING => 0,
            max_running => max_running / UNREAD_PARTS,
        };
        let mut view = lock(&self.view);
        let mut entering = lock(&self.entering);
        let has_permit = view.add(run, entering.started < max_unread)?;
        let counted = CountedRun {
            run: run.clone(),
            has_permit,
            is_settled: false,
        };
        entering.last_number += 1;
        entering.started += usize::from(has_permit);
        let number = entering.last_number;
        entering.runs.insert(number, counted);
        if max_unread > 0 && entering.runs.len() > max_unread / 2 {
            self.wake.notify_one();
        }
        Ok(QueuedTree {
            has_permit,
            number,
            entering: Arc::clone(&self.entering),
        })
    }

    /// Waits until this tree of this node has a permit.
    pub async fn granted(&self, root: RunId) {
        let (sender, granted) = oneshot::channel();
        lock(&self.waiting).insert(root, sender);
        self.began_waiting.notify_waiters();
        self.wake.notify_one();
        // Replaced by a later call for the same tree, which gets the permit.
        if granted.await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// A tree of this node has ended, or is driven no more: its permit is free.
    pub fn tree_ended(&self, root: RunId) {
        lock(&self.waiting).remove(&root);
        self.forget_unreleased(root);
        self.permit_freed();
    }

    /// That this root gave its permit back could not be recorded.
    pub fn keep_unreleased(&self, root: &Arc<ActiveRun>) {
        lock(&self.unreleased).insert(root.scope.run, Arc::downgrade(root));
    }

    pub fn forget_unreleased(&self, root: RunId) {
        lock(&self.unreleased).remove(&root);
    }

    /// See [`ClusterPermits::keep_unreleased`].
    pub fn unreleased(&self) -> Vec<(RunId, Weak<ActiveRun>)> {
        let unreleased = lock(&self.unreleased);
        let roots = unreleased.iter();
        roots.map(|(id, root)| (*id, Weak::clone(root))).collect()
    }

    /// A permit of this node was given back. Its tree may wait for one again by now.
    pub fn permit_freed(&self) {
        if self.waiting_count() > 0 || lock(&self.view).has_waiting {
            self.wake.notify_one();
        }
    }

    /// Whether a tree of this node waits for a permit.
    pub fn is_waiting(&self, root: RunId) -> bool {
        lock(&self.waiting).contains_key(&root)
    }

    /// The number of trees of this node that wait for a permit.
    pub fn waiting_count(&self) -> usize {
        lock(&self.waiting).len()
    }

    /// Reads the load, unless somebody else has begun to read it since the call: one read serves all who wait for it.
    async fn refresh(&self, cluster: &dyn Cluster) -> Result<(), StoreError> {
        let called_at = Instant::now();
        let _reading = self.reading.lock().await;
        if lock(&self.view).read_at.is_some_and(|at| at >= called_at) {
            return Ok(());
        }
        let read_at = Instant::now();
        self.forget_settled();
        self.set_load(&cluster.permit_load().await?);
        lock(&self.view).read_at = Some(read_at);
        Ok(())
    }

    /// To be called before the load is read.
    fn forget_settled(&self) {
        let mut entering = lock(&self.entering);
        entering.runs.retain(|_, counted| !counted.is_settled);
        let started = entering.runs.values().filter(|it| it.has_permit).count();
        entering.started = started;
    }

    fn set_load(&self, load: &[PermitLoad]) {
        let mut queue = queue_with(&self.limits, load.iter().map(|it| &it.running));
        let mut has_waiting = false;
        for PermitLoad {
            running,
            waiting,
            waiting_at_nodes,
        } in load
        {
            let quota_key = queue.quota_key(running.owner.as_deref(), &running.agent);
            for _ in 0..*waiting {
                queue.add_deferred(quota_key);
            }
            has_waiting |= *waiting_at_nodes > 0;
        }
        let mut known = lock(&self.view);
        let mut view = View {
            queue,
            has_waiting,
            read_at: None,
        };
        for CountedRun {
            run, has_permit, ..
        } in lock(&self.entering).runs.values()
        {
            if *has_permit {
                let quota_key = view.queue.quota_key(run.owner.as_deref(), &run.agent);
                view.queue.add_running(quota_key, 1);
            } else {
                // Those beyond the limits were accepted by what this node knew.
                let _ = view.add(run, false);
            }
        }
        *known = view;
    }

    /// Gives permits, and lets those trees of this node start that got one from any node.
    pub async fn give(&self, cluster: &dyn Cluster) -> Result<(), StoreError> {
        self.refresh(cluster).await?;
        if lock(&self.view).has_waiting {
            let limits = self.limits.clone();
            let decide = Box::new(move |demand: &PermitDemand| choose(&limits, demand));
            match cluster.give_permits(decide).await? {
                None => {
                    // The other node may not have seen the trees that wait since a moment ago.
                    tokio::time::sleep(BUSY_PAUSE).await;
                    self.wake.notify_one();
                }
                Some(0) => {}
                // Other nodes may have some of these trees.
                Some(_) => cluster.send(None, NodeMessage::Permits),
            }
        }
        let waiting: Vec<RunId> = lock(&self.waiting).keys().copied().collect();
        if waiting.is_empty() {
            return Ok(());
        }
        for root in cluster.permitted_trees(waiting).await? {
            if let Some(granted) = lock(&self.waiting).remove(&root) {
                let _ = granted.send(());
            }
        }
        Ok(())
    }
}

/// The limits that remain for each node alone.
pub fn node_limits(limits: Limits) -> Limits {
    Limits {
        max_live: limits.max_live,
        keys: limits.keys,
        ..Limits::default()
    }
}

/// A queue without waiting trees.
fn queue_with<'t>(
    limits: &Limits,
    running: impl IntoIterator<Item = &'t RunningTrees>,
) -> FairQueue<RunId> {
    let mut queue = FairQueue::new(limits.clone());
    for running in running {
        let quota_key = queue.quota_key(running.owner.as_deref(), &running.agent);
        queue.add_running(quota_key, running.trees);
    }
    queue
}

/// The trees that get a permit next, in order.
fn choose(limits: &Limits, demand: &PermitDemand) -> Vec<RunId> {
    let mut queue = queue_with(limits, &demand.running);
    for (owner, turn) in &demand.turns {
        let owner = Some(owner.as_str()).filter(|owner| !owner.is_empty());
        queue.restore_turn(owner, *turn);
    }
    for tree in &demand.waiting {
        let quota_key = queue.quota_key(tree.owner.as_deref(), &tree.agent);
        match tree.has_returned {
            true => queue.enqueue_first(quota_key, tree.root),
            false => queue.enqueue(quota_key, tree.root),
        };
    }
    std::iter::from_fn(|| queue.admit()).collect()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn a_tree_that_waits_again_is_not_forgotten_when_its_old_permit_is_free() {
        let permits = ClusterPermits::new(Limits::default());
        let root = RunId::new();
        let mut granted = pin!(permits.granted(root));
        assert!(granted.as_mut().now_or_never().is_none());
        permits.permit_freed();
        assert!(permits.is_waiting(root));
        permits.tree_ended(root);
        assert!(!permits.is_waiting(root));
    }

    fn solo_run() -> EnteringRun {
        EnteringRun {
            owner: None,
            agent: "solo".to_owned(),
            has_session: false,
            is_behind: false,
        }
    }

    #[test]
    fn only_a_few_runs_start_before_other_nodes_know_of_them() {
        let permits = ClusterPermits::new(Limits {
            max_running: 200,
            ..Limits::default()
        });
        let enter = || permits.try_enter(&solo_run()).expect("a place");
        let entries: Vec<QueuedTree> = std::iter::repeat_with(enter).take(12).collect();
        let started = entries.iter().filter(|entry| entry.has_permit).count();
        assert_eq!(started, 10);
        permits.forget_settled();
        permits.set_load(&[]);
        assert!(!enter().has_permit, "none of them is committed");
        drop(entries);
        permits.forget_settled();
        permits.set_load(&[]);
        assert!(enter().has_permit);
    }

    #[test]
    fn a_run_that_is_committed_while_the_load_is_read_counts() {
        let permits = ClusterPermits::new(Limits {
            max_running: 1,
            max_queued: 0,
            ..Limits::default()
        });
        let run = solo_run();
        let entry = permits.try_enter(&run).expect("a place");
        permits.forget_settled();
        let load = [];
        drop(entry);
        permits.set_load(&load);
        assert!(permits.try_enter(&run).is_err());
        permits.forget_settled();
        permits.set_load(&load);
        assert!(permits.try_enter(&run).is_ok());
    }
}
