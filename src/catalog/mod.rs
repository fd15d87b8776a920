//! The catalogue: snapshots of all agent definitions.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use crate::catalog::documents::Documents;
use crate::catalog::memory_path::MemoryPaths;
use crate::config::Config;
use crate::config::models::lookup::Models;
use crate::domain::agent::Agent;
use crate::domain::node::{provider_label, root_label};
use crate::settings::document::Problem;
use crate::settings::positions::Positions;

pub mod agent_toml;
pub mod braces;
pub mod context_files;
pub mod datasets;
mod document_fetch;
pub mod documents;
pub mod file_checks;
mod http_tool_fields;
pub mod http_tools;
pub mod mcp_oauth;
pub mod mcp_servers;
mod memory_path;
pub mod omissions;
pub mod openapi_tools;
pub mod promotion;
pub mod prompt;
pub mod read;
pub mod reload;
pub mod schedules;
mod schemas;
pub mod scorers;
pub mod skills;
pub mod template;
pub mod triggers;

/// An immutable snapshot of all definitions, sorted by name. A reload replaces the snapshot.
#[derive(Clone, Debug, Default)]
pub struct Agents {
    /// Increases with each snapshot.
    pub generation: u64,
    pub entries: BTreeMap<String, Entry>,
    /// Files that define no agent: those with an invalid name, and those that an earlier directory's file hides.
    pub ignored_files: BTreeMap<PathBuf, Problem>,
}

/// An agent file.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The file's name without `.toml`.
    pub name: String,
    pub path: PathBuf,
    /// The current definition: the file's, or the last valid one if the file became invalid later.
    pub agent: Option<Arc<Agent>>,
    /// The candidate of its rollout, or the last valid one.
    pub candidate: Option<Arc<Agent>>,
    /// The version of the file, if it is valid; not that of the agent if a promoted candidate is in force.
    pub file_version: Option<String>,
    /// The error of the file's current content.
    pub error: Option<LoadError>,
    /// Everything that is wrong with the file's current content, sorted by position; empty if it is valid.
    pub problems: Vec<Problem>,
    /// The content of an invalid file without its errors.
    pub draft: Option<Arc<Draft>>,
    /// Warnings about a valid file that need no other file and no server.
    pub file_warnings: Vec<Problem>,
    /// All warnings: those of the file, then what this server lacks for the current definition.
    pub warnings: Vec<Problem>,
    /// The positions of the keys of a valid file.
    pub positions: Arc<Positions>,
}

/// An agent whose wrong and missing settings have their defaults, and the positions of the keys.
#[derive(Clone, Debug)]
pub struct Draft {
    pub agent: Agent,
    pub positions: Positions,
}

/// Settings of the server that every definition is checked against.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    /// Whether keys are configured: then each key has its own memory.
    pub has_keys: bool,
    /// Whether memories are in a database instead of files.
    pub has_database: bool,
    /// Where memories of agents cannot be.
    pub memory_paths: MemoryPaths,
    /// The documents that agent files name.
    pub documents: Arc<Documents>,
    /// The models, whose file is read again with the agents.
    pub models: Models,
}

impl Rules {
    pub fn from_config(config: &Config) -> Self {
        Self {
            has_keys: !config.auth.keys.is_empty(),
            has_database: config.data.url.is_some(),
            memory_paths: MemoryPaths::from_config(config),
            documents: Arc::new(Documents::from_config(config)),
            models: config.models.clone(),
        }
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

    /// Equal for equal definitions of all agents.
    pub fn digest(&self) -> String {
        let mut digest = Sha256::new();
        for (name, entry) in &self.entries {
            if let Some(agent) = &entry.agent {
                digest.update(format!("{name} {}\n", agent.version));
            }
            if let Some(candidate) = &entry.candidate {
                digest.update(format!("{}\n", candidate.version));
            }
        }
        let digest = digest.finalize();
        digest.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The labels that a node needs to drive a tree of this agent: its own and those of the agents that it may call.
    pub fn node_labels(&self, agent: &Agent) -> Vec<String> {
        let agents = self.with_called(agent);
        let labels = agents.flat_map(|it| it.node.iter().cloned());
        let root = agent.requested_root.as_deref().map(root_label);
        let labels: BTreeSet<String> = labels.chain(root).collect();
        labels.into_iter().collect()
    }

    /// The providers of this agent and of those that it may call, as what a node has. Those whose keys the client gave are left
    /// out.
    pub fn provider_labels(&self, agent: &Agent) -> BTreeSet<String> {
        let providers = self.with_called(agent).map(|it| &it.model.provider);
        providers
            .filter(|name| !agent.given_keys.contains(name))
            .map(|name| provider_label(name))
            .collect()
    }

    /// This agent and all that it may call.
    fn with_called<'a>(&'a self, agent: &'a Agent) -> impl Iterator<Item = &'a Agent> {
        let called = self.callable(agent).into_values();
        std::iter::once(agent).chain(called.map(|called| &**called))
    }

    /// The agents that a tree of this agent may call, by name.
    pub fn callable(&self, agent: &Agent) -> BTreeMap<&str, &Arc<Agent>> {
        let mut callable = BTreeMap::new();
        let mut callers = vec![agent];
        while let Some(caller) = callers.pop() {
            for name in &caller.sub_agents {
                if let Ok(called) = self.get(name)
                    && callable.insert(&*called.name, called).is_none()
                {
                    callers.push(called);
                }
            }
        }
        callable
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// No directory has such a file, or the name is invalid.
    #[error("agent config not found: {0}")]
    NotFound(String),
    /// The `model` or a fallback is not `provider/model`.
    #[error("{0}")]
    Model(String),
    /// Any other error: the contract's text, with file, line and key if known.
    #[error("{0}")]
    Invalid(String),
}
