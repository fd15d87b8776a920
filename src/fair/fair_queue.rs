//! The fair queue: which root runs hold a permit and which wait, within the limits of the daemon, the agent and the
//! key, and fair between keys. Only counts and order; it has no tasks and no locks.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::fair::Limits;
use crate::fair::key_queue::{ConcurrencyLimit, KeyQueue};
use crate::fair::shares::Shares;

/// The index of runs without a key, and of agents without a limit.
const UNLIMITED: u32 = 0;

/// Lower numbers are of waiters that come before all others.
const FIRST_NUMBER: u64 = 1 << 62;

/// The key and the agent whose limits a run counts for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuotaKey {
    key: u32,
    agent: u32,
}

/// A place in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    pub quota_key: QuotaKey,
    /// Within one key and one agent, a lower number is earlier.
    number: u64,
}

/// The queue. `W` is what the owner stores for each waiting run.
///
/// After [`FairQueue::release`] the owner calls [`FairQueue::admit`] until it returns `None`. So a new run finds a free
/// permit only if no waiting run could take it.
#[derive(Debug)]
pub struct FairQueue<W> {
    limits: Limits,
    /// The capacity of the queue.
    queue_shares: Shares,
    /// The permits, if the keys share them.
    permit_shares: Option<Shares>,
    /// Running runs, including children.
    live_shares: Shares,
    running: usize,
    waiting: usize,
    /// Runs that wait for something else before they enter the queue.
    deferred: usize,
    keys: Vec<KeyQueue<W>>,
    key_indices: HashMap<Box<str>, u32>,
    agents: Vec<ConcurrencyLimit>,
    agent_indices: HashMap<Box<str>, u32>,
    /// The keys with waiting runs; the key that was served longest ago comes first.
    service_order: BTreeSet<(u64, u32)>,
    /// Permits granted so far.
    granted: u64,
    /// Waiters so far.
    last_number: u64,
    /// As `last_number`, of those that come before all others.
    last_returned: u64,
}

impl<W> FairQueue<W> {
    pub fn new(limits: Limits) -> Self {
        let mut agents = vec![ConcurrencyLimit::new(None)];
        let mut agent_indices = HashMap::new();
        for ((name, limit), index) in limits.per_agent.iter().zip(1..) {
            agents.push(ConcurrencyLimit::new(Some(*limit)));
            agent_indices.insert(name.as_str().into(), index);
        }
        let keys = limits.keys.len();
        Self {
            queue_shares: Shares::new(limits.max_queued, keys, 1),
            permit_shares: (limits.shares_permits)
                .then(|| Shares::new(limits.max_running, keys, 0)),
            live_shares: Shares::new(limits.max_live, keys, 0),
            limits,
            running: 0,
            waiting: 0,
            deferred: 0,
            keys: vec![KeyQueue::new(None, 0, 0, 0)],
            key_indices: HashMap::new(),
            agents,
            agent_indices,
            service_order: BTreeSet::new(),
            granted: 0,
            last_number: FIRST_NUMBER,
            last_returned: 0,
        }
    }

    /// The limits that a run of `agent` counts for, if it was accepted with `key`. Names are never forgotten. Their
    /// number is bounded by the configured keys and the keys of unfinished runs.
    pub fn quota_key(&mut self, key: Option<&str>, agent: &str) -> QuotaKey {
        let agent = match self.agent_indices.is_empty() {
            true => UNLIMITED,
            false => self.agent_indices.get(agent).copied().unwrap_or(UNLIMITED),
        };
        let key = match key {
            None => UNLIMITED,
            Some(name) => match self.key_indices.get(name) {
                Some(index) => *index,
                None => self.add_key(name),
            },
        };
        QuotaKey { key, agent }
    }

    fn add_key(&mut self, name: &str) -> u32 {
        let Ok(index) = u32::try_from(self.keys.len()) else {
            return UNLIMITED;
        };
        let Limits {
            keys,
            per_key,
            default_per_key: other_keys,
            ..
        } = &self.limits;
        let is_configured = keys.iter().any(|key| key == name);
        let permit_shares = self.permit_shares.as_ref();
        self.keys.push(KeyQueue::new(
            per_key.get(name).copied().or(*other_keys),
            self.queue_shares.share(is_configured),
            permit_shares.map_or(0, |slots| slots.share(is_configured)),
            self.live_shares.share(is_configured),
        ));
        self.key_indices.insert(name.into(), index);
        index
    }

