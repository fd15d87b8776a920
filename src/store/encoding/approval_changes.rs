//! What events change of the tool calls that wait for approval. Callers encode it, so the writer thread does not have to.

use crate::domain::approval::ApprovalRequest;
use crate::domain::event::{Event, EventKind};

pub enum ApprovalChange {
    /// The event with this index in its write requests approval of a call.
    Requested {
        index: usize,
        call: String,
        /// JSON of an [`ApprovalRequest`].
        request: String,
    },
    /// The call is decided.
    Decided { call: String },
}

impl ApprovalChange {
    pub fn requested(index: usize, mut request: ApprovalRequest) -> Self {
        request.cut_arguments();
        Self::Requested {
            index,
            request: serde_json::to_string(&request).unwrap_or_default(),
            call: request.tool_call_id,
        }
    }
}

pub fn changes(events: &[Event]) -> Vec<ApprovalChange> {
    let change = |(index, event): (usize, &Event)| match &event.kind {
        EventKind::ApprovalRequested {
            tool_call_id,
            tool,
            arguments,
            arguments_hash,
            truncated,
            deadline,
            ..
        } => {
            let request = ApprovalRequest {
                tool_call_id: tool_call_id.clone(),
                tool: tool.clone(),
                arguments: arguments.clone(),
                arguments_hash: arguments_hash.clone(),
                truncated: *truncated,
                requested_at: event.time,
                deadline: *deadline,
            };
            Some(ApprovalChange::requested(index, request))
        }
        EventKind::ApprovalDecided { tool_call_id, .. } => Some(ApprovalChange::Decided {
            call: tool_call_id.clone(),
        }),
        _ => None,
    };
    events.iter().enumerate().filter_map(change).collect()
}
