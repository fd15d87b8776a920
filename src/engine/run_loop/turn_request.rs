//! A turn's request and its reply. Only data.

use crate::domain::agent::model_ref::ModelRef;
use crate::domain::agent::params::Params;
use crate::domain::message::{Message, ToolSpec};
use crate::providers::Reply;
use crate::store::Progress;

pub struct TurnRequest<'a> {
    pub turn: u32,
    pub system: &'a str,
    pub messages: &'a [Message],
    pub tools: &'a [ToolSpec],
    pub params: &'a Params,
    /// Whether this is a turn of the run's own conversation. Only these are streamed to subscribers.
    pub is_turn: bool,
    /// See [`ChatRequest::is_prompt_reused`](crate::providers::ChatRequest::is_prompt_reused).
    pub is_prompt_reused: bool,
    /// See [`ChatRequest::conversation_id`](crate::providers::ChatRequest::conversation_id).
    pub conversation_id: &'a str,
    /// The run's progress before the request, to record what failed attempts use.
    pub progress: &'a Progress,
}

/// What is known of a reply that has not been recorded: what subscribers have been sent of it and what has not been withdrawn.
#[derive(Debug, Default)]
pub struct StreamedReply {
    /// The text: all that there is of an interrupted reply.
    pub text: String,
    pub has_reasoning: bool,
    /// Whether the record has a batch of the turn, from which a process that resumes the run reads its usage again.
    pub has_recorded_batch: bool,
}

impl StreamedReply {
    pub fn is_empty(&self) -> bool {
        self.text.is_empty() && !self.has_reasoning && !self.has_recorded_batch
    }
}

pub struct TurnReply {
    pub reply: Reply,
    /// The model that the request named; the reply may name another.
    pub requested_model: ModelRef,
}
