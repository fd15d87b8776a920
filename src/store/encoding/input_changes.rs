//! What events change of the pending inputs of people. Callers encode it, so the writer thread does not have to.

use std::sync::Arc;

use serde_json::value::{RawValue, to_raw_value};

use crate::domain::event::{Event, EventKind};
use crate::domain::input::{ASK_PERSON, ArgumentsHash, InputKind, InputRequest, Question};
use crate::domain::world_event::wake_key;

pub enum InputChange {
    /// The event with this index in its write requests an input.
    Requested {
        index: usize,
        call: String,
        kind: InputKind,
        /// JSON of an [`InputRequest`].
        request: String,
        /// Of a wait for an event: see [`wake_key`].
        wake: Option<String>,
    },
    /// The input is answered.
    Decided { call: String },
}

impl InputChange {
    fn requested(
        index: usize,
        kind: InputKind,
        mut request: InputRequest,
        wake: Option<String>,
    ) -> Self {
        request.cut_arguments();
        Self::Requested {
            index,
            request: serde_json::to_string(&request).unwrap_or_default(),
            kind,
            wake,
            call: request.tool_call_id,
        }
    }
}

pub fn changes(events: &[Event]) -> Vec<InputChange> {
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
            let request = InputRequest {
                tool_call_id: tool_call_id.clone(),
                tool: tool.clone(),
                arguments: arguments.clone(),
                arguments_hash: arguments_hash.clone(),
                truncated: *truncated,
                requested_at: event.time,
                deadline: *deadline,
                question: None,
            };
            Some(InputChange::requested(
                index,
                InputKind::Approval,
                request,
                None,
            ))
        }
        EventKind::InputRequested {
            input_id,
            tool_call_id,
            question,
            schema,
            options,
            server,
            begun,
            deadline,
            ..
        } => {
            let question = Question {
                call_id: tool_call_id.clone(),
                text: question.clone(),
                schema: schema.clone(),
                options: options.clone(),
                server: server.clone(),
                begun: begun.clone(),
            };
            let arguments = Arc::from(RawValue::NULL.to_owned());
            let request = InputRequest {
                tool_call_id: input_id.clone(),
                tool: ASK_PERSON.to_owned(),
                arguments_hash: ArgumentsHash::compute(&arguments),
                arguments,
                truncated: false,
                requested_at: event.time,
                deadline: *deadline,
                question: Some(Box::new(question)),
            };
            Some(InputChange::requested(
                index,
                InputKind::Question,
                request,
                None,
            ))
        }
        EventKind::WaitStarted {
            tool_call_id,
            event: waited,
            until,
            ..
        } => {
            let arguments = to_raw_value(waited).unwrap_or_else(|_| RawValue::NULL.to_owned());
            let arguments = Arc::from(arguments);
            let request = InputRequest {
                tool_call_id: tool_call_id.clone(),
                tool: String::new(),
                arguments_hash: ArgumentsHash::compute(&arguments),
                arguments,
                truncated: false,
                requested_at: event.time,
                deadline: *until,
                question: None,
            };
            let kind = match waited {
                Some(_) => InputKind::Event,
                None => InputKind::Sleep,
            };
            let wake = waited.as_ref().map(|it| wake_key(&it.event, &it.key));
            Some(InputChange::requested(index, kind, request, wake))
        }
        EventKind::WaitEnded { tool_call_id, .. } => Some(InputChange::Decided {
            call: tool_call_id.clone(),
        }),
        EventKind::InputAnswered { input_id, .. } => Some(InputChange::Decided {
            call: input_id.clone(),
        }),
        EventKind::ApprovalDecided { tool_call_id, .. } => Some(InputChange::Decided {
            call: tool_call_id.clone(),
        }),
        _ => None,
    };
    events.iter().enumerate().filter_map(change).collect()
}
