//! Admission: a slot for every root run at work, and a place in line for those that wait. What it says is decided before
//! it returns, under one short lock; what is handed out gives itself back. Children need neither.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use crate::fair::Limits;
use crate::fair::line::{Line, Seat, Ticket};

/// The line and its lock.
type Shared = Arc<Mutex<Line<Option<Waker>>>>;

/// The line for slots.
#[derive(Debug)]
pub struct Queue(Shared);

impl Queue {
    /// An empty one with these limits.
    pub fn new(limits: Limits) -> Self {
        Self(Arc::new(Mutex::new(Line::new(limits))))
    }

    /// A free slot for a run of this agent, accepted with the key of this name, else the last place in line. Refused only
    /// where it cannot start now and as many of this key wait as may.
    pub fn enter(&self, key: Option<&str>, agent: &str) -> Result<Place, Full> {
        let mut line = lock(&self.0);
        let seat = line.seat(key, agent);
        if line.take(seat) {
            return Ok(Place::Slot(self.slot(seat)));
        }
        if !line.has_room(seat) {
            let (running, queued) = line.load();
            return Err(Full { running, queued });
        }
        Ok(Place::InLine(self.stand(&mut line, seat)))
    }

    /// As [`Queue::enter`] for a run that was accepted before and is never refused: one that an earlier process left, or
    /// that gave its slot back while it waited for something else.
    pub fn enter_again(&self, key: Option<&str>, agent: &str) -> Place {
        let mut line = lock(&self.0);
        let seat = line.seat(key, agent);
        match line.take(seat) {
            true => Place::Slot(self.slot(seat)),
            false => Place::InLine(self.stand(&mut line, seat)),
        }
    }

    /// As [`Queue::enter`] for a run that waits for something else first: it counts as one in line and holds nothing.
    pub fn stand_aside(&self, key: Option<&str>, agent: &str) -> Result<Place, Full> {
        let mut line = lock(&self.0);
        let seat = line.seat(key, agent);
        if !line.has_room(seat) {
            let (running, queued) = line.load();
            return Err(Full { running, queued });
        }
        Ok(Place::Aside(self.aside(&mut line, seat)))
    }

    /// As [`Queue::stand_aside`] for a run that was accepted before and is never refused.
    pub fn stand_aside_again(&self, key: Option<&str>, agent: &str) -> Place {
        let mut line = lock(&self.0);
        let seat = line.seat(key, agent);
        Place::Aside(self.aside(&mut line, seat))
    }

    /// Root runs that hold a slot, and root runs in line.
    pub fn load(&self) -> (usize, usize) {
        lock(&self.0).load()
    }

    fn slot(&self, seat: Seat) -> Slot {
        Slot {
            line: Arc::clone(&self.0),
            seat,
            children: 0,
        }
    }

    fn aside(&self, line: &mut Line<Option<Waker>>, seat: Seat) -> Aside {
        line.step_aside(seat);
        Aside {
            line: Arc::clone(&self.0),
            seat,
        }
    }

    fn stand(&self, line: &mut Line<Option<Waker>>, seat: Seat) -> InLine {
        InLine {
            line: Arc::clone(&self.0),
            ticket: Some(line.join(seat, None)),
        }
    }
}

/// The queue is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full {
    /// Root runs that hold a slot.
    pub running: usize,
    /// Root runs in line.
    pub queued: usize,
}

/// Where a root run begins.
#[derive(Debug)]
pub enum Place {
    /// At work at once.
    Slot(Slot),
    /// In line.
    InLine(InLine),
    /// Not in line yet, as it waits for something else.
    Aside(Aside),
}

impl Place {
    /// Waits for the slot. One that stood aside comes in line now.
    pub async fn slot(self) -> Slot {
        match self {
            Self::Slot(slot) => slot,
            Self::InLine(place) => place.await,
            Self::Aside(aside) => aside.come().await,
        }
    }
}

/// The right of one root run to be at work. Gives itself back, and wakes who comes next, when it is dropped.
#[derive(Debug)]
pub struct Slot {
    line: Shared,
    seat: Seat,
    /// Child runs at work in its tree.
    children: usize,
}

impl Slot {
    /// Counts a child run of its tree; false where as many runs are at work as may, in all or of its key.
    pub fn take_child(&mut self) -> bool {
        let is_taken = lock(&self.line).take_child(self.seat);
        self.children += usize::from(is_taken);
        is_taken
    }

    /// Counts child runs that were let in before, however many are at work.
    pub fn add_children(&mut self, count: usize) {
        if count > 0 {
            lock(&self.line).add_children(self.seat, count);
            self.children += count;
        }
    }

