//! What the record has of a tool call: the event of its start, and its result with the event of its end.

use std::time::Duration;

use crate::domain::event::EventKind;
use crate::domain::excerpt::{ArgumentsExcerpt, TextExcerpt};
use crate::domain::message::{ToolCall, ToolResult, shorten};
use crate::domain::usage::CallLimit;
use crate::store::Step;

/// The longest arguments and results in events; the run's messages have all of them.
const MAX_EVENT_BYTES: usize = 2 << 10;

pub fn started_event(turn: u32, call: &ToolCall) -> EventKind {
    let arguments = ArgumentsExcerpt::new(&call.arguments, MAX_EVENT_BYTES);
    EventKind::ToolStarted {
        turn,
        tool_call_id: call.id.clone(),
        tool: shorten(&call.name, 200),
        arguments: arguments.json,
        truncated: arguments.truncated,
    }
}

/// A call that has its result.
pub struct CompletedCall<'a> {
    position: usize,
    call: &'a ToolCall,
    result: &'a ToolResult,
    duration: Duration,
}

impl<'a> CompletedCall<'a> {
    pub fn new(
        position: usize,
        call: &'a ToolCall,
        result: &'a ToolResult,
        duration: Duration,
    ) -> Self {
        Self {
            position,
            call,
            result,
            duration,
        }
    }

    pub fn records(&self, turn: u32, refused_by: Vec<CallLimit>) -> (Step, EventKind) {
        let step = Step::Result {
            turn,
            position: u32::try_from(self.position).unwrap_or(u32::MAX),
            result: self.result.clone(),
            refused_by,
        };
        let excerpt = TextExcerpt::new(&self.result.content, MAX_EVENT_BYTES);
        let event = EventKind::ToolCompleted {
            turn,
            tool_call_id: self.call.id.clone(),
            tool: shorten(&self.call.name, 200),
            duration_ms: u64::try_from(self.duration.as_millis()).unwrap_or(u64::MAX),
            is_error: self.result.is_error,
            result: excerpt.text,
            truncated: excerpt.truncated,
        };
        (step, event)
    }
}
