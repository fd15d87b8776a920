//! Messages between nodes by `NOTIFY`: a queue of what is to be sent, and the connections that send and listen.

use std::sync::Arc;

use tokio::sync::broadcast;

use crate::domain::node::NodeId;
use crate::store::node_messages::{NodeMessage, ReceivedMessages};
use crate::store::postgres::messages::queue::MessageQueue;

pub mod channel;
pub mod listener;
pub mod queue;
pub mod sender;

/// Received messages that one who looks for his may lag behind.
const RECEIVED_CAPACITY: usize = 4096;

/// The callers' end.
#[derive(Clone)]
pub struct Messages {
    pub queue: Arc<MessageQueue>,
    pub received: broadcast::Sender<Arc<NodeMessage>>,
}

impl Messages {
    pub fn new() -> Self {
        Self {
            queue: Arc::default(),
            received: broadcast::Sender::new(RECEIVED_CAPACITY),
        }
    }

    pub fn send(&self, to: Option<NodeId>, message: NodeMessage) {
        self.queue.push(to, message);
    }

    pub fn receive(&self) -> ReceivedMessages {
        self.received.subscribe()
    }
}