    /// A child run has ended.
    pub fn release_child(&mut self) {
        self.children -= 1;
        let seat = self.seat;
        hand_out(&self.line, |line| line.release_children(seat, 1));
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let (seat, children) = (self.seat, self.children);
        hand_out(&self.line, |line| {
            line.release(seat);
            line.release_children(seat, children);
        });
    }
}

/// A place in line, which becomes a slot when it is waited for. Whoever drops it has left the line.
#[derive(Debug)]
pub struct InLine {
    line: Shared,
    /// None once the slot has been handed out.
    ticket: Option<Ticket>,
}

/// One that counts as waiting and is not in line. Whoever drops it counts no longer.
#[derive(Debug)]
pub struct Aside {
    line: Shared,
    seat: Seat,
}

impl Aside {
    /// Comes in line, at its end, and waits for the slot.
    async fn come(self) -> Slot {
        let place = {
            let mut line = lock(&self.line);
            let queue = Queue(Arc::clone(&self.line));
            match line.take(self.seat) {
                true => return queue.slot(self.seat),
                false => queue.stand(&mut line, self.seat),
            }
        };
        drop(self);
        place.await
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        lock(&self.line).step_back(self.seat);
    }
}

impl Future for InLine {
    type Output = Slot;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Slot> {
        let this = self.get_mut();
        let Some(ticket) = this.ticket else {
            return Poll::Pending;
        };
        let waker = context.waker().clone();
        let mut line = lock(&this.line);
        if let Some(who) = line.find(ticket) {
            let before = who.replace(waker);
            // The last waker of a task takes the task with it, whose own slot needs the lock.
            drop(line);
            drop(before);
            return Poll::Pending;
        }
        drop(line);
        this.ticket = None;
        Poll::Ready(Slot {
            line: Arc::clone(&this.line),
            seat: ticket.seat,
            children: 0,
        })
    }
}

impl Drop for InLine {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket else { return };
        let left = lock(&self.line).leave(ticket);
        if left.is_none() {
            // Its slot was on its way.
            hand_out(&self.line, |line| line.release(ticket.seat));
        }
    }
}

/// Gives something back, and hands out all slots that this makes free before anybody new can come.
fn hand_out(line: &Shared, give_back: impl FnOnce(&mut Line<Option<Waker>>)) {
    let mut next = Vec::new();
    {
        let mut line = lock(line);
        give_back(&mut line);
        next.extend(std::iter::from_fn(|| line.admit()));
    }
    // One that has not been polled yet finds its slot when it is.
    next.into_iter().flatten().for_each(Waker::wake);
}

