//! Which definitions the writer knows to be in the table, so that a run costs neither a hash nor an insert for one that
//! thousands have run by. Knows no SQL.

use std::collections::HashMap;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use crate::store::sqlite::rows::Hash;

/// Beyond these all are forgotten; each then costs one insert that does nothing.
const MOST: usize = 512;
const MOST_BYTES: usize = 8 << 20;

/// Definitions that are in the table, by where their texts lie: the engine hands over one text again and again.
#[derive(Debug, Default)]
pub struct Known {
    // Holding a text keeps its place from being used by another.
    texts: HashMap<usize, (Arc<str>, Hash)>,
    bytes: usize,
}

impl Known {
    /// What a text is known by, where it is in the table.
    pub fn hash(&self, text: &Arc<str>) -> Option<Hash> {
        self.texts.get(&place(text)).map(|(_, hash)| *hash)
    }

    /// It has been put into the table.
    pub fn add(&mut self, text: &Arc<str>, hash: Hash) {
        if text.len() > MOST_BYTES {
            return;
        }
        if self.texts.len() >= MOST || self.bytes + text.len() > MOST_BYTES {
            self.clear();
        }
        if let Some((old, _)) = self.texts.insert(place(text), (Arc::clone(text), hash)) {
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
        assert_eq!(known.hash(&text), None);
        known.add(&text, hash(&text));
        known.add(&text, hash(&text));
        assert_eq!(known.hash(&text), Some(hash("x")));
        assert_eq!((known.texts.len(), known.bytes), (1, 1));
        assert_eq!(known.hash(&Arc::from("x")), None, "another place");
        for n in 0..2 * MOST {
            let text: Arc<str> = n.to_string().into();
            known.add(&text, hash(&text));
            assert!(known.texts.len() <= MOST);
        }
        for len in [MOST_BYTES / 2, MOST_BYTES, MOST_BYTES + 1] {
            let text: Arc<str> = "y".repeat(len).into();
            known.add(&text, [0; 32]);
            assert!(known.bytes <= MOST_BYTES);
        }
    }
}
