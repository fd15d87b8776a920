//! A queue for something that requests use in different amounts: by priority, then fair between keys by what each was given. Only the
//! order; it has no tasks and no locks.

use std::collections::{BTreeMap, HashMap};

/// The urgent requests leave the others at least one part in so many.
const PARTS: f64 = 10.0;
/// So many keys are kept without requests that wait.
const MAX_IDLE_KEYS: usize = 64;

/// `W` is what the owner stores for each waiting request.
#[derive(Debug)]
pub struct WeightedQueue<W> {
    urgent: Class<W>,
    other: Class<W>,
    /// How much the other requests may be given before urgent ones.
    credit: f64,
    last_number: u64,
}

/// A position in the queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ticket {
    is_urgent: bool,
    key: Box<str>,
    number: u64,
}

/// Requests of one priority, in the order of start-time fair queueing.
#[derive(Debug)]
struct Class<W> {
    keys: HashMap<Box<str>, KeyLine<W>>,
    /// The start of the request that left last, in the weights that each key was given.
    clock: f64,
    waiting: usize,
}

#[derive(Debug)]
struct KeyLine<W> {
    /// When its next request starts.
    start: f64,
    waiting: BTreeMap<u64, (f64, W)>,
}

impl<W> Default for Class<W> {
    fn default() -> Self {
        Self {
            keys: HashMap::new(),
            clock: 0.0,
            waiting: 0,
        }
    }
}

impl<W> Default for WeightedQueue<W> {
    fn default() -> Self {
        Self {
            urgent: Class::default(),
            other: Class::default(),
            credit: 0.0,
            last_number: 0,
        }
    }
}

impl<W> WeightedQueue<W> {
    pub fn len(&self) -> usize {
        self.urgent.waiting + self.other.waiting
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds a request of this key. All weights have one unit, such as the share of a minute's limit.
    pub fn push(&mut self, is_urgent: bool, key: &str, weight: f64, waiter: W) -> Ticket {
        self.last_number += 1;
        let number = self.last_number;
        let class = self.class_mut(is_urgent);
        class.waiting += 1;
        let clock = class.clock;
        let line = class.keys.entry(key.into()).or_insert_with(|| KeyLine {
            start: clock,
            waiting: BTreeMap::new(),
        });
        if line.waiting.is_empty() {
            line.start = line.start.max(clock);
        }
        line.waiting.insert(number, (weight, waiter));
        Ticket {
            is_urgent,
            key: key.into(),
            number,
        }
    }

    /// The request that is next.
    pub fn first(&self) -> Option<(Ticket, &W)> {
        let is_urgent = match (self.urgent.first(), self.other.first()) {
            (Some(_), Some((_, _, weight, _))) => self.credit < weight,
            (urgent, _) => urgent.is_some(),
        };
        let class = self.class(is_urgent);
        class.first().map(|(key, number, _, waiter)| {
            let key = key.into();
            let ticket = Ticket {
                is_urgent,
                key,
                number,
            };
            (ticket, waiter)
        })
    }

    /// Takes the request that is next, which was given its weight.
    pub fn pop(&mut self) -> Option<W> {
        let (ticket, _) = self.first()?;
        let is_other_waiting = self.other.waiting > 0;
        let class = self.class_mut(ticket.is_urgent);
        let line = class.keys.get_mut(&ticket.key)?;
        let (weight, waiter) = line.waiting.remove(&ticket.number)?;
        class.waiting -= 1;
        class.clock = line.start;
        line.start += weight;
        class.forget_idle();
        self.credit = match (ticket.is_urgent, is_other_waiting) {
            (true, true) => self.credit + weight / (PARTS - 1.0),
            (true, false) => 0.0,
            (false, _) => (self.credit - weight).max(0.0),
        };
        Some(waiter)
    }

    /// Leaves the queue; `None` if the request has left it before.
    pub fn remove(&mut self, ticket: &Ticket) -> Option<W> {
        let class = self.class_mut(ticket.is_urgent);
        let (_, waiter) = class
            .keys
            .get_mut(&ticket.key)?
            .waiting
            .remove(&ticket.number)?;
        class.waiting -= 1;
        class.forget_idle();
        Some(waiter)
    }

    pub fn iter(&self) -> impl Iterator<Item = &W> {
        let lines = self.urgent.keys.values().chain(self.other.keys.values());
        lines.flat_map(|line| line.waiting.values().map(|(_, waiter)| waiter))
    }

    fn class(&self, is_urgent: bool) -> &Class<W> {
        match is_urgent {
            true => &self.urgent,
            false => &self.other,
        }
    }

    fn class_mut(&mut self, is_urgent: bool) -> &mut Class<W> {
        match is_urgent {
            true => &mut self.urgent,
            false => &mut self.other,
        }
    }
}

impl<W> Class<W> {
    fn first(&self) -> Option<(&str, u64, f64, &W)> {
        let firsts = self.keys.iter().filter_map(|(key, line)| {
            let (number, (weight, waiter)) = line.waiting.first_key_value()?;
            Some((line.start, &**key, *number, *weight, waiter))
        });
        let first = firsts.min_by(|a, b| a.0.total_cmp(&b.0).then(a.2.cmp(&b.2)));
        first.map(|(_, key, number, weight, waiter)| (key, number, weight, waiter))
    }

