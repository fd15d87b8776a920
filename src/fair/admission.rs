//! Admission of root runs: a permit for every running one, a queue for those that wait. Decisions are made under one
//! short lock. Permits and places release themselves when dropped. Child runs need neither.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use crate::fair::Limits;
use crate::fair::fair_queue::{FairQueue, QuotaKey, Ticket};

type SharedQueue = Arc<Mutex<FairQueue<Option<Waker>>>>;

/// Hands out run permits.
#[derive(Debug)]
pub struct AdmissionQueue(SharedQueue);

impl AdmissionQueue {
    pub fn new(limits: Limits) -> Self {
        Self(Arc::new(Mutex::new(FairQueue::new(limits))))
    }

    /// Returns a permit for a run of `agent`, accepted with the API key `key`, or else the last place in the queue.
    ///
    /// # Errors
    /// The run cannot start now, and the key's share of the queue is full.
    pub fn enter(&self, key: Option<&str>, agent: &str) -> Result<Admission, QueueFull> {
        let mut queue = lock(&self.0);
        let quota_key = queue.quota_key(key, agent);
        if queue.try_acquire(quota_key) {
            return Ok(Admission::Permit(self.permit(quota_key)));
        }
        if !queue.has_queue_capacity(quota_key) {
            let (running, queued) = queue.load();
            return Err(QueueFull { running, queued });
        }
        Ok(Admission::Queued(self.enqueue(&mut queue, quota_key)))
    }

    /// As [`AdmissionQueue::enter_accepted`], for a run that released its permit while it waited for something else. It
    /// comes before the key's runs that have not started.
    pub fn enter_again(&self, key: Option<&str>, agent: &str) -> Admission {
        let mut queue = lock(&self.0);
        let quota_key = queue.quota_key(key, agent);
        if queue.try_acquire(quota_key) {
            return Admission::Permit(self.permit(quota_key));
        }
        Admission::Queued(Queued {
            queue: Arc::clone(&self.0),
            ticket: Some(queue.enqueue_first(quota_key, None)),
        })
    }

    /// As [`AdmissionQueue::enter`], for a run that was accepted before and is never rejected: one recovered after a
    /// restart.
    pub fn enter_accepted(&self, key: Option<&str>, agent: &str) -> Admission {
        let mut queue = lock(&self.0);
        let quota_key = queue.quota_key(key, agent);
        match queue.try_acquire(quota_key) {
            true => Admission::Permit(self.permit(quota_key)),
            false => Admission::Queued(self.enqueue(&mut queue, quota_key)),
        }
    }

    /// As [`AdmissionQueue::enter`], for a run that waits for something else first. It counts as queued and holds no
    /// permit.
    pub fn enter_deferred(&self, key: Option<&str>, agent: &str) -> Result<Admission, QueueFull> {
        let mut queue = lock(&self.0);
        let quota_key = queue.quota_key(key, agent);
        if !queue.has_queue_capacity(quota_key) {
            let (running, queued) = queue.load();
            return Err(QueueFull { running, queued });
        }
        Ok(Admission::Deferred(self.defer(&mut queue, quota_key)))
    }

    /// As [`AdmissionQueue::enter_deferred`], for a run that was accepted before and is never rejected.
    pub fn enter_accepted_deferred(&self, key: Option<&str>, agent: &str) -> Admission {
        let mut queue = lock(&self.0);
        let quota_key = queue.quota_key(key, agent);
        Admission::Deferred(self.defer(&mut queue, quota_key))
    }

    /// Root runs with a permit, and queued root runs.
    pub fn load(&self) -> (usize, usize) {
        lock(&self.0).load()
    }

    fn permit(&self, quota_key: QuotaKey) -> RunPermit {
        RunPermit {
            queue: Arc::clone(&self.0),
            quota_key,
            children: 0,
        }
    }

    fn defer(&self, queue: &mut FairQueue<Option<Waker>>, quota_key: QuotaKey) -> Deferred {
        queue.add_deferred(quota_key);
        Deferred {
            queue: Arc::clone(&self.0),
            quota_key,
        }
    }

