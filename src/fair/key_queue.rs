//! The waiting runs of one key, and how much of each limit the key uses.

use std::collections::BTreeMap;

use crate::fair::shares::Shares;

/// A limit on permits and how many are in use.
#[derive(Debug)]
pub struct ConcurrencyLimit {
    pub limit: usize,
    pub running: usize,
}

impl ConcurrencyLimit {
    pub fn new(limit: Option<usize>) -> Self {
        Self {
            limit: limit.unwrap_or(usize::MAX),
            running: 0,
        }
    }

    pub fn has_capacity(&self) -> bool {
        self.running < self.limit
    }
}

#[derive(Debug)]
pub struct KeyQueue<W> {
    pub concurrency: ConcurrencyLimit,
    /// Its share of the queue.
    pub queue_share: usize,
    /// Its share of the permits.
    pub permit_share: usize,
    /// Its share of the running runs, including children.
    pub live_share: usize,
    /// Running child runs. They need no permit, but count towards `max_live`.
    pub live_children: usize,
    /// The number of the last permit that the key was granted; 0 if none.
    pub last_served: u64,
    pub waiting: usize,
    pub deferred: usize,
    /// The waiting runs by agent, so that an agent at its limit blocks no run behind it. Agents without a limit share
    /// the first lane, so the number of lanes is bounded by the configured limits.
    pub lanes: Vec<BTreeMap<u64, W>>,
}

impl<W> KeyQueue<W> {
    pub fn new(
        limit: Option<usize>,
        queue_share: usize,
        permit_share: usize,
        live_share: usize,
    ) -> Self {
        Self {
            concurrency: ConcurrencyLimit::new(limit),
            queue_share,
            permit_share,
            live_share,
            live_children: 0,
            last_served: 0,
            waiting: 0,
            deferred: 0,
            lanes: Vec::new(),
        }
    }

    pub fn has_capacity(&self, permit_shares: Option<&Shares>, live_shares: &Shares) -> bool {
        let running = self.concurrency.running;
        self.concurrency.has_capacity()
            && live_shares.has_capacity(self.live_share, self.live_runs())
            && permit_shares.is_none_or(|slots| slots.has_capacity(self.permit_share, running))
    }

    /// Running runs, including children.
    pub fn live_runs(&self) -> usize {
        self.concurrency.running + self.live_children
    }

    /// Waiting runs, including deferred ones.
    pub fn queued(&self) -> usize {
        self.waiting + self.deferred
    }

    /// The agent of the earliest run that could start now.
    pub fn first_startable_agent(
        &self,
        agents: &[ConcurrencyLimit],
        permit_shares: Option<&Shares>,
        live_shares: &Shares,
    ) -> Option<u32> {
        if !self.has_capacity(permit_shares, live_shares) {
            return None;
        }
        let lanes = (0..).zip(&self.lanes).zip(agents);
        lanes
            .filter(|(_, agent)| agent.has_capacity())
            .filter_map(|((index, lane), _)| Some((*lane.first_key_value()?.0, index)))
            .min()
            .map(|(_, index)| index)
    }
}
