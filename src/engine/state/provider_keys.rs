//! The client's own provider keys, which come with one request and serve its whole tree. They are only in memory; the
//! record has only the names of their providers.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use secrecy::SecretString;

use crate::domain::agent::Agent;
use crate::providers::{ErrorCategory, ProviderError};

/// The keys by provider.
pub type Keys = BTreeMap<String, SecretString>;

#[derive(Debug, Default)]
pub struct ProviderKeys {
    /// The providers that the request had keys for.
    providers: Vec<String>,
    /// Empty after a restart.
    keys: OnceLock<Arc<Keys>>,
}

impl ProviderKeys {
    pub fn from_request(keys: Keys) -> Self {
        Self {
            providers: keys.keys().cloned().collect(),
            keys: OnceLock::from(Arc::new(keys)),
        }
    }

    /// The keys of a recovered tree, to be restored with [`ProviderKeys::restore_from`] if this process had them.
    pub fn from_record(providers: &[String]) -> Self {
        Self {
            providers: providers.to_vec(),
            keys: OnceLock::new(),
        }
    }

    /// Takes the keys of the same tree from before it was suspended.
    pub fn restore_from(&self, previous: &Self) {
        if let Some(keys) = previous.keys.get() {
            let _ = self.keys.set(Arc::clone(keys));
        }
    }

    /// Whether the tree has keys, which are nowhere else.
    pub fn is_needed(&self) -> bool {
        self.keys.get().is_some_and(|keys| !keys.is_empty())
    }

    /// Whether this agent's requests to the provider use a client's key.
    pub fn has_own_key(&self, agent: &Agent, provider: &str) -> bool {
        agent.allow_provider_keys && self.providers.iter().any(|given| given == provider)
    }

    /// The client's key for this agent's requests to the provider; `None` if they use the operator's.
    ///
    /// # Errors
    ///
    /// The key was lost in a restart: the operator's is not used instead.
    pub fn get(
        &self,
        agent: &Agent,
        provider: &str,
    ) -> Result<Option<&SecretString>, ProviderError> {
        if !self.has_own_key(agent, provider) {
            return Ok(None);
        }
        match self.keys.get().and_then(|keys| keys.get(provider)) {
            Some(key) => Ok(Some(key)),
            None => Err(ProviderError::new(
                ErrorCategory::Auth,
                format!(
                    "the request came with its own key for provider \"{provider}\" (X-Provider-Key), which is kept in \
                     memory only and was lost when the daemon restarted; send the request again"
                ),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Keys, ProviderKeys};

    #[test]
    fn a_debug_print_shows_no_key() {
        let keys = Keys::from([("openai".to_owned(), "sk-of-a-client".into())]);
        let debug = format!("{:?}", ProviderKeys::from_request(keys));
        assert!(
            debug.contains("openai") && !debug.contains("sk-of"),
            "{debug}"
        );
    }
}
