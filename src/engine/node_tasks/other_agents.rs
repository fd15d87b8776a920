//! Nodes whose agents, providers or roots differ from those of this one. That is normal for a while: nodes are restarted one after the other, and a
//! changed file does not reach all at the same time.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::domain::counted::counted;
use crate::domain::node::is_service;
use crate::engine::context::Engine;
use crate::store::cluster::OtherNode;

const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// A longer difference is logged.
const NORMAL_DURATION: Duration = Duration::from_secs(600);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Difference {
    None,
    Since(Instant),
    Logged,
}

impl Difference {
    fn next(self, differs: bool, now: Instant) -> Self {
        match self {
            _ if !differs => Self::None,
            Self::None => Self::Since(now),
            Self::Since(start) if now.duration_since(start) >= NORMAL_DURATION => Self::Logged,
            Self::Since(_) | Self::Logged => self,
        }
    }
}

/// Lets other nodes know the agents of this one, and logs a difference that stays, until the daemon drains.
pub async fn run(engine: Arc<Engine>) {
    let Some(cluster) = engine.journal.store().cluster() else {
        return;
    };
    let mut reloads = engine.catalog.subscribe();
    let mut difference = Difference::None;
    loop {
        cluster.set_agents(engine.catalog.current().digest());
        tokio::select! {
            Ok(()) = reloads.changed() => continue,
            () = tokio::time::sleep(CHECK_INTERVAL) => {}
            () = engine.draining.cancelled() => return,
        }
        let nodes = differing_nodes(&engine).unwrap_or_default();
        let before = difference;
        difference = before.next(!nodes.is_empty(), Instant::now());
        match (before, difference) {
            (Difference::Since(_), Difference::Logged) => tracing::warn!(
                "This node has differed for {} from other nodes: {}. Give all nodes the same agent files, provider keys \
                 and roots, or labels for what only some have",
                counted(NORMAL_DURATION.as_secs() / 60, "minute"),
                nodes.join("; ")
            ),
            (Difference::Logged, Difference::None) => {
                tracing::info!("All nodes have the same agents, providers and roots again");
            }
            _ => {}
        }
    }
}

/// The nodes that differ, with what differs; `None` if no other process can share the store. Configured labels differ on purpose.
pub fn differing_nodes(engine: &Engine) -> Option<Vec<String>> {
    let others = engine.journal.store().cluster()?.other_nodes();
    let digest = engine.catalog.current().digest();
    let own = &engine.settings.node_labels;
    let mut nodes: Vec<String> = others
        .iter()
        .filter_map(|node| describe(node, &digest, own))
        .collect();
    nodes.sort();
    Some(nodes)
}

/// What of a node differs, such as `axed-2 (other agents, without provider openai)`.
fn describe(node: &OtherNode, digest: &str, own: &[String]) -> Option<String> {
    let is_lacking = |has: &[String], label: &String| is_service(label) && !has.contains(label);
    let lacks = own.iter().filter(|label| is_lacking(&node.labels, label));
    let has_more = node.labels.iter().filter(|label| is_lacking(own, label));
    // A node of an older version says nothing of what it can serve.
    let tells = node.labels.iter().any(|label| is_service(label));
    let differs = node.agents.as_ref().is_some_and(|it| it != digest);
    let agents = differs.then(|| "other agents".to_owned());
    let differences: Vec<String> = agents
        .into_iter()
        .chain(lacks.filter(|_| tells).map(|it| format!("without {it}")))
        .chain(has_more.map(|it| format!("with {it}")))
        .collect();
    (!differences.is_empty()).then(|| format!("{} ({})", node.name, differences.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_difference_that_stays_is_logged() {
        let start = Instant::now();
        let after = |minutes: u64| start + Duration::from_secs(60 * minutes);
        let mut difference = Difference::None.next(true, start);
        difference = difference.next(true, after(9));
        assert_eq!(difference, Difference::Since(start));
        assert_eq!(difference.next(false, after(9)), Difference::None);
        difference = difference.next(true, after(10));
        assert_eq!(difference, Difference::Logged);
        assert_eq!(difference.next(true, after(30)), Difference::Logged);
        assert_eq!(difference.next(false, after(30)), Difference::None);
    }
}
