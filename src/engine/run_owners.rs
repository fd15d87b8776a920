//! Whose runs are those that an agent's file starts: its schedules and triggers name a key of the server's configuration.

use std::sync::Arc;

use crate::config::ClientKey;

/// The keys of the server.
#[derive(Clone, Debug)]
pub struct RunOwners {
    keys: Vec<Arc<ClientKey>>,
}

/// Why no run may start.
#[derive(Clone, Debug, thiserror::Error)]
pub enum OwnerError {
    #[error("the server's configuration has no key \"{0}\"")]
    UnknownKey(String),
    #[error("the key \"{0}\" may not use this agent")]
    NotPermitted(String),
}

impl RunOwners {
    pub fn new(keys: Vec<Arc<ClientKey>>) -> Self {
        Self { keys }
    }

    /// The owner of a run of this agent; `None` if the server has no keys, or if none is named.
    pub fn owner(&self, agent: &str, key: Option<&str>) -> Result<Option<String>, OwnerError> {
        let Some(name) = key.filter(|_| !self.keys.is_empty()) else {
            return Ok(None);
        };
        match self.keys.iter().find(|key| key.name == name) {
            Some(key) if key.can_use_agent(agent) => Ok(Some(name.to_owned())),
            Some(_) => Err(OwnerError::NotPermitted(name.to_owned())),
            None => Err(OwnerError::UnknownKey(name.to_owned())),
        }
    }
}