    /// Takes a permit at once; `false` if none is free or a limit is reached.
    pub fn try_acquire(&mut self, quota_key: QuotaKey) -> bool {
        let has_capacity = self.keys[quota_key.key as usize]
            .has_capacity(self.permit_shares.as_ref(), &self.live_shares);
        let is_available =
            self.has_free_permit() && has_capacity && self.agent_mut(quota_key).has_capacity();
        if is_available {
            self.grant(quota_key);
        }
        is_available
    }

    /// Counts permits that were granted elsewhere, even beyond the limits.
    pub fn add_running(&mut self, quota_key: QuotaKey, count: usize) {
        self.running += count;
        self.agent_mut(quota_key).running += count;
        self.key_mut(quota_key).concurrency.running += count;
    }

    /// Whether neither the agent nor the key has a limit, and one permit in five is free.
    pub fn is_far_from_limits(&self, quota_key: QuotaKey) -> bool {
        self.agents[quota_key.agent as usize].limit == usize::MAX
            && self.keys[quota_key.key as usize].concurrency.limit == usize::MAX
            && self.running < self.limits.max_running / 5 * 4
    }

    /// Orders a key among the others: a greater turn is later. To be called before the key has waiters.
    pub fn restore_turn(&mut self, key: Option<&str>, turn: u64) {
        let quota_key = self.quota_key(key, "");
        self.key_mut(quota_key).last_served = turn;
        self.granted = self.granted.max(turn);
    }

    /// Whether the limit of running root runs allows one more.
    fn has_free_permit(&self) -> bool {
        self.running < self.limits.max_running
    }

    /// Counts a child run of this key; `false` if the limit of running runs is reached, in total or for the key.
    pub fn try_add_child(&mut self, quota_key: QuotaKey) -> bool {
        let key = &self.keys[quota_key.key as usize];
        let is_available = self
            .live_shares
            .has_capacity(key.live_share, key.live_runs());
        if is_available {
            self.add_children(quota_key, 1);
        }
        is_available
    }

    /// Counts child runs, even beyond the limits.
    pub fn add_children(&mut self, quota_key: QuotaKey, count: usize) {
        let key = &mut self.keys[quota_key.key as usize];
        for _ in 0..count {
            self.live_shares.add(key.live_share, key.live_runs());
            key.live_children += 1;
        }
    }

    /// Releases child runs. Call [`FairQueue::admit`] afterwards, as after [`FairQueue::release`].
    pub fn release_children(&mut self, quota_key: QuotaKey, count: usize) {
        let key = &mut self.keys[quota_key.key as usize];
        for _ in 0..count {
            self.live_shares.remove(key.live_share, key.live_runs());
            key.live_children -= 1;
        }
    }

    /// Whether one more run of this key may wait: the key's share of the queue or the common part has capacity.
    pub fn has_queue_capacity(&self, quota_key: QuotaKey) -> bool {
        let key = &self.keys[quota_key.key as usize];
        self.queue_shares
            .has_capacity(key.queue_share, key.queued())
    }

    /// Counts a run that waits for something else.
    pub fn add_deferred(&mut self, quota_key: QuotaKey) {
        self.count_queued(quota_key);
        self.key_mut(quota_key).deferred += 1;
        self.deferred += 1;
    }

    /// Such a run waits no longer, or is about to enter the queue.
    pub fn remove_deferred(&mut self, quota_key: QuotaKey) {
        self.uncount_queued(quota_key);
        self.key_mut(quota_key).deferred -= 1;
        self.deferred -= 1;
    }

    fn count_queued(&mut self, quota_key: QuotaKey) {
        let key = &self.keys[quota_key.key as usize];
        self.queue_shares.add(key.queue_share, key.queued());
    }

    fn uncount_queued(&mut self, quota_key: QuotaKey) {
        let key = &self.keys[quota_key.key as usize];
        self.queue_shares.remove(key.queue_share, key.queued());
    }

    /// Adds a waiter at the end of the queue, even beyond its capacity.
    pub fn enqueue(&mut self, quota_key: QuotaKey, waiter: W) -> Ticket {
        self.last_number += 1;
        self.insert(quota_key, self.last_number, waiter)
    }

    /// Adds a waiter before all that did not enter the queue like this, even beyond its capacity.
    pub fn enqueue_first(&mut self, quota_key: QuotaKey, waiter: W) -> Ticket {
        self.last_returned += 1;
        self.insert(quota_key, self.last_returned, waiter)
    }

