//! The agents of runs as the record keeps them: JSON that another process reads. Each agent is rendered once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::domain::agent::Agent;
use crate::engine::record::shared_texts::SharedTexts;

/// After so many new entries, or bytes of them, those of dropped agents are removed: a request may have an agent of its own.
const MAX_NEW_ENTRIES: usize = 1024;
const MAX_NEW_BYTES: usize = 8 << 20;

/// The weak reference prevents another agent from reusing the address.
type CachedSnapshot = (Weak<Agent>, Arc<str>);

/// The rendered agents by address, and what requests of their runs share.
#[derive(Debug, Default)]
pub struct AgentSnapshots {
    pub shared_texts: SharedTexts,
    cache: Mutex<Cache>,
}

#[derive(Debug, Default)]
struct Cache {
    entries: HashMap<usize, CachedSnapshot>,
    /// Since entries were removed.
    new_entries: usize,
    new_bytes: usize,
}

impl AgentSnapshots {
    pub fn agent_json(&self, agent: &Arc<Agent>) -> Arc<str> {
        let address = Arc::as_ptr(agent) as usize;
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, json)) = cache.entries.get(&address) {
            return Arc::clone(json);
        }
        let json: Arc<str> = serde_json::to_string(&**agent).unwrap_or_default().into();
        cache.insert(address, (Arc::downgrade(agent), Arc::clone(&json)));
        json
    }
}

impl Cache {
    fn insert(&mut self, address: usize, snapshot: CachedSnapshot) {
        self.new_entries += 1;
        self.new_bytes += snapshot.1.len();
        if self.new_entries > MAX_NEW_ENTRIES || self.new_bytes > MAX_NEW_BYTES {
            self.entries
                .retain(|_, (agent, _)| agent.strong_count() > 0);
            (self.new_entries, self.new_bytes) = (0, 0);
        }
        self.entries.insert(address, snapshot);
    }
}

/// `None` if the text is not an agent.
pub fn parse(json: &str) -> Option<Arc<Agent>> {
    serde_json::from_str(json).ok().map(Arc::new)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{AgentSnapshots, MAX_NEW_BYTES};
    use crate::domain::agent::{Agent, AgentSettings};

    #[test]
    fn large_snapshots_of_dropped_agents_are_removed() {
        let snapshots = AgentSnapshots::default();
        let agent = |megabytes: usize| {
            let settings = AgentSettings {
                system_prompt: "x".repeat(megabytes << 20),
                ..AgentSettings::default()
            };
            Arc::new(Agent {
                settings,
                ..Agent::default()
            })
        };
        let kept = agent(1);
        let first = snapshots.agent_json(&kept);
        for _ in 0..20 {
            snapshots.agent_json(&agent(3));
        }
        let cache = snapshots.cache.lock().expect("the cache");
        let bytes: usize = cache.entries.values().map(|(_, json)| json.len()).sum();
        assert!(bytes < MAX_NEW_BYTES + (8 << 20), "{bytes}");
        drop(cache);
        assert!(Arc::ptr_eq(&first, &snapshots.agent_json(&kept)));
    }
}
