//! The contract for messages between nodes.

use crate::domain::node::NodeId;
use crate::store::node_messages::{NodeMessage, NodeMessages, ReceivedMessages};
use crate::store::postgres::PostgresStore;

impl NodeMessages for PostgresStore {
    fn send(&self, to: Option<NodeId>, message: NodeMessage) {
        self.messages.send(to, message);
    }

    fn messages(&self) -> ReceivedMessages {
        self.messages.receive()
    }
}
