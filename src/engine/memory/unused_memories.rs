//! Finds memories that no run reads since keys were configured.

use crate::catalog::reload::Catalog;
use crate::config::Config;
use crate::domain::memory_entry::MEMORY_DIR;
use crate::engine::memory::memories::{self, Memories};

/// Names each of them in the log, and what makes it useful again.
pub async fn warn(config: &Config, catalog: &Catalog, memories: &Memories) {
    if config.auth.keys.is_empty() {
        return;
    }
    let agents = catalog.current();
    for agent in agents.entries.values().filter_map(|it| it.agent.as_ref()) {
        if !agent.memory.enabled || agent.memory.shared || memories.is_empty(agent).await {
            continue;
        }
        let (of_all, of_key) = match &config.data.url {
            Some(_) => (
                "in the database".to_owned(),
                "set the column owner of its rows in the table memory to the key's name".to_owned(),
            ),
            None => {
                let dir = config.data.dir.join(MEMORY_DIR);
                let of_all = memories::memory_id(agent, None).file(&dir);
                let of_key = dir.join(&agent.name).join("<key>.md");
                (
                    of_all.display().to_string(),
                    format!("move it to {}", of_key.display()),
                )
            }
        };
        tracing::warn!(
            agent = %agent.name,
            "The memory {of_all} of agent {} is not used: with keys configured, each key has its own memory. \
             To use it for all keys, set [memory] shared = true in the agent's file; for one key, {of_key}",
            agent.name
        );
    }
}