    /// Forgets keys that were given no more than those that wait; all of them if nothing waits.
    fn forget_idle(&mut self) {
        if self.waiting == 0 {
            self.keys.clear();
            self.clock = 0.0;
        } else if self.keys.len() > MAX_IDLE_KEYS {
            let clock = self.clock;
            let is_kept = |line: &KeyLine<W>| !line.waiting.is_empty() || line.start > clock;
            self.keys.retain(|_, line| is_kept(line));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    fn pops(queue: &mut WeightedQueue<&'static str>, count: usize) -> HashMap<&'static str, usize> {
        let mut counts = HashMap::new();
        for popped in std::iter::from_fn(|| queue.pop()).take(count) {
            *counts.entry(popped).or_default() += 1;
        }
        counts
    }

    #[test]
    fn keys_get_equal_weights_however_many_wait() {
        let mut queue = WeightedQueue::default();
        for _ in 0..300 {
            queue.push(true, "ada", 1.0, "ada");
        }
        for _ in 0..30 {
            queue.push(true, "bob", 3.0, "bob");
        }
        let counts = pops(&mut queue, 40);
        assert_eq!((counts["ada"], counts["bob"]), (30, 10));
    }

    #[test]
    fn a_key_that_comes_one_at_a_time_gets_no_more_than_its_share() {
        let mut queue = WeightedQueue::default();
        for _ in 0..100 {
            queue.push(true, "bob", 1.0, "bob");
        }
        let mut served = [0, 0];
        queue.push(true, "ada", 1.0, "ada");
        for _ in 0..60 {
            match queue.pop() {
                Some("ada") => {
                    served[0] += 1;
                    queue.push(true, "ada", 1.0, "ada");
                }
                _ => served[1] += 1,
            }
        }
        assert_eq!(served, [30, 30]);
    }

    #[test]
    fn a_key_that_was_away_has_saved_nothing() {
        let mut queue = WeightedQueue::default();
        queue.push(true, "ada", 1.0, "ada");
        for _ in 0..100 {
            queue.push(true, "bob", 1.0, "bob");
        }
        pops(&mut queue, 51);
        for _ in 0..100 {
            queue.push(true, "ada", 1.0, "ada");
        }
        let counts = pops(&mut queue, 20);
        assert_eq!(counts["ada"], counts["bob"]);
    }

    #[test]
    fn what_is_not_urgent_gets_a_tenth() {
        let mut queue = WeightedQueue::default();
        for _ in 0..200 {
            queue.push(true, "ada", 1.0, "urgent");
            queue.push(false, "ada", 2.0, "other");
        }
        let counts = pops(&mut queue, 200);
        assert!((10..=11).contains(&counts["other"]), "{counts:?}");
    }

    #[test]
    fn idle_keys_are_forgotten() {
        let mut queue = WeightedQueue::default();
        for key in 0..10_000 {
            queue.push(true, &key.to_string(), 1.0, "x");
            queue.push(true, &key.to_string(), 1.0, "x");
            queue.pop();
            assert!(queue.urgent.keys.len() <= MAX_IDLE_KEYS + 2);
            queue.pop();
        }
        assert!(queue.urgent.keys.is_empty());
    }

    proptest! {
        #[test]
        fn each_request_leaves_once(steps in prop::collection::vec((0..4u8, 0..3usize, any::<bool>(), 1..9u8), 1..200)) {
            const KEYS: [&str; 3] = ["a", "b", "c"];
            let mut queue = WeightedQueue::default();
            let mut open: Vec<(Ticket, usize)> = Vec::new();
            for (number, (step, key, is_urgent, weight)) in steps.into_iter().enumerate() {
                match step {
                    0 | 1 => {
                        let ticket = queue.push(is_urgent, KEYS[key], f64::from(weight), number);
                        open.push((ticket, number));
                    }
                    2 => {
                        let first = queue.first().map(|(ticket, _)| ticket);
                        let popped = queue.pop();
                        prop_assert_eq!(popped.is_some(), !open.is_empty());
                        if let (Some(first), Some(popped)) = (first, popped) {
                            prop_assert!(open.contains(&(first.clone(), popped)));
                            open.retain(|(ticket, _)| *ticket != first);
                        }
                    }
                    _ => {
                        if let Some((ticket, number)) = open.pop() {
                            prop_assert_eq!(queue.remove(&ticket), Some(number));
                            prop_assert_eq!(queue.remove(&ticket), None);
                        }
                    }
                }
                prop_assert_eq!(queue.len(), open.len());
                prop_assert_eq!(queue.iter().count(), open.len());
            }
        }
    }
}
