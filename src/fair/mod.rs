//! Turns between keys: whoever shares something with others (slots of root runs, of commands, of fetches, of webhooks)
//! gets it by key, so that one key's backlog never holds up another's. Knows nothing of what is shared.

use std::collections::BTreeMap;

pub mod admission;
pub mod fair_queue;
pub mod fair_semaphore;
mod key_queue;
#[cfg(test)]
mod reference_queue;
pub mod shares;

/// What a line is bounded by. Without anything set there is no bound.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Slots.
    pub max_running: usize,
    /// Slots and children together. Each of `keys` has a part of it.
    pub max_live: usize,
    /// Who waits for a slot.
    pub max_queued: usize,
    /// Slots of one agent, by its name; others have no limit of their own.
    pub per_agent: BTreeMap<String, usize>,
    /// Slots of one key, by its name.
    pub per_key: BTreeMap<String, usize>,
    /// Slots of each key that is not named there.
    pub default_per_key: Option<usize>,
    /// The configured keys, each of which has a part of the room for those that wait.
    pub keys: Vec<String>,
    /// Whether each of them has a part of the slots, too.
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
    /// So many slots, of which each of these keys has a part of its own.
    pub fn with_shared_permits(permits: usize, keys: &[String]) -> Self {
        Self {
            max_running: permits,
            keys: keys.to_vec(),
            shares_permits: true,
            ..Self::default()
        }
    }
}
