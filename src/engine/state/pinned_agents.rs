//! The definitions in which the runs of a tree call other agents: those that were current when its root was accepted.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::catalog::reload::Catalog;
use crate::catalog::{Agents, LoadError};
use crate::domain::agent::Agent;
use crate::domain::attachment::Digest;

/// The agents that the runs of a tree can call. All trees with the same ones share a value.
#[derive(Debug)]
pub struct PinnedAgents {
    pub agents: BTreeMap<String, Arc<Agent>>,
    /// As the record keeps them.
    pub text: Arc<str>,
    pub digest: Digest,
}

/// The agent of a root, which names the definitions that its tree is pinned to.
#[derive(Clone, Debug)]
pub struct PinnedRoot {
    pub agent: Arc<Agent>,
    pub pinned: Option<Arc<PinnedAgents>>,
}

/// Where the runs of a tree find the agents that they call.
pub struct SubAgents {
    /// `None` of a tree that can call none, and of one that an older version accepted.
    pinned: Option<Arc<PinnedAgents>>,
    current: Arc<Agents>,
}

impl SubAgents {
    pub fn new(pinned: Option<Arc<PinnedAgents>>, catalog: &Catalog) -> Self {
        Self {
            pinned,
            current: catalog.current(),
        }
    }

    /// The pinned definition of this name. An agent that had none when the root was accepted has its current one.
    pub fn get(&self, name: &str) -> Result<&Arc<Agent>, LoadError> {
        let pinned = self.pinned.as_ref().and_then(|it| it.agents.get(name));
        pinned.map_or_else(|| self.current.get(name), Ok)
    }
}
