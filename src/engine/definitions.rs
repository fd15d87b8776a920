//! Definitions as the record keeps them: JSON that another process reads back. Those of files are rendered once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::domain::agent::Agent;

/// Above this many rendered definitions those whose agents are gone are dropped.
const MANY: usize = 1024;

/// The weak end keeps the agent's place from being used by another one.
type Rendered = (Weak<Agent>, Arc<str>);

/// Rendered definitions, by the place of the agent that they are of.
#[derive(Debug, Default)]
pub struct Definitions {
    rendered: Mutex<HashMap<usize, Rendered>>,
}

impl Definitions {
    /// The definition's text. An agent is rendered once, as long as it lives.
    pub fn text(&self, agent: &Arc<Agent>) -> Arc<str> {
        let place = Arc::as_ptr(agent) as usize;
        let mut rendered = self.rendered.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, text)) = rendered.get(&place) {
            return Arc::clone(text);
        }
        if rendered.len() >= MANY {
            rendered.retain(|_, (of, _)| of.strong_count() > 0);
        }
        let text: Arc<str> = serde_json::to_string(&**agent).unwrap_or_default().into();
        rendered.insert(place, (Arc::downgrade(agent), Arc::clone(&text)));
        text
    }
}

/// The definition in such a text; none where it is not one.
pub fn read(text: &str) -> Option<Arc<Agent>> {
    serde_json::from_str(text).ok().map(Arc::new)
}
