//! Which definitions the writer knows to be in the table, so that a run costs neither a hash nor an insert for one that
//! thousands have run by. Knows no SQL.

use std::collections::HashMap;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use crate::store::sqlite::rows::Hash;

/// Beyond these all are forgotten; each then costs one insert that does nothing.
const MAX_ENTRIES: usize = 512;
const MAX_BYTES: usize = 8 << 20;

/// How long a definition counts as used after a run was accepted with it, in milliseconds: so often its row is written
/// while runs go on being accepted with it.
const USED_FOR_MS: i64 = 60_000;

/// Definitions that are in the table, by where their texts lie: the engine hands over one text again and again.
#[derive(Debug, Default)]
pub struct DefinitionCache {
    // Holding a text keeps its place from being used by another.
    entries: HashMap<usize, (Arc<str>, CachedDefinition)>,
    bytes: usize,
}

/// How a definition stands in the table.
#[derive(Clone, Copy, Debug)]
struct CachedDefinition {
    hash: Hash,
    /// Nothing that was accepted after this time runs by it.
    used_until: i64,
    /// Whether the table knows that more than one run has it.
    is_shared: bool,
}

impl DefinitionCache {
    /// What a text is known by, where the table needs not be told that a run accepted at this time has it too.
    pub fn get(&self, text: &Arc<str>, accepted_ms: i64) -> Option<Hash> {
        let (_, cached) = self.entries.get(&address(text))?;
        (cached.is_shared && accepted_ms <= cached.used_until).then_some(cached.hash)
    }

    /// Until when a definition counts as used that a run accepted at this time has.
    pub fn used_until(accepted_ms: i64) -> i64 {
        accepted_ms.saturating_add(USED_FOR_MS)
    }

    /// The table has been told that a run accepted at this time has it.
    pub fn insert(&mut self, text: &Arc<str>, hash: Hash, accepted_ms: i64) {
        if text.len() > MAX_BYTES {
            return;
        }
        // The second one that it is told of shares it with the first.
        let is_shared = self.entries.contains_key(&address(text));
        if self.entries.len() >= MAX_ENTRIES || self.bytes + text.len() > MAX_BYTES {
            self.clear();
        }
        let cached = CachedDefinition {
            hash,
            used_until: Self::used_until(accepted_ms),
            is_shared,
        };
        if let Some((old, _)) = self
            .entries
            .insert(address(text), (Arc::clone(text), cached))
        {
            self.bytes -= old.len();
        }
        self.bytes += text.len();
    }

    /// What has been put into the table may not be there.
    pub fn clear(&mut self) {
        *self = Self::default();
    }
}

/// What a text is known by in the table.
pub fn hash(text: &str) -> Hash {
    Sha256::digest(text.as_bytes()).into()
}

fn address(text: &Arc<str>) -> usize {
    Arc::as_ptr(text).cast::<u8>() as usize
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{DefinitionCache, MAX_BYTES, MAX_ENTRIES, hash};

    #[test]
    fn the_cache_is_bounded() {
        let mut cache = DefinitionCache::default();
        let text: Arc<str> = "x".into();
        assert_eq!(cache.get(&text, 0), None);
        cache.insert(&text, hash(&text), 0);
        assert_eq!(cache.get(&text, 0), None, "the table knows of one run only");
        cache.insert(&text, hash(&text), 0);
        assert_eq!(cache.get(&text, 60_000), Some(hash("x")));
        assert_eq!(cache.get(&text, 60_001), None, "the table thinks it unused");
        assert_eq!((cache.entries.len(), cache.bytes), (1, 1));
        assert_eq!(cache.get(&Arc::from("x"), 0), None, "another place");
        for n in 0..2 * MAX_ENTRIES {
            let text: Arc<str> = n.to_string().into();
            cache.insert(&text, hash(&text), 0);
            assert!(cache.entries.len() <= MAX_ENTRIES);
        }
        for len in [MAX_BYTES / 2, MAX_BYTES, MAX_BYTES + 1] {
            let text: Arc<str> = "y".repeat(len).into();
            cache.insert(&text, [0; 32], 0);
            assert!(cache.bytes <= MAX_BYTES);
        }
    }
}
