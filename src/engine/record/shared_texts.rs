//! What the first requests of an agent's runs have in common, so that the store keeps it once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::store::request_delta;
use crate::store::turn_record::SharedText;

/// Beyond this number all are found again.
const MAX_ENTRIES: usize = 512;

/// By the names of agents. It is the same text for each run, so that it is hashed and stored once.
#[derive(Debug, Default)]
pub struct SharedTexts(Mutex<HashMap<String, Arc<SharedText>>>);

impl SharedTexts {
    /// The text in a request that is stored whole.
    pub fn find(&self, agent: &str, body: &[u8]) -> Option<Arc<SharedText>> {
        let known = self.lock(|texts| texts.get(agent).cloned());
        if let Some(known) = known.filter(|known| request_delta::contains(body, known)) {
            return Some(known);
        }
        let found = Arc::new(request_delta::tools_text(body)?);
        self.lock(|texts| {
            if texts.len() >= MAX_ENTRIES {
                texts.clear();
            }
            texts.insert(agent.to_owned(), Arc::clone(&found));
        });
        Some(found)
    }

    fn lock<T>(&self, work: impl FnOnce(&mut HashMap<String, Arc<SharedText>>) -> T) -> T {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
