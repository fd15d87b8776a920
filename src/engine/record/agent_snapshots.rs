//! The agents of runs as the record keeps them: JSON that another process reads. Each agent is rendered once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::domain::agent::Agent;
use crate::engine::record::shared_texts::SharedTexts;

/// If there are more entries, those of dropped agents are removed.
const PRUNE_THRESHOLD: usize = 1024;

/// The weak reference prevents another agent from reusing the address.
type CachedSnapshot = (Weak<Agent>, Arc<str>);

/// The rendered agents by address, and what requests of their runs share.
#[derive(Debug, Default)]
pub struct AgentSnapshots {
    pub shared_texts: SharedTexts,
    cache: Mutex<HashMap<usize, CachedSnapshot>>,
}

impl AgentSnapshots {
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

/// `None` if the text is not an agent.
pub fn parse(json: &str) -> Option<Arc<Agent>> {
    serde_json::from_str(json).ok().map(Arc::new)
}