    fn enqueue(&self, queue: &mut FairQueue<Option<Waker>>, quota_key: QuotaKey) -> Queued {
        Queued {
            queue: Arc::clone(&self.0),
            ticket: Some(queue.enqueue(quota_key, None)),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueFull {
    /// Root runs with a permit.
    pub running: usize,
    /// Queued root runs.
    pub queued: usize,
}

/// The admission state of a root run.
#[derive(Debug)]
pub enum Admission {
    /// It may run at once.
    Permit(RunPermit),
    Queued(Queued),
    /// Not in the queue yet, because it waits for something else.
    Deferred(Deferred),
}

impl Admission {
    /// Waits for the permit. A deferred run enters the queue now.
    pub async fn permit(self) -> RunPermit {
        match self {
            Self::Permit(permit) => permit,
            Self::Queued(queued) => queued.await,
            Self::Deferred(deferred) => deferred.acquire().await,
        }
    }
}

/// Allows one root run to run. When dropped, it is released and wakes the next run.
#[derive(Debug)]
pub struct RunPermit {
    queue: SharedQueue,
    quota_key: QuotaKey,
    /// Running child runs of its tree.
    children: usize,
}

impl RunPermit {
    /// Counts a child run; `false` if the limit of running runs is reached, in total or for the key.
    pub fn try_add_child(&mut self) -> bool {
        let is_added = lock(&self.queue).try_add_child(self.quota_key);
        self.children += usize::from(is_added);
        is_added
    }

    /// Counts child runs that were admitted before, even beyond the limits.
    pub fn add_children(&mut self, count: usize) {
        if count > 0 {
            lock(&self.queue).add_children(self.quota_key, count);
            self.children += count;
        }
    }

    pub fn release_child(&mut self) {
        self.children -= 1;
        let quota_key = self.quota_key;
        release_and_admit(&self.queue, |queue| queue.release_children(quota_key, 1));
    }
}

impl Drop for RunPermit {
    fn drop(&mut self) {
        let (quota_key, children) = (self.quota_key, self.children);
        release_and_admit(&self.queue, |queue| {
            queue.release(quota_key);
            queue.release_children(quota_key, children);
        });
    }
}

/// A place in the queue, which resolves to a permit. Dropping it leaves the queue.
#[derive(Debug)]
pub struct Queued {
    queue: SharedQueue,
    /// `None` once the permit has been handed out.
    ticket: Option<Ticket>,
}

/// A run that counts as waiting without a place in the queue, until it is dropped.
#[derive(Debug)]
pub struct Deferred {
    queue: SharedQueue,
    quota_key: QuotaKey,
}

impl Deferred {
    /// Enters the end of the queue and waits for the permit.
    async fn acquire(self) -> RunPermit {
        let queued = {
            let mut fair_queue = lock(&self.queue);
            let queue = AdmissionQueue(Arc::clone(&self.queue));
            match fair_queue.try_acquire(self.quota_key) {
                true => return queue.permit(self.quota_key),
                false => queue.enqueue(&mut fair_queue, self.quota_key),
            }
        };
        drop(self);
        queued.await
    }
}

impl Drop for Deferred {
    fn drop(&mut self) {
        lock(&self.queue).remove_deferred(self.quota_key);
    }
}

impl Future for Queued {
    type Output = RunPermit;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<RunPermit> {
        let this = self.get_mut();
        let Some(ticket) = this.ticket else {
            return Poll::Pending;
        };
        let waker = context.waker().clone();
        let mut queue = lock(&this.queue);
        if let Some(stored_waker) = queue.waiter_mut(ticket) {
            let previous = stored_waker.replace(waker);
            // Dropping the last waker of a task may drop the task, whose own permit needs the lock.
            drop(queue);
            drop(previous);
            return Poll::Pending;
        }
        drop(queue);
        this.ticket = None;
        Poll::Ready(RunPermit {
            queue: Arc::clone(&this.queue),
            quota_key: ticket.quota_key,
            children: 0,
        })
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket else { return };
        let removed = lock(&self.queue).remove(ticket);
        if removed.is_none() {
            // Its permit was granted already.
            release_and_admit(&self.queue, |queue| queue.release(ticket.quota_key));
        }
    }
}

/// Releases something, then grants all permits that this frees before a new run can take them.
fn release_and_admit(queue: &SharedQueue, release: impl FnOnce(&mut FairQueue<Option<Waker>>)) {
    let mut wakers = Vec::new();
    {
        let mut queue = lock(queue);
        release(&mut queue);
        wakers.extend(std::iter::from_fn(|| queue.admit()));
    }
    // A run that was not polled yet finds its permit when it is.
    wakers.into_iter().flatten().for_each(Waker::wake);
}

fn lock(queue: &SharedQueue) -> MutexGuard<'_, FairQueue<Option<Waker>>> {
    queue.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures_util::FutureExt;
    use tokio::task::JoinSet;

    use super::{Admission, AdmissionQueue, QueueFull};
    use crate::fair::Limits;

    fn queue(max_running: usize, max_queued: usize) -> AdmissionQueue {
        AdmissionQueue::new(Limits {
            max_running,
            max_queued,
            per_agent: BTreeMap::from([("planner".to_owned(), 1)]),
            per_key: BTreeMap::from([("ci".to_owned(), 1)]),
            ..Limits::default()
        })
    }

    #[test]
    fn a_full_queue_reports_its_size() {
        let queue = queue(1, 1);
        let _permit = queue.enter(None, "solo").expect("a permit");
        let admission = queue.enter(None, "solo").expect("a place in the queue");
        assert!(matches!(admission, Admission::Queued(_)));
        let full = QueueFull {
            running: 1,
            queued: 1,
        };
        assert_eq!(queue.enter(None, "solo").err(), Some(full));
        // A run that was accepted before is not rejected.
        let accepted = queue.enter_accepted(None, "solo");
        assert!(matches!(accepted, Admission::Queued(_)));
        assert_eq!(queue.load(), (1, 2));
    }

    #[test]
    fn a_keys_backlog_leaves_the_others_their_share() {
        let queue = AdmissionQueue::new(Limits {
            max_running: 0,
            max_queued: 4,
            keys: ["ada", "bob"].map(str::to_owned).to_vec(),
            ..Limits::default()
        });
        let mut of_ada = Vec::new();
        while let Ok(admission) = queue.enter(Some("ada"), "solo") {
            of_ada.push(admission);
        }
        // The common half, and her share of the other half.
        assert_eq!(of_ada.len(), 3);
        assert!(queue.enter_deferred(Some("ada"), "solo").is_err());
        let bob = queue
            .enter_deferred(Some("bob"), "solo")
            .expect("his share");
        assert!(queue.enter(Some("bob"), "solo").is_err());
        assert_eq!(queue.load(), (0, 4));
        // A key releases its common places first, so others may take them.
        drop(of_ada.pop());
        let second = queue
            .enter(Some("bob"), "solo")
            .expect("a place in the queue");
        assert!(queue.enter(Some("ada"), "solo").is_err());
        drop((bob, second, of_ada));
        assert!(queue.enter(None, "solo").is_ok());
    }

    #[test]
    fn startable_runs_are_not_refused_for_blocked_ones() {
        let queue = queue(2, 1);
        let _planner = queue.enter(None, "planner").expect("a permit");
        let _queued = queue.enter(None, "planner").expect("a place in the queue");
        assert!(queue.enter(None, "planner").is_err());
        let solo = queue.enter(None, "solo");
        assert!(matches!(solo, Ok(Admission::Permit(_))));
    }

    #[test]
    fn one_released_permit_may_admit_two() {
        let queue = queue(9, 9);
        let permit = queue.enter(Some("ci"), "planner").expect("a permit");
        let of_ci = queue
            .enter(Some("ci"), "solo")
            .expect("a place in the queue");
        let planner = queue
            .enter(Some("ada"), "planner")
            .expect("a place in the queue");
        drop(permit);
        assert_eq!(queue.load(), (2, 0));
        drop((of_ci, planner));
    }

    #[test]
    fn a_deferred_run_counts_as_queued_without_a_permit() {
        let queue = queue(1, 2);
        let deferred = queue
            .enter_deferred(None, "solo")
            .expect("a place in the queue");
        assert_eq!(queue.load(), (0, 1));
        let permit = queue.enter(None, "solo").expect("a permit");
        assert!(matches!(permit, Admission::Permit(_)));
        let mut second = Box::pin(
            queue
                .enter(None, "solo")
                .expect("a place in the queue")
                .permit(),
        );
        assert!(queue.enter_deferred(None, "solo").is_err());
        assert!(queue.enter(None, "solo").is_err());
        let accepted = queue.enter_accepted_deferred(None, "solo");
        assert_eq!(queue.load(), (1, 3));
        drop(accepted);
        // It is queued behind the others.
        let mut first = Box::pin(deferred.permit());
        assert!(first.as_mut().now_or_never().is_none());
        assert_eq!(queue.load(), (1, 2));
        drop(permit);
        assert!(first.as_mut().now_or_never().is_none());
        drop(second.as_mut().now_or_never().expect("its permit"));
        assert!(first.as_mut().now_or_never().is_some());
        assert_eq!(queue.load(), (0, 0));
    }

    #[test]
    fn children_count_as_live_and_queued_roots_go_first() {
        let queue = AdmissionQueue::new(Limits {
            max_live: 3,
            ..Limits::default()
        });
        let Ok(Admission::Permit(mut permit)) = queue.enter(None, "solo") else {
            panic!("no permit");
        };
        assert!(permit.try_add_child() && permit.try_add_child() && !permit.try_add_child());
        let mut second = Box::pin(
            queue
                .enter(None, "solo")
                .expect("a place in the queue")
                .permit(),
        );
        assert!(second.as_mut().now_or_never().is_none());
        permit.release_child();
        // The free capacity went to the waiting root run.
        assert!(!permit.try_add_child());
        let second = second.now_or_never().expect("a permit");
        // Recovered children count again, and none is rejected.
        permit.add_children(2);
        drop(second);
        assert!(!permit.try_add_child());
        drop(permit);
        let Ok(Admission::Permit(mut permit)) = queue.enter(None, "solo") else {
            panic!("no permit");
        };
        assert!(permit.try_add_child() && permit.try_add_child() && !permit.try_add_child());
    }

    #[test]
    fn dropping_releases_the_permit() {
        let queue = queue(1, 9);
        let permit = queue.enter(None, "solo").expect("a permit");
        let mut first = Box::pin(
            queue
                .enter(None, "solo")
                .expect("a place in the queue")
                .permit(),
        );
        let second = queue.enter(None, "solo").expect("a place in the queue");
        let third = queue.enter(None, "solo").expect("a place in the queue");
        assert!(first.as_mut().now_or_never().is_none());
        drop(second);
        assert_eq!(queue.load(), (1, 2));
        drop(permit);
        assert_eq!(queue.load(), (1, 1));
        // Its permit was granted but never taken.
        drop(first);
        assert_eq!(queue.load(), (1, 0));
        let third = third.permit().now_or_never();
        assert!(third.is_some());
        drop(third);
        assert_eq!(queue.load(), (0, 0));
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn concurrent_runs_stay_within_limits_and_lose_no_permit() {
        let queue = Arc::new(queue(3, usize::MAX));
        let running = Arc::new([AtomicUsize::new(0), AtomicUsize::new(0)]);
        let mut runs = JoinSet::new();
        for number in 0..2000 {
            let key = ["ada", "bob"][number % 2];
            let agent = ["planner", "solo", "free"][number % 3];
            let (queue, running) = (Arc::clone(&queue), Arc::clone(&running));
            runs.spawn(async move {
                let admission = queue.enter(Some(key), agent).expect("a place in the queue");
                if number % 7 == 0 {
                    return drop(admission);
                }
                let _permit = admission.permit().await;
                let [all, planners] = &*running;
                let planner = usize::from(agent == "planner");
                assert!(all.fetch_add(1, Ordering::SeqCst) < 3);
                assert!(planners.fetch_add(planner, Ordering::SeqCst) < 1 || planner == 0);
                tokio::task::yield_now().await;
                planners.fetch_sub(planner, Ordering::SeqCst);
                all.fetch_sub(1, Ordering::SeqCst);
            });
        }
        while let Some(done) = runs.join_next().await {
            done.expect("a run without a panic");
        }
        assert_eq!(queue.load(), (0, 0));
    }
}
