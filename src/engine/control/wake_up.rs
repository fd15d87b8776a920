//! Waits for messages of other nodes that say only where to look.

use tokio::sync::broadcast::error::RecvError;

use crate::store::node_messages::{NodeMessage, ReceivedMessages};

/// Returns once such a message has arrived, or may have been missed.
pub async fn wait_for(messages: &mut ReceivedMessages, is_it: impl Fn(&NodeMessage) -> bool) {
    loop {
        match messages.recv().await {
            Ok(message) if !is_it(&message) => {}
            Ok(_) | Err(RecvError::Lagged(_)) => return,
            // The store is closed: nothing arrives any more.
            Err(RecvError::Closed) => std::future::pending().await,
        }
    }
}
