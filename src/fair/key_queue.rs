//! The waiting runs of one key, and how much of each limit the key uses.

use std::collections::BTreeMap;

use crate::fair::shares::Shares;

/// Who may hold so many slots at once.
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
    /// Its part of the room for those that wait.
    pub queue_share: usize,
    /// Its part of the slots.
    pub permit_share: usize,
    /// Its part of what may be at work, children included.
    pub live_share: usize,
    /// Child runs at work: nobody waits for them, but they count for `max_live`.
    pub live_children: usize,
    /// When it was last given a slot, by [`Line::served`].
    pub last_served: u64,
    pub waiting: usize,
    pub deferred: usize,
    /// Its runs that wait, by agent: one whose agent is at its limit holds up nobody behind it. Agents without a limit
    /// share the first lane, so there are no more lanes than the configuration has limits.
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

    /// Its runs at work, children included.
    pub fn live_runs(&self) -> usize {
        self.concurrency.running + self.live_children
    }

    /// Those that wait, also for something else.
    pub fn queued(&self) -> usize {
        self.waiting + self.deferred
    }

    /// The agent of its earliest run that could start now.
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
