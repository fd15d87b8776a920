//! Which nodes can drive a new tree: those with the labels that its agents require.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::domain::agent::Agent;
use crate::domain::node::{provider_label, root_label};
use crate::engine::cluster::follow;
use crate::engine::context::{Engine, RunContext};
use crate::engine::request::{RunRequest, StartError};
use crate::providers::registry::ProviderRegistry;
use crate::store::node_messages::NodeMessage;
use crate::workdirs::registry::Workdirs;

/// The labels that a node needs to drive a tree, and whether this one has them.
pub struct Placement {
    pub labels: Arc<[String]>,
    pub is_here: bool,
}

impl Placement {
    /// That of a tree of this agent. If this node cannot send requests to its providers, but another one can, the tree needs a node
    /// that can.
    pub fn new(engine: &Engine, agent: &Agent) -> Self {
        let mut labels = engine.catalog.current().node_labels(agent);
        if let Some(more) = missing_providers(engine, agent)
            && has_other_node(engine, &[labels.as_slice(), more.as_slice()].concat())
        {
            labels.extend(more);
        }
        let own = &engine.settings.node_labels;
        Self {
            is_here: labels.iter().all(|label| own.contains(label)),
            labels: labels.into(),
        }
    }
}

/// The labels of all providers of a tree of this agent, if other nodes may have what this one lacks of them.
fn missing_providers(engine: &Engine, agent: &Agent) -> Option<Vec<String>> {
    engine.journal.store().cluster()?;
    let needed = engine.catalog.current().provider_labels(agent);
    let own = &engine.settings.node_labels;
    let is_missing = needed.iter().any(|label| !own.contains(label));
    is_missing.then(|| needed.into_iter().collect())
}

fn has_other_node(engine: &Engine, labels: &[String]) -> bool {
    let others = engine.journal.store().cluster().map(|it| it.other_nodes());
    others
        .into_iter()
        .flatten()
        .any(|node| labels.iter().all(|label| node.labels.contains(label)))
}

/// What a node needs for a tree that goes on, if this one has not all of it, and another node has; or if no node can send requests to
/// the provider of its root: it waits for one that can. `agents` are those of its unfinished runs, and those that they may call.
pub fn elsewhere(engine: &Engine, root: &Agent, agents: &[Arc<Agent>]) -> Option<Vec<String>> {
    let own = &engine.settings.node_labels;
    let providers: BTreeSet<String> = agents
        .iter()
        .map(|agent| &agent.model.provider)
        .filter(|provider| !root.given_keys.contains(provider))
        .map(|provider| provider_label(provider))
        .collect();
    if providers.iter().all(|label| own.contains(label)) {
        return None;
    }
    let mut labels: BTreeSet<String> = agents
        .iter()
        .flat_map(|agent| agent.node.iter().cloned())
        .collect();
    labels.extend(root.requested_root.as_deref().map(root_label));
    let needed: Vec<String> = labels.iter().chain(&providers).cloned().collect();
    if has_other_node(engine, &needed) {
        return Some(needed);
    }
    let models = std::iter::once(&root.model).chain(&root.fallback_models);
    let can_ask = |provider: &String| {
        root.given_keys.contains(provider) || engine.providers.get(provider).is_ok()
    };
    if models.map(|model| &model.provider).any(can_ask) {
        return None;
    }
    labels.insert(provider_label(&root.model.provider));
    Some(labels.into_iter().collect())
}

/// What this node has: the configured labels, and what it can serve.
pub fn own_labels(
    configured: &[String],
    providers: &ProviderRegistry,
    workdirs: &Workdirs,
) -> Vec<String> {
    let usable = providers.names().filter(|name| providers.get(name).is_ok());
    let labels = configured.iter().cloned();
    labels
        .chain(usable.map(provider_label))
        .chain(workdirs.roots().iter().map(|root| root_label(root)))
        .collect()
}

/// Fails if this node has not the labels, and no other node can take the run. A recording is played anywhere.
pub fn place(
    engine: &Engine,
    request: &RunRequest,
    agent: &Agent,
) -> Result<Placement, StartError> {
    let placement = Placement::new(engine, agent);
    if placement.is_here {
        return Ok(placement);
    }
    let why = match engine.journal.store().cluster() {
        None if request.playback.is_some() => {
            return Ok(Placement {
                is_here: true,
                ..placement
            });
        }
        None => "this daemon has not, see [cluster] labels of its configuration",
        Some(_) if !request.provider_keys.is_empty() => {
            "this one has not: send the request to such a node, because no other gets its provider keys"
        }
        Some(_) => return Ok(placement),
    };
    Err(StartError::NoNode {
        agent: agent.name.clone(),
        labels: placement.labels,
        why,
    })
}

/// Leaves a tree that is committed without an owner to the nodes that can drive it.
pub fn offer(context: &RunContext) {
    let RunContext { engine, run } = context;
    let root = run.scope.root;
    engine.active_runs.remove(root);
    engine.cluster_permits.tree_ended(root);
    follow::release(engine, root);
    run.publish_end(None);
    if let Some(cluster) = engine.journal.store().cluster() {
        cluster.send(None, NodeMessage::FreeTrees);
    }
}
