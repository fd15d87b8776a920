//! Definitions as the record keeps them: JSON that another process reads back. Those of files are rendered once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::domain::agent::Agent;

/// Above this many rendered definitions those whose agents are gone are dropped.
const PRUNE_THRESHOLD: usize = 1024;

/// The weak end keeps the agent's place from being used by another one.
type CachedSnapshot = (Weak<Agent>, Arc<str>);

/// Rendered definitions, by the place of the agent that they are of.
#[derive(Debug, Default)]
pub struct AgentSnapshots {
    cache: Mutex<HashMap<usize, CachedSnapshot>>,
}

impl AgentSnapshots {
    /// The definition's text. An agent is rendered once, as long as it lives.
    pub fn agent_json(&self, agent: &Arc<Agent>) -> Arc<str> {
        let address = Arc::as_ptr(agent) as usize;
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, json)) = cache.get(&address) {
            return Arc::clone(json);
        }
        if cache.len() >= PRUNE_THRESHOLD {
            cache.retain(|_, (agent, _)| agent.strong_count() > 0);
        }
        let json: Arc<str> = serde_json::to_string(&**agent).unwrap_or_default().into();
        cache.insert(address, (Arc::downgrade(agent), Arc::clone(&json)));
        json
    }
}

/// The definition in such a text; none where it is not one.
pub fn parse(json: &str) -> Option<Arc<Agent>> {
    serde_json::from_str(json).ok().map(Arc::new)
}
