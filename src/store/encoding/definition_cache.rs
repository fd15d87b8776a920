//! Remembers which definitions are in the table, so that runs which share a definition cost neither a hash nor an insert.

use std::collections::HashMap;
use std::sync::Arc;

use sha2::{Digest, Sha256};

/// The SHA-256 of a definition's text, which is its key in the table.
pub type Hash = [u8; 32];

/// Beyond these limits the cache is cleared; each definition then costs one insert without effect.
const MAX_ENTRIES: usize = 512;
const MAX_BYTES: usize = 8 << 20;

/// How long a definition counts as used after a run was accepted with it, in milliseconds. Its row is written once in each
/// such interval.
const USED_FOR_MS: i64 = 60_000;

/// Definitions in the table, by the address of their text: the engine passes the same text for each run.
#[derive(Debug, Default)]
pub struct DefinitionCache {
    // Holding the text prevents another one from getting its address.
    entries: HashMap<usize, (Arc<str>, CachedDefinition)>,
    bytes: usize,
}

#[derive(Clone, Copy, Debug)]
struct CachedDefinition {
    hash: Hash,
    /// The row says that no run was accepted with it after this time.
    used_until: i64,
    /// Whether the row says that more than one run uses it.
    is_shared: bool,
}

impl DefinitionCache {
    /// The hash of a text, if the row need not change for a run that was accepted at this time.
    pub fn get(&self, text: &Arc<str>, accepted_ms: i64) -> Option<Hash> {
        let (_, cached) = self.entries.get(&address(text))?;
        (cached.is_shared && accepted_ms <= cached.used_until).then_some(cached.hash)
    }

    /// Until when a definition counts as used, after a run was accepted with it at this time.
    pub fn used_until(accepted_ms: i64) -> i64 {
        accepted_ms.saturating_add(USED_FOR_MS)
    }

    /// Records that the row was written for a run that was accepted at this time.
    pub fn insert(&mut self, text: &Arc<str>, hash: Hash, accepted_ms: i64) {
        if text.len() > MAX_BYTES {
            return;
        }
        // The second insert marks the row as shared.
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

    /// To be called if a row may have been removed.
    pub fn clear(&mut self) {
        *self = Self::default();
    }
}

/// The key of a text in the table.
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
        assert_eq!(cache.get(&text, 0), None, "the row names one run only");
        cache.insert(&text, hash(&text), 0);
        assert_eq!(cache.get(&text, 60_000), Some(hash("x")));
        assert_eq!(cache.get(&text, 60_001), None, "the row says it is unused");
        assert_eq!((cache.entries.len(), cache.bytes), (1, 1));
        assert_eq!(cache.get(&Arc::from("x"), 0), None, "another address");
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
