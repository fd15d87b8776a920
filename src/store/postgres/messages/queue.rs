//! Messages that are to be sent.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::domain::node::NodeId;
use crate::domain::run::RunId;
use crate::store::node_messages::NodeMessage;

/// With one more, messages are dropped.
const MAX_QUEUED: usize = 8192;
/// Trees in one message, so that PostgreSQL takes it: below 8,000 bytes.
const MAX_TREES: usize = 120;

/// A message to one node, or to all.
#[derive(Debug)]
pub struct QueuedMessage {
    pub to: Option<NodeId>,
    pub message: NodeMessage,
}

#[derive(Default)]
pub struct MessageQueue {
    messages: Mutex<VecDeque<QueuedMessage>>,
    added: Notify,
}

impl MessageQueue {
    pub fn push(&self, to: Option<NodeId>, message: NodeMessage) {
        let mut messages = self.lock();
        if messages.len() >= MAX_QUEUED || is_merged(&mut messages, to, &message) {
            return;
        }
        messages.push_back(QueuedMessage { to, message });
        drop(messages);
        self.added.notify_one();
    }

    /// At most `max` messages, in their order; waits for the first.
    pub async fn take(&self, max: usize) -> Vec<QueuedMessage> {
        loop {
            {
                let mut messages = self.lock();
                if !messages.is_empty() {
                    let count = messages.len().min(max);
                    return messages.drain(..count).collect();
                }
            }
            self.added.notified().await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<QueuedMessage>> {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a message that is queued already says the same, or does so now. The order of a tree's events and texts is kept: what was
/// committed after a queued text is announced after it.
fn is_merged(
    messages: &mut VecDeque<QueuedMessage>,
    to: Option<NodeId>,
    message: &NodeMessage,
) -> bool {
    let mut same_receiver = messages.iter_mut().rev().filter(|it| it.to == to);
    match message {
        NodeMessage::Requests | NodeMessage::Permits | NodeMessage::FreeTrees => {
            let kind = std::mem::discriminant(message);
            same_receiver.any(|it| std::mem::discriminant(&it.message) == kind)
        }
        NodeMessage::Events(trees) => {
            let is_about = |root: RunId| trees.iter().any(|(it, _)| *it == root);
            for other in same_receiver {
                match &mut other.message {
                    NodeMessage::Events(queued) if queued.len() + trees.len() <= MAX_TREES => {
                        for (root, last) in trees {
                            // 0 is no number: it says that a run has changed without an event.
                            let is_same = |(it, queued): &&mut (RunId, u64)| {
                                it == root && (*queued == 0) == (*last == 0)
                            };
                            match queued.iter_mut().find(is_same) {
                                Some((_, queued)) => *queued = (*queued).max(*last),
                                None => queued.push((*root, *last)),
                            }
                        }
                        return true;
                    }
                    NodeMessage::Text(text) if is_about(text.root) => return false,
                    _ => {}
                }
            }
            false
        }
        NodeMessage::Answered(_)
        | NodeMessage::Follow(_)
        | NodeMessage::Text(_)
        | NodeMessage::Taken(..)
        | NodeMessage::RateLimits(..) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::{MAX_QUEUED, MAX_TREES, MessageQueue};
    use crate::domain::node::NodeId;
    use crate::domain::run::RunId;
    use crate::store::node_messages::{FollowedText, NodeMessage, TextPiece};
    use crate::store::postgres::messages::channel::encode;

    async fn taken(queue: &MessageQueue) -> Vec<String> {
        let messages = queue.take(usize::MAX).await;
        let describe = |message: &NodeMessage| match message {
            NodeMessage::Events(trees) => {
                let numbers: Vec<u64> = trees.iter().map(|(_, last)| *last).collect();
                format!("events up to {numbers:?}")
            }
            NodeMessage::Text(_) => "text".to_owned(),
            other => format!("{other:?}"),
        };
        messages.iter().map(|it| describe(&it.message)).collect()
    }

    #[tokio::test]
    async fn messages_are_merged_and_a_text_stays_between_events() {
        let queue = MessageQueue::default();
        let (one, other) = (RunId::new(), RunId::new());
        let node = Some(NodeId(RunId::new().0));
        let text = NodeMessage::Text(FollowedText {
            root: one,
            follow: 1,
            number: 1,
            piece: TextPiece::Begin,
        });
        queue.push(None, NodeMessage::Requests);
        queue.push(None, NodeMessage::Requests);
        queue.push(node, NodeMessage::Requests);
        queue.push(node, NodeMessage::Events(vec![(one, 2)]));
        queue.push(node, NodeMessage::Events(vec![(one, 0)]));
        queue.push(node, NodeMessage::Events(vec![(one, 3)]));
        queue.push(node, NodeMessage::Events(vec![(one, 0)]));
        queue.push(node, text);
        queue.push(node, NodeMessage::Events(vec![(other, 7)]));
        queue.push(node, NodeMessage::Events(vec![(one, 4)]));
        let expected = [
            "Requests",
            "Requests",
            "events up to [3, 0, 7]",
            "text",
            "events up to [4]",
        ];
        assert_eq!(taken(&queue).await, expected);
    }

    #[tokio::test]
    async fn merged_messages_are_not_too_long() {
        let queue = MessageQueue::default();
        for _ in 0..MAX_TREES + 8 {
            queue.push(None, NodeMessage::Events(vec![(RunId::new(), u64::MAX)]));
        }
        let messages = queue.take(usize::MAX).await;
        assert_eq!(messages.len(), 2);
        assert!(messages.iter().all(|it| encode(&it.message).is_some()));
    }

    #[tokio::test]
    async fn a_full_queue_drops_messages() {
        let queue = MessageQueue::default();
        for _ in 0..MAX_QUEUED + 10 {
            queue.push(None, NodeMessage::Answered(RunId::new().0));
        }
        assert_eq!(queue.take(usize::MAX).await.len(), MAX_QUEUED);
    }
}
