//! A slow and simple model of the fair queue, which the tests compare it with.

use std::collections::BTreeMap;

use proptest::prelude::*;

use crate::fair::Limits;
use crate::fair::fair_queue::Ticket;

pub const KEYS: [Option<&str>; 4] = [None, Some("ada"), Some("bob"), Some("ci")];
pub const AGENTS: [&str; 4] = ["free", "loose", "planner", "reader"];

pub fn limits(max_running: usize) -> Limits {
    Limits {
        max_running,
        max_queued: 1000,
        ..Limits::default()
    }
}

/// Three may run: one planner, two readers; two of a key, one of ci.
pub fn tight() -> Limits {
    let counts = |counts: &[(&str, usize)]| {
        let named = counts.iter().map(|(name, count)| ((*name).into(), *count));
        named.collect::<BTreeMap<String, usize>>()
    };
    Limits {
        per_agent: counts(&[("planner", 1), ("reader", 2)]),
        per_key: counts(&[("ci", 1)]),
        default_per_key: Some(2),
        ..limits(3)
    }
}

/// An operation on the queue. Numbers select among what exists.
#[derive(Clone, Debug)]
pub enum Operation {
    Enter { key: usize, agent: usize },
    Cancel(usize),
    Release(usize),
}

pub fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        3 => (0..KEYS.len(), 0..AGENTS.len()).prop_map(|(key, agent)| Operation::Enter { key, agent }),
        1 => any::<usize>().prop_map(Operation::Cancel),
        2 => any::<usize>().prop_map(Operation::Release),
    ]
}

#[derive(Clone, Copy, Debug)]
pub struct Waiter {
    pub number: usize,
    pub ticket: Ticket,
    pub key: usize,
    pub agent: usize,
}

/// The same rules in the simplest form: the running runs, the waiting ones in the order of arrival, and when each key
/// was last served.
#[derive(Default)]
pub struct ReferenceQueue {
    pub running: Vec<(usize, usize)>,
    pub waiting: Vec<Waiter>,
    last_served: [usize; KEYS.len()],
    granted: usize,
}

impl ReferenceQueue {
    pub fn could_start(&self, key: usize, agent: usize) -> bool {
        let limits = tight();
        let key_running = self.running.iter().filter(|run| run.0 == key).count();
        let agent_running = self.running.iter().filter(|run| run.1 == agent).count();
        let key_limit =
            KEYS[key].and_then(|name| limits.per_key.get(name).copied().or(limits.default_per_key));
        self.running.len() < limits.max_running
            && key_limit.is_none_or(|limit| key_running < limit)
            && (limits.per_agent.get(AGENTS[agent])).is_none_or(|limit| agent_running < *limit)
    }

    pub fn start(&mut self, key: usize, agent: usize) {
        self.running.push((key, agent));
        self.granted += 1;
        self.last_served[key] = self.granted;
    }

    /// The next run: of the runs that could start, the earliest one of the key that was served longest ago.
    pub fn next(&mut self) -> Option<Waiter> {
        let is_startable =
            |index: &usize| self.could_start(self.waiting[*index].key, self.waiting[*index].agent);
        let service_order = |index: &usize| {
            let key = self.waiting[*index].key;
            (self.last_served[key], key)
        };
        let index = (0..self.waiting.len())
            .filter(is_startable)
            .min_by_key(service_order)?;
        let next = self.waiting.remove(index);
        self.start(next.key, next.agent);
        Some(next)
    }
}
