//! Trees that another process has left asleep: they need nothing but their place in the index.

use std::collections::HashSet;

use jiff::Timestamp;

use crate::domain::run::{RunId, now};
use crate::engine::context::Engine;
use crate::engine::state::sessions::SessionKey;
use crate::store::StoreError;

/// Adds the trees, of these roots or of all, that another process has left asleep, and returns them.
pub async fn load(
    engine: &Engine,
    roots: Option<Vec<RunId>>,
) -> Result<HashSet<RunId>, StoreError> {
    let store = engine.journal.store();
    let sleeping = store.sleeping_trees(roots).await?;
    let is_shared = store.cluster().is_some();
    let mut found = HashSet::new();
    for tree in sleeping {
        found.insert(tree.root);
        // Without a wait that is recorded, or with something after it, it may have begun to go on.
        let wakes_at = match tree.has_changed {
            true => now(),
            false => tree.until.unwrap_or(Timestamp::MAX),
        };
        let name = tree.session.filter(|_| !is_shared);
        let guard = name.map(|name| {
            let owner = tree.owner;
            engine
                .sessions
                .enter_accepted(SessionKey { owner, name }, tree.root)
        });
        engine.sleeping_trees.add(tree.root, wakes_at, guard);
    }
    Ok(found)
}
