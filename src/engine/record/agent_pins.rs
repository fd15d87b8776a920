//! Pins trees to the definitions of the agents that they can call. The record of a root names them by the digest of one
//! text, which many roots share.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::catalog::Agents;
use crate::domain::agent::Agent;
use crate::domain::attachment::Digest;
use crate::domain::run::RunId;
use crate::engine::record::agent_snapshots::AgentSnapshots;
use crate::engine::state::pinned_agents::{PinnedAgents, PinnedRoot};
use crate::store::StoreError;
use crate::store::runs::RunRecords;

/// If there are more entries, those that no tree uses are removed.
const PRUNE_THRESHOLD: usize = 1024;

/// What trees are pinned to. Each text is rendered, or read, once.
#[derive(Debug, Default)]
pub struct AgentPins {
    /// By the name and the version of the agent: one with a rollout has two.
    roots: Mutex<HashMap<(String, String), CachedRoot>>,
    in_use: Mutex<HashMap<Digest, Weak<PinnedAgents>>>,
}

#[derive(Debug)]
struct CachedRoot {
    /// The catalog's agent.
    agent: Arc<Agent>,
    /// The last snapshot of the catalog that had these definitions.
    generation: u64,
    root: PinnedRoot,
}

impl AgentPins {
    /// An agent of the catalog as a root, whose tree is pinned to what the catalog has.
    pub fn pin(
        &self,
        snapshots: &AgentSnapshots,
        agents: &Agents,
        agent: &Arc<Agent>,
    ) -> PinnedRoot {
        if agent.sub_agents.is_empty() {
            return PinnedRoot {
                agent: Arc::clone(agent),
                pinned: None,
            };
        }
        if let Some(root) = self.cached(agents, agent) {
            return root;
        }
        let root = self.pin_anew(snapshots, agents, agent);
        let mut roots = lock(&self.roots);
        roots.retain(|(name, version), _| {
            let entry = agents.entries.get(name);
            let known = entry.map(|entry| [&entry.agent, &entry.candidate].map(Option::as_ref));
            let mut known = known.into_iter().flatten().flatten();
            known.any(|agent| agent.version == *version)
        });
        let cached = CachedRoot {
            agent: Arc::clone(agent),
            generation: agents.generation,
            root: root.clone(),
        };
        roots.insert((agent.name.clone(), agent.version.clone()), cached);
        root
    }

    fn cached(&self, agents: &Agents, agent: &Arc<Agent>) -> Option<PinnedRoot> {
        let mut roots = lock(&self.roots);
        let cached = roots.get_mut(&(agent.name.clone(), agent.version.clone()))?;
        let is_current = Arc::ptr_eq(&cached.agent, agent)
            && (cached.generation == agents.generation
                || is_pinned_to(&cached.root, &agents.callable(agent)));
        is_current.then(|| {
            cached.generation = agents.generation;
            cached.root.clone()
        })
    }

    /// As [`AgentPins::pin`], of an agent that need not be the catalog's.
    pub fn pin_anew(
        &self,
        snapshots: &AgentSnapshots,
        agents: &Agents,
        agent: &Agent,
    ) -> PinnedRoot {
        let callable = agents.callable(agent).into_iter();
        let callable = callable.map(|(name, agent)| (name.to_owned(), Arc::clone(agent)));
        self.pin_to(snapshots, callable.collect(), agent)
    }

    /// An agent as a root, whose tree is pinned to these definitions.
    pub fn pin_to(
        &self,
        snapshots: &AgentSnapshots,
        callable: BTreeMap<String, Arc<Agent>>,
        agent: &Agent,
    ) -> PinnedRoot {
        let pinned = (!callable.is_empty()).then(|| {
            let texts: Vec<Arc<str>> = callable
                .values()
                .map(|agent| snapshots.agent_json(agent))
                .collect();
            let text: Arc<str> = format!("[{}]", texts.join(",")).into();
            self.share(PinnedAgents {
                agents: callable,
                digest: Digest::compute(text.as_bytes()),
                text,
            })
        });
        let agent = Agent {
            pinned_agents: pinned.as_ref().map(|pinned| pinned.digest),
            ..agent.clone()
        };
        PinnedRoot {
            agent: Arc::new(agent),
            pinned,
        }
    }

    /// What the tree of this recorded root is pinned to. `None` if it is to nothing, or if the record has no such text any
    /// more.
    pub async fn load(
        &self,
        store: &(impl RunRecords + ?Sized),
        root: RunId,
        agent: &Agent,
    ) -> Result<Option<Arc<PinnedAgents>>, StoreError> {
        let Some(digest) = agent.pinned_agents else {
            return Ok(None);
        };
        if let Some(pinned) = lock(&self.in_use).get(&digest).and_then(Weak::upgrade) {
            return Ok(Some(pinned));
        }
        let text = match store.pinned_agents(digest).await {
            Err(error) if error.is_damage() => None,
            found => found?,
        };
        let pinned = text.and_then(|text| parse(text, digest));
        if pinned.is_none() {
            tracing::warn!(
                run.id = %root, run.root = %root,
                "The definitions that {root} calls other agents in cannot be read: it calls them in the current ones"
            );
        }
        Ok(pinned.map(|pinned| self.share(pinned)))
    }

    /// The value with this content that others use already, or this one.
    fn share(&self, pinned: PinnedAgents) -> Arc<PinnedAgents> {
        let mut in_use = lock(&self.in_use);
        if let Some(known) = in_use.get(&pinned.digest).and_then(Weak::upgrade) {
            return known;
        }
        if in_use.len() >= PRUNE_THRESHOLD {
            in_use.retain(|_, pinned| pinned.strong_count() > 0);
        }
        let pinned = Arc::new(pinned);
        in_use.insert(pinned.digest, Arc::downgrade(&pinned));
        pinned
    }
}

fn is_pinned_to(root: &PinnedRoot, callable: &BTreeMap<&str, &Arc<Agent>>) -> bool {
    let pinned = root.pinned.iter().flat_map(|it| it.agents.values());
    pinned
        .map(Arc::as_ptr)
        .eq(callable.values().map(|agent| Arc::as_ptr(agent)))
}

fn parse(text: Arc<str>, digest: Digest) -> Option<PinnedAgents> {
    let agents: Vec<Arc<Agent>> = serde_json::from_str(&text).ok()?;
    let agents = agents.into_iter().map(|agent| (agent.name.clone(), agent));
    Some(PinnedAgents {
        agents: agents.collect(),
        text,
        digest,
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
