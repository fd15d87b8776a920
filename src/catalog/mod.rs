//! The catalogue's contract: what is known of the agents at one moment. Knows no run and no HTTP.

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

/// A snapshot of all definitions, sorted by name. Never edited: a reload swaps the whole.
#[derive(Clone, Debug, Default)]
pub struct Agents {
    /// Counts the snapshots.
    pub generation: u64,
    /// By name.
    pub entries: BTreeMap<String, Entry>,
}

/// One agent file as it stands.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The file's stem.
    pub name: String,
    /// The file.
    pub path: PathBuf,
    /// The definition in force: the file's, or the last good one of a file that broke later.
    pub agent: Option<Arc<Agent>>,
    /// What is wrong with the file as it is now.
    pub error: Option<LoadError>,
    /// What is odd in it, without being wrong.
    pub warnings: Vec<String>,
}

/// What the server's configuration says that every definition is checked against.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// `[runs] max_tree`
    pub max_tree: usize,
    /// Whether clients have keys, so that a memory belongs to one of them.
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
    /// As this configuration has them.
    pub fn from_config(config: &Config) -> Self {
        Self {
            max_tree: config.runs.max_tree,
            has_keys: !config.auth.keys.is_empty(),
        }
    }

    /// What is wrong with a definition on this server.
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

    /// What is odd about a definition on this server.
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
    /// The definition in force under that name.
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

/// Why there is no definition.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// No such file in any of the directories, or a name that is none.
    #[error("agent config not found: {0}")]
    NotFound(String),
    /// Its `model` (or a fallback) has the wrong shape.
    #[error("{0}")]
    Model(#[from] ModelRefError),
    /// Anything else: the exact text of the contract, with file, line and key where there are any.
    #[error("{0}")]
    Invalid(String),
}