    fn insert(&mut self, quota_key: QuotaKey, number: u64, waiter: W) -> Ticket {
        self.count_queued(quota_key);
        self.waiting += 1;
        let key = self.key_mut(quota_key);
        let lane = lane_index(quota_key);
        if key.lanes.len() <= lane {
            key.lanes.resize_with(lane + 1, BTreeMap::new);
        }
        key.lanes[lane].insert(number, waiter);
        key.waiting += 1;
        let last_served = key.last_served;
        self.service_order.insert((last_served, quota_key.key));
        Ticket { quota_key, number }
    }

    /// The waiter with this ticket; `None` if it was granted a permit.
    pub fn waiter_mut(&mut self, ticket: Ticket) -> Option<&mut W> {
        let lane = self
            .key_mut(ticket.quota_key)
            .lanes
            .get_mut(lane_index(ticket.quota_key))?;
        lane.get_mut(&ticket.number)
    }

    /// Leaves the queue. `None` if the ticket was granted a permit, which must then be released.
    pub fn remove(&mut self, ticket: Ticket) -> Option<W> {
        let quota_key = ticket.quota_key;
        let key = self.key_mut(quota_key);
        let waiter = key
            .lanes
            .get_mut(lane_index(quota_key))?
            .remove(&ticket.number)?;
        self.uncount_queued(quota_key);
        let key = self.key_mut(quota_key);
        key.waiting -= 1;
        if key.waiting == 0 {
            let last_served = key.last_served;
            self.service_order.remove(&(last_served, quota_key.key));
        }
        self.waiting -= 1;
        Some(waiter)
    }

    pub fn release(&mut self, quota_key: QuotaKey) {
        self.running -= 1;
        let key = &mut self.keys[quota_key.key as usize];
        if let Some(permit_shares) = &mut self.permit_shares {
            permit_shares.remove(key.permit_share, key.concurrency.running);
        }
        self.live_shares.remove(key.live_share, key.live_runs());
        key.concurrency.running -= 1;
        self.agent_mut(quota_key).running -= 1;
    }

    /// Grants a free permit to the next waiter: the earliest run that could start, of the key that was served longest
    /// ago. `None` if no permit is free or no waiter could take one.
    pub fn admit(&mut self) -> Option<W> {
        if self.waiting == 0 || !self.has_free_permit() {
            return None;
        }
        let quota_key = self.service_order.iter().find_map(|(_, key)| {
            let key_queue = &self.keys[*key as usize];
            let agent = key_queue.first_startable_agent(
                &self.agents,
                self.permit_shares.as_ref(),
                &self.live_shares,
            )?;
            Some(QuotaKey { key: *key, agent })
        })?;
        let number = *self.key_mut(quota_key).lanes[lane_index(quota_key)]
            .first_key_value()?
            .0;
        let waiter = self.remove(Ticket { quota_key, number });
        self.grant(quota_key);
        waiter
    }

    /// Runs with a permit, and waiting runs including deferred ones.
    pub fn load(&self) -> (usize, usize) {
        (self.running, self.waiting + self.deferred)
    }

    /// Counts a permit and moves the key to the end of the service order.
    fn grant(&mut self, quota_key: QuotaKey) {
        self.running += 1;
        self.granted += 1;
        self.agent_mut(quota_key).running += 1;
        let now = self.granted;
        let key = &mut self.keys[quota_key.key as usize];
        if let Some(permit_shares) = &mut self.permit_shares {
            permit_shares.add(key.permit_share, key.concurrency.running);
        }
        self.live_shares.add(key.live_share, key.live_runs());
        key.concurrency.running += 1;
        let before = std::mem::replace(&mut key.last_served, now);
        if key.waiting > 0 {
            self.service_order.remove(&(before, quota_key.key));
            self.service_order.insert((now, quota_key.key));
        }
    }

    // Indexing cannot panic: only `quota_key` creates indices, and both lists only grow.

    fn key_mut(&mut self, quota_key: QuotaKey) -> &mut KeyQueue<W> {
        &mut self.keys[quota_key.key as usize]
    }

    fn agent_mut(&mut self, quota_key: QuotaKey) -> &mut ConcurrencyLimit {
        &mut self.agents[quota_key.agent as usize]
    }
}

