//! Replies that came while the store failed. They are paid for: the turn takes them again once its tree is resumed here.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::domain::agent::model_ref::ModelRef;
use crate::domain::usage::Usage;
use crate::providers::Reply;
use crate::store::turn_record::TurnEntry;

/// What all replies have together, in KiB: 32 MiB. Further ones are requested again.
const MAX_KEPT_KIB: usize = 32 << 10;

/// A reply that is not recorded.
#[derive(Clone, Debug)]
pub struct KeptReply {
    pub turn: u32,
    pub reply: Reply,
    /// The model that the request named.
    pub requested_model: ModelRef,
    /// The model that replied, and what its request has used.
    pub billed: Option<(String, Usage)>,
    /// The record of the turn; `None` if it is large.
    pub entry: Option<TurnEntry>,
    /// The number of messages of its request: with others it answers another conversation.
    pub messages: usize,
}

impl KeptReply {
    fn kib(&self) -> usize {
        let message = serde_json::to_vec(&self.reply.message);
        let entry = self.entry.iter().flat_map(|entry| &entry.request);
        let bytes = message.map_or(usize::MAX, |json| json.len()) / 1024
            + entry
                .map(|request| request.body.pieces.len() / 1024)
                .sum::<usize>();
        bytes + 1
    }
}

/// A reply with its share of the memory.
#[derive(Debug)]
pub struct StoredReply {
    pub kept: KeptReply,
    _permit: OwnedSemaphorePermit,
}

/// The memory for the replies of all runs.
#[derive(Debug)]
pub struct ReplySpace(Arc<Semaphore>);

impl Default for ReplySpace {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(MAX_KEPT_KIB)))
    }
}

impl ReplySpace {
    /// `None` if there is no space for it.
    pub fn keep(&self, kept: KeptReply) -> Option<StoredReply> {
        let kib = u32::try_from(kept.kib()).ok()?;
        let permit = Arc::clone(&self.0).try_acquire_many_owned(kib).ok()?;
        Some(StoredReply {
            kept,
            _permit: permit,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_are_kept_while_there_is_space() {
        let space = ReplySpace::default();
        let reply = |mib: usize| {
            let mut reply = Reply::default();
            reply.message.content = "x".repeat(mib << 20);
            KeptReply {
                turn: 1,
                reply,
                requested_model: "fake/m".parse().expect("a model"),
                billed: None,
                entry: None,
                messages: 1,
            }
        };
        let first = space.keep(reply(20)).expect("space");
        assert!(space.keep(reply(20)).is_none(), "40 MiB are too much");
        assert!(space.keep(reply(1)).is_some());
        drop(first);
        assert!(space.keep(reply(20)).is_some());
    }
}
