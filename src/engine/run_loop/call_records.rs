//! What the record has of a tool call: the event of its start, and its result.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};

use crate::domain::event::EventKind;
use crate::domain::excerpt::ArgumentsExcerpt;
use crate::domain::message::{ToolCall, ToolResult, shorten};
use crate::domain::usage::CallLimit;
use crate::record::entry::Entry;
use crate::record::event::MAX_CALL_BYTES;

/// The event of a start is this much later than the start, at most. Another node takes over a run after a longer time.
const MAX_START_DELAY: SignedDuration = SignedDuration::from_secs(1);

pub fn started(turn: u32, call: &ToolCall) -> EventKind {
    let arguments = match call.invalid_text() {
        Some(text) => ArgumentsExcerpt::of_text(text, MAX_CALL_BYTES),
        None => ArgumentsExcerpt::new(&call.arguments, MAX_CALL_BYTES),
    };
    EventKind::ToolStarted {
        turn,
        tool_call_id: call.id.clone(),
        tool: shorten(&call.name, 200),
        arguments: arguments.json,
        truncated: arguments.truncated,
    }
}

/// Whether a start in the record is that of an attempt at this time: a clock of another node may be behind.
pub fn is_start_of(attempt: Timestamp, recorded: Timestamp) -> bool {
    recorded >= attempt && recorded.duration_since(attempt) <= MAX_START_DELAY
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

    pub fn entry(&self, turn: u32, refused_by: Vec<CallLimit>) -> Entry {
        Entry::CallCompleted {
            turn,
            position: u32::try_from(self.position).unwrap_or(u32::MAX),
            tool: shorten(&self.call.name, 200),
            result: self.result.clone(),
            duration_ms: u64::try_from(self.duration.as_millis()).unwrap_or(u64::MAX),
            refused_by,
        }
    }
}

#[cfg(test)]
mod tests {
    use jiff::{SignedDuration, Timestamp};

    use super::is_start_of;

    #[test]
    fn the_start_of_another_node_is_not_ours() {
        let attempt: Timestamp = "2026-05-05T10:00:00Z".parse().expect("a time");
        let at = |milliseconds| attempt + SignedDuration::from_millis(milliseconds);
        assert!(is_start_of(attempt, at(0)) && is_start_of(attempt, at(300)));
        assert!(!is_start_of(attempt, at(-1)) && !is_start_of(attempt, at(12_000)));
    }
}
