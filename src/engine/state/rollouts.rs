//! What this process knows of the rollouts of its agents: what the record says, read again and again.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::domain::rollout::Rollout;
use crate::store::rollouts::{RolloutRecord, SetPercent};

/// What is older is read again before a run starts. Changes are in force at all nodes within this time.
pub const MAX_AGE: Duration = Duration::from_secs(4);

/// The records of one agent, the newest first.
pub type AgentRollouts = Arc<[RolloutRecord]>;

#[derive(Debug, Default)]
pub struct Rollouts {
    known: Mutex<Known>,
    /// Held while they are read.
    pub reading: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct Known {
    read_at: Option<Instant>,
    by_agent: BTreeMap<String, AgentRollouts>,
}

impl Rollouts {
    /// Those of an agent; `None` if they are not known, or not well enough.
    pub fn fresh(&self, agent: &str) -> Option<AgentRollouts> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let is_fresh = known.read_at.is_some_and(|at| at.elapsed() < MAX_AGE);
        known.by_agent.get(agent).filter(|_| is_fresh).cloned()
    }

    /// `read_at` is when the reading began.
    pub fn replace(&self, read_at: Instant, by_agent: BTreeMap<String, AgentRollouts>) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        *known = Known {
            read_at: Some(read_at),
            by_agent,
        };
    }
}

/// The record of a candidate.
pub fn of_candidate<'r>(records: &'r [RolloutRecord], version: &str) -> Option<&'r RolloutRecord> {
    records.iter().find(|record| record.candidate == version)
}

/// The share that is in force, from 0 to 100.
pub fn percent(rollout: &Rollout, record: Option<&RolloutRecord>) -> f64 {
    let Some(record) = record else {
        return rollout.percent;
    };
    if record.stopped.is_some() || record.promotion.is_some() {
        return 0.0;
    }
    let of_file = thousandths(rollout.percent);
    match record.percent {
        Some(set) if set.of_file == of_file => f64::from(set.percent) / 1000.0,
        _ => rollout.percent,
    }
}

/// A share that replaces that of the file.
pub fn set_percent(rollout: &Rollout, percent: f64) -> SetPercent {
    SetPercent {
        percent: thousandths(percent),
        of_file: thousandths(rollout.percent),
    }
}

fn thousandths(percent: f64) -> u32 {
    (percent.clamp(0.0, 100.0) * 1000.0).round() as u32
}
