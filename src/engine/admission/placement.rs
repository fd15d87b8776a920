//! Which nodes can drive a new tree: those with the labels that its agents require.

use std::sync::Arc;

use crate::domain::agent::Agent;
use crate::engine::cluster::follow;
use crate::engine::context::{Engine, RunContext};
use crate::engine::request::{RunRequest, StartError};
use crate::store::node_messages::NodeMessage;

/// The labels that a node needs to drive a tree, and whether this one has them.
pub struct Placement {
    pub labels: Arc<[String]>,
    pub is_here: bool,
}

impl Placement {
    /// That of a tree of this agent.
    pub fn new(engine: &Engine, agent: &Agent) -> Self {
        let labels = engine.catalog.current().node_labels(agent);
        let own = &engine.settings.node_labels;
        Self {
            is_here: labels.iter().all(|label| own.contains(label)),
            labels: labels.into(),
        }
    }
}

/// Fails if this node has not the labels, and no other node can take the run. A recording is played anywhere.
pub fn place(
    engine: &Engine,
    request: &RunRequest,
    agent: &Agent,
) -> Result<Placement, StartError> {
    let placement = Placement::new(engine, agent);
    let why = match engine.journal.store().cluster() {
        _ if placement.is_here => return Ok(placement),
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
