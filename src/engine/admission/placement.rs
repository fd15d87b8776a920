//! Which nodes can drive a new tree: those with the labels that its agents require.

use crate::domain::agent::Agent;
use crate::engine::context::Engine;
use crate::engine::request::{RunRequest, StartError};

/// The labels that a node needs to drive a tree, and whether this one has them.
pub struct Placement {
    pub labels: Vec<String>,
    pub is_here: bool,
}

/// Fails if this node has not the labels of the agent and of those that it may call, and no other node can take the run. A
/// recording is played anywhere.
pub fn place(
    engine: &Engine,
    request: &RunRequest,
    agent: &Agent,
) -> Result<Placement, StartError> {
    let labels = engine.catalog.current().node_labels(agent);
    let own = &engine.settings.node_labels;
    let is_here = request.playback.is_some() || labels.iter().all(|label| own.contains(label));
    let why = match engine.journal.store().cluster() {
        _ if is_here => None,
        None => Some("this daemon has not, see [cluster] labels of its configuration"),
        Some(_) if !request.provider_keys.is_empty() => Some(
            "this one has not: send the request to such a node, because no other gets its provider keys",
        ),
        Some(_) => None,
    };
    match why {
        None => Ok(Placement { labels, is_here }),
        Some(why) => Err(StartError::NoNode {
            agent: agent.name.clone(),
            labels,
            why,
        }),
    }
}
