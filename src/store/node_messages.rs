//! The contract for messages between the nodes that share a database. They make others look sooner at what the database has, and
//! carry the text that a model is writing. Each may be lost, so nothing depends on them but the delay.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tokio::sync::broadcast;
use uuid::Uuid;

use crate::domain::node::NodeId;
use crate::domain::rate_limit::RateReport;
use crate::domain::run::RunId;

/// Received messages, shared by all who look for theirs. After `Lagged`, any may have been missed.
pub type ReceivedMessages = broadcast::Receiver<Arc<NodeMessage>>;

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeMessage {
    /// There are requests to runs of the receiver.
    Requests,
    /// The request with this id has its answer.
    Answered(Uuid),
    /// The sender follows a tree of the receiver.
    Follow(Follow),
    /// These trees, which the receiver follows, have events up to this number, or all that they will have from the sender; 0 if a
    /// run has changed without an event.
    Events(Vec<(RunId, u64)>),
    /// What a model is writing, in a tree that the receiver follows.
    Text(FollowedText),
    /// Trees were given permits.
    Permits,
    /// There may be trees that nobody owns.
    FreeTrees,
    /// This node drives these trees from now on.
    Taken(NodeId, Vec<RunId>),
    /// What this node has used of the rate limits of providers since its last message.
    RateLimits(NodeId, Vec<RateReport>),
}

/// Repeated as long as the sender follows the tree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Follow {
    pub root: RunId,
    pub node: NodeId,
    /// Another one each time that the node begins to follow the tree.
    pub number: u64,
    /// Whether it also follows what the models are writing.
    pub text: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FollowedText {
    pub root: RunId,
    /// [`Follow::number`].
    pub follow: u64,
    /// Counts from 1 for each `follow`. A gap means that messages were lost.
    pub number: u64,
    pub piece: TextPiece,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TextPiece {
    /// A part of what the root's model had written of its reply before the first event.
    Before {
        /// The root's agent; empty from a node of an older version.
        #[serde(default)]
        agent: String,
        turn: u32,
        text: String,
        /// Whether other text of the same turn was withdrawn.
        is_replacement: bool,
    },
    /// Everything that was written before has been sent.
    Begin,
    /// An event without a number.
    Event {
        name: String,
        /// The `data` object.
        data: Box<RawValue>,
    },
}

pub trait NodeMessages: Send + Sync + 'static {
    /// Sends a message soon, to one node or to all. Does not block, and may drop it.
    fn send(&self, to: Option<NodeId>, message: NodeMessage);

    /// The messages that this node receives from now on, its own to all nodes included.
    fn messages(&self) -> ReceivedMessages;
}
