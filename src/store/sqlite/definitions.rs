//! Which definitions the writer knows to be in the table, so that a run costs neither a hash nor an insert for one that
//! thousands have run by. Knows no SQL.

use std::collections::HashMap;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use crate::store::sqlite::rows::Hash;

/// Beyond these all are forgotten; each then costs one insert that does nothing.
const MOST: usize = 512;
const MOST_BYTES: usize = 8 << 20;

/// How long a definition counts as used after a run was accepted with it, in milliseconds: so often its row is written
/// while runs go on being accepted with it.
const USED: i64 = 60_000;

/// Definitions that are in the table, by where their texts lie: the engine hands over one text again and again.
#[derive(Debug, Default)]
pub struct Known {
    // Holding a text keeps its place from being used by another.
    texts: HashMap<usize, (Arc<str>, Stored)>,
    bytes: usize,
}

/// How a definition stands in the table.
#[derive(Clone, Copy, Debug)]
struct Stored {
    hash: Hash,
    /// Nothing that was accepted after this time runs by it.
    used_until: i64,
    /// Whether the table knows that more than one run has it.
    is_shared: bool,
}

impl Known {
    /// What a text is known by, where the table needs not be told that a run accepted at this time has it too.
    pub fn hash(&self, text: &Arc<str>, at: i64) -> Option<Hash> {
        let (_, stored) = self.texts.get(&place(text))?;
        (stored.is_shared && at <= stored.used_until).then_some(stored.hash)
    }

    /// Until when a definition counts as used that a run accepted at this time has.
    pub fn used_until(at: i64) -> i64 {
        at.saturating_add(USED)
    }

    /// The table has been told that a run accepted at this time has it.
    pub fn add(&mut self, text: &Arc<str>, hash: Hash, at: i64) {
        if text.len() > MOST_BYTES {
            return;
        }
        // The second one that it is told of shares it with the first.
        let is_shared = self.texts.contains_key(&place(text));
        if self.texts.len() >= MOST || self.bytes + text.len() > MOST_BYTES {
            self.clear();
        }
        let stored = Stored {
            hash,
            used_until: Self::used_until(at),
            is_shared,
        };
        if let Some((old, _)) = self.texts.insert(place(text), (Arc::clone(text), stored)) {
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

fn place(text: &Arc<str>) -> usize {
    Arc::as_ptr(text).cast::<u8>() as usize
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{Known, MOST, MOST_BYTES, hash};

    #[test]
    fn what_is_known_has_a_bound() {
        let mut known = Known::default();
        let text: Arc<str> = "x".into();
        assert_eq!(known.hash(&text, 0), None);
        known.add(&text, hash(&text), 0);
        assert_eq!(
            known.hash(&text, 0),
            None,
            "the table knows of one run only"
        );
        known.add(&text, hash(&text), 0);
        assert_eq!(known.hash(&text, 60_000), Some(hash("x")));
        assert_eq!(
            known.hash(&text, 60_001),
            None,
            "the table thinks it unused"
        );
        assert_eq!((known.texts.len(), known.bytes), (1, 1));
        assert_eq!(known.hash(&Arc::from("x"), 0), None, "another place");
        for n in 0..2 * MOST {
            let text: Arc<str> = n.to_string().into();
            known.add(&text, hash(&text), 0);
            assert!(known.texts.len() <= MOST);
        }
        for len in [MOST_BYTES / 2, MOST_BYTES, MOST_BYTES + 1] {
            let text: Arc<str> = "y".repeat(len).into();
            known.add(&text, [0; 32], 0);
            assert!(known.bytes <= MOST_BYTES);
        }
    }
}
