//! Cancels runs that any node may drive.

use std::sync::Arc;

use crate::domain::run::RunId;
use crate::engine::context::Engine;
use crate::engine::control::cancel;
use crate::engine::control::run_change::RunChange;
use crate::engine::control::send_change;
use crate::engine::state::sessions::OnBusy;
use crate::store::StoreError;
use crate::store::new_request::{NewRequest, RequestId};
use crate::store::node_messages::NodeMessage;

/// Whether a new run replaces those before it in its session, and which ones if several nodes share the database.
#[derive(Default)]
pub struct Replacement {
    pub is_wanted: bool,
    /// Those of this node.
    pub here: Vec<RunId>,
    /// Cancels of those of other nodes, to be committed with the new run.
    pub requests: Vec<NewRequest>,
}

/// Like [`cancel::cancel`], by the node that drives the run.
pub async fn cancel(engine: &Arc<Engine>, id: RunId, reason: &str) -> Result<(), StoreError> {
    let change = || RunChange::Cancel {
        reason: reason.to_owned(),
    };
    match send_change::send(engine, id, change).await {
        Some(cancelled) => cancelled,
        None => cancel::cancel(engine, id, reason).await,
    }
}

/// The runs that `successor` replaces in its session, of these unfinished ones before it.
pub fn replace(
    engine: &Engine,
    on_busy: OnBusy,
    predecessors: Vec<RunId>,
    successor: RunId,
) -> Result<Replacement, StoreError> {
    if on_busy != OnBusy::CancelPrevious {
        return Ok(Replacement::default());
    }
    let (here, elsewhere): (Vec<_>, Vec<_>) = predecessors
        .into_iter()
        .partition(|run| engine.active_runs.get(*run).is_some());
    // The last one first, so that none starts because the run before it ended.
    let requests = elsewhere.into_iter().rev().map(|root| {
        let change = RunChange::Cancel {
            reason: cancel::replaced_by(successor),
        };
        Ok(NewRequest {
            id: RequestId::new(),
            run: root,
            root,
            kind: change.kind(),
            content: change.encode()?,
        })
    });
    let requests: Result<_, StoreError> = requests.collect();
    Ok(Replacement {
        is_wanted: true,
        here,
        requests: requests?,
    })
}

/// Lets the other nodes look for requests that were committed.
pub fn announce_requests(engine: &Engine) {
    if let Some(cluster) = engine.journal.store().cluster() {
        cluster.send(None, NodeMessage::Requests);
    }
}