fn lane_index(quota_key: QuotaKey) -> usize {
    quota_key.agent as usize
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::FairQueue;
    use crate::fair::Limits;
    use crate::fair::reference_queue::{
        AGENTS, KEYS, Operation, ReferenceQueue, Waiter, limits, operation, tight,
    };

    /// The order of admission without the limit of running runs.
    fn drain(queue: &mut FairQueue<&'static str>) -> Vec<&'static str> {
        queue.limits.max_running = usize::MAX;
        std::iter::from_fn(|| queue.admit()).collect()
    }

    #[test]
    fn within_a_key_order_is_fifo() {
        let mut queue = FairQueue::new(limits(0));
        for (agent, waiter) in [("free", "1"), ("loose", "2"), ("free", "3")] {
            let quota_key = queue.quota_key(Some("ada"), agent);
            assert!(!queue.try_acquire(quota_key));
            queue.enqueue(quota_key, waiter);
        }
        assert_eq!(queue.load(), (0, 3));
        assert_eq!(drain(&mut queue), ["1", "2", "3"]);
    }

    #[test]
    fn keys_are_served_round_robin() {
        let mut queue = FairQueue::new(limits(1));
        let (ada, bob) = (
            queue.quota_key(Some("ada"), "a"),
            queue.quota_key(Some("bob"), "a"),
        );
        assert!(queue.try_acquire(ada));
        for waiter in ["ada 2", "ada 3", "ada 4"] {
            queue.enqueue(ada, waiter);
        }
        queue.enqueue(bob, "bob 1");
        queue.enqueue(bob, "bob 2");
        // Ada has had a permit, Bob none.
        assert_eq!(
            drain(&mut queue),
            ["bob 1", "ada 2", "bob 2", "ada 3", "ada 4"]
        );
    }

    #[test]
    fn an_immediate_permit_counts_as_served() {
        let mut queue = FairQueue::new(limits(2));
        let (ada, bob) = (
            queue.quota_key(Some("ada"), "a"),
            queue.quota_key(Some("bob"), "a"),
        );
        assert!(queue.try_acquire(bob) && queue.try_acquire(ada));
        queue.enqueue(ada, "ada");
        queue.enqueue(bob, "bob");
        queue.release(bob);
        assert_eq!((queue.admit(), queue.admit()), (Some("bob"), None));
    }

    #[test]
    fn a_limited_agent_blocks_no_run_behind_it() {
        let mut queue = FairQueue::new(tight());
        let planner = queue.quota_key(None, "planner");
        let free = queue.quota_key(None, "free");
        assert!(queue.try_acquire(planner) && queue.try_acquire(free) && queue.try_acquire(free));
        queue.enqueue(planner, "planner");
        queue.enqueue(free, "free");
        queue.release(free);
        assert_eq!((queue.admit(), queue.admit()), (Some("free"), None));
        // A permit is free, and the planner still waits for its agent's limit.
        queue.release(free);
        assert_eq!(queue.admit(), None);
        assert!(queue.try_acquire(free));
        queue.release(free);
        queue.release(planner);
        assert_eq!(queue.admit(), Some("planner"));
    }

    #[test]
    fn a_key_has_its_own_limit_or_that_of_all_others() {
        let mut queue = FairQueue::new(tight());
        let (ci, ada) = (
            queue.quota_key(Some("ci"), "free"),
            queue.quota_key(Some("ada"), "free"),
        );
        assert!(queue.try_acquire(ci) && !queue.try_acquire(ci));
        assert!(queue.try_acquire(ada) && queue.try_acquire(ada));
        queue.enqueue(ci, "ci");
        queue.release(ada);
        assert_eq!(queue.admit(), None);
        queue.release(ci);
        assert_eq!(queue.admit(), Some("ci"));
    }

    #[test]
    fn one_released_permit_may_admit_two() {
        let mut queue = FairQueue::new(Limits {
            max_running: 10,
            ..tight()
        });
        let [ada, bob, ci] = ["ada", "bob", "ci"].map(Some);
        let planner_of_ci = queue.quota_key(ci, "planner");
        assert!(queue.try_acquire(planner_of_ci));
        let (of_ci, of_ada) = (queue.quota_key(ci, "free"), queue.quota_key(ada, "planner"));
        queue.enqueue(of_ci, "ci's");
        queue.enqueue(of_ada, "ada's planner");
        let of_bob = queue.quota_key(bob, "planner");
        queue.enqueue(of_bob, "bob's planner");
        queue.release(planner_of_ci);
        let next = [queue.admit(), queue.admit(), queue.admit()];
        assert_eq!(next, [Some("ada's planner"), Some("ci's"), None]);
    }

    #[test]
    fn children_of_a_key_leave_the_others_their_share() {
        let mut queue = FairQueue::new(Limits {
            max_live: 8,
            keys: ["ada", "bob"].map(str::to_owned).into(),
            ..limits(8)
        });
        let (ada, bob) = (
            queue.quota_key(Some("ada"), "a"),
            queue.quota_key(Some("bob"), "a"),
        );
        assert!(queue.try_acquire(ada));
        let taken = (0..9).filter(|_| queue.try_add_child(ada)).count();
        assert_eq!(taken, 5, "the common half, and her share of the other half");
        assert!(!queue.try_acquire(ada));
        assert!(queue.try_acquire(bob) && queue.try_add_child(bob) && !queue.try_add_child(bob));
        queue.enqueue(bob, "bob");
        queue.enqueue(ada, "ada");
        queue.release_children(ada, 5);
        // Ada was served before Bob.
        assert_eq!((queue.admit(), queue.admit()), (Some("ada"), Some("bob")));
        // Recovered children count, even beyond the limit.
        queue.add_children(bob, 20);
        assert!(!queue.try_add_child(bob));
        queue.release_children(bob, 21);
        assert!(queue.try_add_child(bob));
    }

    #[test]
    fn removing_a_waiter_leaves_no_gap() {
        let mut queue = FairQueue::new(limits(0));
        let quota_key = queue.quota_key(Some("ada"), "free");
        let first = queue.enqueue(quota_key, "1");
        let second = queue.enqueue(quota_key, "2");
        queue.enqueue(quota_key, "3");
        assert_eq!(queue.remove(second), Some("2"));
        assert_eq!(queue.remove(second), None);
        assert_eq!(queue.remove(first), Some("1"));
        assert_eq!(queue.load(), (0, 1));
        assert_eq!(drain(&mut queue), ["3"]);
        assert!(queue.service_order.is_empty());
    }

    proptest! {
        /// Whatever happens, the queue admits the same runs in the same order as the simple model.
        #[test]
        fn it_agrees_with_the_reference_queue(operations in proptest::collection::vec(operation(), 0..200)) {
            let mut queue: FairQueue<usize> = FairQueue::new(tight());
            // Keys that were never served are ordered by when they were added.
            for key in KEYS {
                queue.quota_key(key, "free");
            }
            let mut reference = ReferenceQueue::default();
            for (number, operation) in operations.into_iter().enumerate() {
                match operation {
                    Operation::Enter { key, agent } => {
                        let quota_key = queue.quota_key(KEYS[key], AGENTS[agent]);
                        let starts = reference.could_start(key, agent);
                        prop_assert_eq!(queue.try_acquire(quota_key), starts);
                        if starts {
                            reference.start(key, agent);
                        } else {
                            let ticket = queue.enqueue(quota_key, number);
                            reference.waiting.push(Waiter { number, ticket, key, agent });
                        }
                    }
                    Operation::Cancel(which) if !reference.waiting.is_empty() => {
                        let cancelled = reference.waiting.remove(which % reference.waiting.len());
                        prop_assert_eq!(queue.remove(cancelled.ticket), Some(cancelled.number));
                    }
                    Operation::Release(which) if !reference.running.is_empty() => {
                        let (key, agent) = reference.running.remove(which % reference.running.len());
                        let quota_key = queue.quota_key(KEYS[key], AGENTS[agent]);
                        queue.release(quota_key);
                        while let Some(next) = queue.admit() {
                            prop_assert_eq!(Some(next), reference.next().map(|next| next.number));
                        }
                        prop_assert!(reference.next().is_none());
                    }
                    Operation::Cancel(_) | Operation::Release(_) => {}
                }
                prop_assert_eq!(queue.load(), (reference.running.len(), reference.waiting.len()));
                for waiter in &reference.waiting {
                    prop_assert_eq!(queue.waiter_mut(waiter.ticket).copied(), Some(waiter.number));
                }
            }
            // Every remaining waiter is served in the end.
            while let Some((key, agent)) = reference.running.pop() {
                let quota_key = queue.quota_key(KEYS[key], AGENTS[agent]);
                queue.release(quota_key);
                while let Some(next) = queue.admit() {
                    prop_assert_eq!(Some(next), reference.next().map(|next| next.number));
                }
            }
            prop_assert_eq!(queue.load(), (0, 0));
            prop_assert!(queue.service_order.is_empty());
        }
    }
}
