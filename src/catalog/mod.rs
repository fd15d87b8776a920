//! The catalogue: snapshots of all agent definitions.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use crate::config::Config;
use crate::domain::agent::Agent;
use crate::domain::agent::model_ref::ModelRefError;

pub mod context_files;
pub mod file_reader;
pub mod mcp_servers;
pub mod prompt;
pub mod read;
pub mod reload;
pub mod template;
pub mod view;

/// An immutable snapshot of all definitions, sorted by name. A reload replaces the snapshot.
#[derive(Clone, Debug, Default)]
pub struct Agents {
    /// Increases with each snapshot.
    pub generation: u64,
    pub entries: BTreeMap<String, Entry>,
}

/// An agent file.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The file's name without `.toml`.
    pub name: String,
    pub path: PathBuf,
    /// The current definition: the file's, or the last valid one if the file became invalid later.
    pub agent: Option<Arc<Agent>>,
    /// The error of the file's current content.
    pub error: Option<LoadError>,
    /// Warnings about a valid file.
    pub warnings: Vec<String>,
}

/// Settings of the server that every definition is checked against.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// `[runs] max_tree`
    pub max_tree: usize,
    /// Whether keys are configured: then each key has its own memory.
    pub has_keys: bool,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            max_tree: usize::MAX,
            has_keys: false,
        }
    }
}

impl Rules {
    pub fn from_config(config: &Config) -> Self {
        Self {
            max_tree: config.runs.max_tree,
            has_keys: !config.auth.keys.is_empty(),
        }
    }

    /// Returns an error if this server cannot run the definition.
    fn check(&self, agent: &Agent) -> Result<(), LoadError> {
        let memory = &agent.memory;
        match self.has_keys && memory.enabled && !memory.shared && memory.path.is_some() {
            true => Err(LoadError::Invalid(format!(
                "agent config \"{}\": memory.path needs memory.shared = true, because this server has keys and each key \
                 has a memory of its own; say shared = true in [memory], or leave path out",
                agent.name
            ))),
            false => Ok(()),
        }
    }

    /// Returns warnings about a definition on this server.
    fn lint(&self, agent: &Agent) -> Vec<String> {
        let max_runs = u64::try_from(self.max_tree).unwrap_or(u64::MAX);
        let exceeding = agent.budget.max_runs.filter(|runs| *runs > max_runs);
        let warning = exceeding.map(|runs| {
            format!(
                "budget.max_runs is {runs}, but the server lets a tree have {max_runs} runs (runs.max_tree)"
            )
        });
        warning.into_iter().collect()
    }
}

impl Agents {
    /// The current definition of this name.
    pub fn get(&self, name: &str) -> Result<&Arc<Agent>, LoadError> {
        let entry = self
            .entries
            .get(name)
            .ok_or_else(|| LoadError::NotFound(name.to_owned()))?;
        match (&entry.agent, &entry.error) {
            (Some(agent), _) => Ok(agent),
            (None, Some(error)) => Err(error.clone()),
            (None, None) => Err(LoadError::NotFound(name.to_owned())),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// No directory has such a file, or the name is invalid.
    #[error("agent config not found: {0}")]
    NotFound(String),
    /// The `model` or a fallback is not `provider/model`.
    #[error("{0}")]
    Model(#[from] ModelRefError),
    /// Any other error: the contract's text, with file, line and key if known.
    #[error("{0}")]
    Invalid(String),
}
