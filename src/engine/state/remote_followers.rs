//! The other nodes that follow trees of this one.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::mpsc;

use crate::domain::node::NodeId;
use crate::domain::run::RunId;
use crate::store::node_messages::Follow;

#[derive(Default)]
pub struct RemoteFollowers {
    /// Those of the tasks that serve them, by tree and node.
    inputs: Mutex<HashMap<(RunId, NodeId), mpsc::Sender<Follow>>>,
}

impl RemoteFollowers {
    /// Passes a request on to its task. If there is none, returns the input of the one that has to be started.
    pub fn pass_on(&self, request: &Follow) -> Option<mpsc::Receiver<Follow>> {
        let mut inputs = self.lock();
        let key = (request.root, request.node);
        // A task that is busy gets the next one.
        if inputs.get(&key).is_some_and(|input| {
            !matches!(
                input.try_send(request.clone()),
                Err(mpsc::error::TrySendError::Closed(_))
            )
        }) {
            return None;
        }
        let (input, requests) = mpsc::channel(4);
        inputs.insert(key, input);
        Some(requests)
    }

    /// Removes the inputs of tasks that have ended.
    pub fn remove_closed(&self, root: RunId, node: NodeId) {
        let mut inputs = self.lock();
        if inputs
            .get(&(root, node))
            .is_some_and(mpsc::Sender::is_closed)
        {
            inputs.remove(&(root, node));
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<(RunId, NodeId), mpsc::Sender<Follow>>> {
        self.inputs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
