//! Whether this process does what one of those that share a database does for all.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::store::StoreError;
use crate::store::duties::LEADER;
use crate::store::run_store::RunStore;

/// How often a node looks whether it is the leader, and the leader for what other nodes have recorded.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Whether this process is the leader, as far as it knows. It may be wrong for a moment: what a leader does is safe to repeat, or its
/// writes say that they are those of the leader.
#[derive(Clone, Debug)]
pub struct Leadership {
    is_leader: watch::Receiver<bool>,
    has_other_nodes: bool,
}

impl Leadership {
    /// That of a process that shares its store with no other.
    pub fn alone() -> Self {
        Self {
            is_leader: watch::channel(true).1,
            has_other_nodes: false,
        }
    }

    pub fn is_leader(&self) -> bool {
        *self.is_leader.borrow()
    }

    /// Resolves while this process is the leader.
    pub async fn gained(&self) {
        self.becomes(true).await;
    }

    /// Resolves while another process is the leader, or nobody.
    pub async fn lost(&self) {
        self.becomes(false).await;
    }

    /// Resolves when it is time to look for what other nodes have recorded; never if there are none.
    pub async fn poll(&self) {
        match self.has_other_nodes {
            true => tokio::time::sleep(POLL_INTERVAL).await,
            false => std::future::pending().await,
        }
    }

    async fn becomes(&self, is_leader: bool) {
        let mut receiver = self.is_leader.clone();
        if receiver.wait_for(|it| *it == is_leader).await.is_err() {
            // Nothing changes any more: the process stops, or is alone.
            std::future::pending().await
        }
    }
}

/// Keeps a [`Leadership`] up to date.
pub struct Election {
    store: Arc<dyn RunStore>,
    is_leader: watch::Sender<bool>,
}

/// Looks whether this process is the leader, and becomes it if nobody is.
pub async fn start(store: Arc<dyn RunStore>) -> (Leadership, Option<Election>) {
    if store.cluster().is_none() {
        return (Leadership::alone(), None);
    }
    let (is_leader, receiver) = watch::channel(false);
    let leadership = Leadership {
        is_leader: receiver,
        has_other_nodes: true,
    };
    let election = Election { store, is_leader };
    election.look().await;
    (leadership, Some(election))
}

impl Election {
    /// Goes on until `stop` is cancelled. A process that drains leaves the lead to another.
    pub async fn run(&self, is_draining: impl Fn() -> bool, stop: CancellationToken) {
        loop {
            tokio::select! {
                () = tokio::time::sleep(POLL_INTERVAL) => {}
                () = stop.cancelled() => return,
            }
            match is_draining() {
                false => self.look().await,
                true => self.hand_over().await,
            }
        }
    }

    async fn hand_over(&self) {
        let Some(cluster) = self.store.cluster() else {
            return;
        };
        if *self.is_leader.borrow() && cluster.hand_over_duty(LEADER).await.unwrap_or(false) {
            self.is_leader.send_replace(false);
        }
    }

    async fn look(&self) {
        let holds = match self.store.cluster() {
            Some(cluster) => cluster.holds_duty(LEADER).await,
            None => return,
        };
        // Without the database nobody knows, and nothing can be done for others.
        let is_leader = holds.unwrap_or_else(|error| {
            if !matches!(error, StoreError::Closed) {
                tracing::debug!(error = %error, "It is not known whether this node leads: {error}");
            }
            false
        });
        let is_changed = |before: &mut bool| std::mem::replace(before, is_leader) != is_leader;
        if self.is_leader.send_if_modified(is_changed) && is_leader {
            tracing::info!(
                "This node leads: it runs schedules, sends webhooks, feeds batches and removes old runs"
            );
        }
    }
}
