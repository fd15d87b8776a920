//! Nodes whose agents differ from those of this one. That is normal for a while: nodes are restarted one after the other, and a
//! changed file does not reach all at the same time.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::engine::context::Engine;

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
                "The agents of this node have differed from those of {} for {} minutes: a run gets those of the node that it \
                 comes to; give all nodes the same agent files",
                nodes.join(", "),
                NORMAL_DURATION.as_secs() / 60
            ),
            (Difference::Logged, Difference::None) => {
                tracing::info!("All nodes have the same agents again");
            }
            _ => {}
        }
    }
}

/// The names of the nodes whose agents differ; `None` if no other process can share the store.
pub fn differing_nodes(engine: &Engine) -> Option<Vec<String>> {
    let mut others = engine.journal.store().cluster()?.other_nodes();
    let own = engine.catalog.current().digest();
    others.retain(|node| node.agents.as_ref().is_some_and(|agents| *agents != own));
    let mut names: Vec<String> = others.into_iter().map(|node| node.name).collect();
    names.sort();
    Some(names)
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