fn lock(line: &Shared) -> MutexGuard<'_, Line<Option<Waker>>> {
    line.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures_util::FutureExt;
    use tokio::task::JoinSet;

    use super::{Full, Place, Queue};
    use crate::fair::Limits;

    fn queue(max_running: usize, max_queued: usize) -> Queue {
        Queue::new(Limits {
            max_running,
            max_queued,
            per_agent: BTreeMap::from([("planner".to_owned(), 1)]),
            per_key: BTreeMap::from([("ci".to_owned(), 1)]),
            ..Limits::default()
        })
    }

    #[test]
    fn a_full_queue_says_how_full() {
        let queue = queue(1, 1);
        let _slot = queue.enter(None, "solo").expect("a slot");
        let place = queue.enter(None, "solo").expect("a place");
        assert!(matches!(place, Place::InLine(_)));
        let full = Full {
            running: 1,
            queued: 1,
        };
        assert_eq!(queue.enter(None, "solo").err(), Some(full));
        // Who was accepted before is not refused.
        let again = queue.enter_again(None, "solo");
        assert!(matches!(again, Place::InLine(_)));
        assert_eq!(queue.load(), (1, 2));
    }

    #[test]
    fn a_keys_backlog_leaves_the_others_their_part_of_the_queue() {
        let queue = Queue::new(Limits {
            max_running: 0,
            max_queued: 4,
            keys: ["ada", "bob"].map(str::to_owned).to_vec(),
            ..Limits::default()
        });
        let mut of_ada = Vec::new();
        while let Ok(place) = queue.enter(Some("ada"), "solo") {
            of_ada.push(place);
        }
        // The half for whoever comes first, and her part of the other.
        assert_eq!(of_ada.len(), 3);
        assert!(queue.stand_aside(Some("ada"), "solo").is_err());
        let bob = queue.stand_aside(Some("bob"), "solo").expect("his part");
        assert!(queue.enter(Some("bob"), "solo").is_err());
        assert_eq!(queue.load(), (0, 4));
        // What a key gives back first is what others may take.
        drop(of_ada.pop());
        let second = queue.enter(Some("bob"), "solo").expect("a place");
        assert!(queue.enter(Some("ada"), "solo").is_err());
        drop((bob, second, of_ada));
        assert!(queue.enter(None, "solo").is_ok());
    }

    #[test]
    fn who_could_start_is_not_refused_for_those_who_cannot() {
        let queue = queue(2, 1);
        let _planner = queue.enter(None, "planner").expect("a slot");
        let _waits = queue.enter(None, "planner").expect("a place");
        assert!(queue.enter(None, "planner").is_err());
        let solo = queue.enter(None, "solo");
        assert!(matches!(solo, Ok(Place::Slot(_))));
    }

    #[test]
    fn one_slot_that_gets_free_may_let_two_start() {
        let queue = queue(9, 9);
        let slot = queue.enter(Some("ci"), "planner").expect("a slot");
        let of_ci = queue.enter(Some("ci"), "solo").expect("a place");
        let planner = queue.enter(Some("ada"), "planner").expect("a place");
        drop(slot);
        assert_eq!(queue.load(), (2, 0));
        drop((of_ci, planner));
    }

    #[test]
    fn who_stands_aside_counts_as_waiting_and_holds_nothing() {
        let queue = queue(1, 2);
        let aside = queue.stand_aside(None, "solo").expect("a place");
        assert_eq!(queue.load(), (0, 1));
        let slot = queue.enter(None, "solo").expect("a slot");
        assert!(matches!(slot, Place::Slot(_)));
        let mut second = Box::pin(queue.enter(None, "solo").expect("a place").slot());
        assert!(queue.stand_aside(None, "solo").is_err());
        assert!(queue.enter(None, "solo").is_err());
        let again = queue.stand_aside_again(None, "solo");
        assert_eq!(queue.load(), (1, 3));
        drop(again);
        // It comes behind those in line.
        let mut first = Box::pin(aside.slot());
        assert!(first.as_mut().now_or_never().is_none());
        assert_eq!(queue.load(), (1, 2));
        drop(slot);
        assert!(first.as_mut().now_or_never().is_none());
        drop(second.as_mut().now_or_never().expect("its slot"));
        assert!(first.as_mut().now_or_never().is_some());
        assert_eq!(queue.load(), (0, 0));
    }

    #[test]
    fn children_count_for_the_runs_at_work_and_a_waiting_root_comes_first() {
        let queue = Queue::new(Limits {
            max_live: 3,
            ..Limits::default()
        });
        let Ok(Place::Slot(mut slot)) = queue.enter(None, "solo") else {
            panic!("no slot");
        };
        assert!(slot.take_child() && slot.take_child() && !slot.take_child());
        let mut second = Box::pin(queue.enter(None, "solo").expect("a place").slot());
        assert!(second.as_mut().now_or_never().is_none());
        slot.release_child();
        // The room went to the root that waits.
        assert!(!slot.take_child());
        let second = second.now_or_never().expect("a slot");
        // Children of before are counted again, and refused to nobody.
        slot.add_children(2);
        drop(second);
        assert!(!slot.take_child());
        drop(slot);
        let Ok(Place::Slot(mut slot)) = queue.enter(None, "solo") else {
            panic!("no slot");
        };
        assert!(slot.take_child() && slot.take_child() && !slot.take_child());
    }

    #[test]
    fn what_is_dropped_is_free_again() {
        let queue = queue(1, 9);
        let slot = queue.enter(None, "solo").expect("a slot");
        let mut first = Box::pin(queue.enter(None, "solo").expect("a place").slot());
        let second = queue.enter(None, "solo").expect("a place");
        let third = queue.enter(None, "solo").expect("a place");
        assert!(first.as_mut().now_or_never().is_none());
        drop(second);
        assert_eq!(queue.load(), (1, 2));
        drop(slot);
        assert_eq!(queue.load(), (1, 1));
        // It had its slot and did not fetch it.
        drop(first);
        assert_eq!(queue.load(), (1, 0));
        let third = third.slot().now_or_never();
        assert!(third.is_some());
        drop(third);
        assert_eq!(queue.load(), (0, 0));
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn many_at_once_never_pass_a_limit_and_lose_no_slot() {
        let queue = Arc::new(queue(3, usize::MAX));
        let at_work = Arc::new([AtomicUsize::new(0), AtomicUsize::new(0)]);
        let mut runs = JoinSet::new();
        for number in 0..2000 {
            let key = ["ada", "bob"][number % 2];
            let agent = ["planner", "solo", "free"][number % 3];
            let (queue, at_work) = (Arc::clone(&queue), Arc::clone(&at_work));
            runs.spawn(async move {
                let place = queue.enter(Some(key), agent).expect("a place");
                if number % 7 == 0 {
                    return drop(place);
                }
                let _slot = place.slot().await;
                let [all, planners] = &*at_work;
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
