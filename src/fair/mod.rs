//! Fairness between API keys for shared resources, such as run permits, commands, fetches and webhooks: one key's
//! backlog never blocks another's.

use std::collections::BTreeMap;

pub mod admission;
pub mod fair_queue;
pub mod fair_semaphore;
mod key_queue;
#[cfg(test)]
mod reference_queue;
pub mod shares;
pub mod weighted_queue;

/// The limits of a fair queue. The default has no limits.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Permits.
    pub max_running: usize,
    /// Permits and child runs together. Each of `keys` has a share of it.
    pub max_live: usize,
    /// Waiters.
    pub max_queued: usize,
    /// Permits per agent, by name. Other agents have no limit.
    pub per_agent: BTreeMap<String, usize>,
    /// Permits per key, by name.
    pub per_key: BTreeMap<String, usize>,
    /// Permits of each key without a limit in `per_key`.
    pub default_per_key: Option<usize>,
    /// The configured keys. Each has a share of the waiters.
    pub keys: Vec<String>,
    /// Whether each key also has a share of the permits.
    pub shares_permits: bool,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_running: usize::MAX,
            max_live: usize::MAX,
            max_queued: usize::MAX,
            per_agent: BTreeMap::new(),
            per_key: BTreeMap::new(),
            default_per_key: None,
            keys: Vec::new(),
            shares_permits: false,
        }
    }
}

impl Limits {
    /// The limits of a pool of permits in which each key has a share.
    pub fn with_shared_permits(permits: usize, keys: &[String]) -> Self {
        Self {
            max_running: permits,
            keys: keys.to_vec(),
            shares_permits: true,
            ..Self::default()
        }
    }
}
