//! The public event of an entry: a function of the entry, its time, and what all events of a run have.

use std::sync::Arc;

use jiff::Timestamp;

use crate::domain::event::{Event, EventKind};
use crate::domain::excerpt::{ArgumentsExcerpt, TextExcerpt};
use crate::domain::run::{Run, RunId};
use crate::record::entry::{Entry, RecordedEntry};

/// The longest arguments and results of calls in events; the run's messages have all of them.
pub const MAX_CALL_BYTES: usize = 2 << 10;
/// The longest messages and final texts in events, and the longest arguments that a person decides on.
pub const MAX_CONTENT_BYTES: usize = 16 << 10;

/// What all events of a run have.
#[derive(Clone, Debug)]
pub struct Origin {
    pub run_id: RunId,
    pub root_id: RunId,
    /// Levels of the run below the root.
    pub depth: u8,
    /// The name of the run's agent.
    pub agent: Arc<str>,
}

impl From<&Run> for Origin {
    fn from(run: &Run) -> Self {
        Self {
            run_id: run.id,
            root_id: run.root_id,
            depth: run.depth.0,
            agent: Arc::from(run.agent.as_str()),
        }
    }
}

impl Origin {
    pub fn event(&self, time: Timestamp, kind: EventKind) -> Event {
        Event {
            run_id: self.run_id,
            root_id: self.root_id,
            depth: self.depth,
            agent: Arc::clone(&self.agent),
            time,
            kind,
        }
    }

    /// The events of entries, in their order.
    pub fn events<'a>(
        &'a self,
        entries: &'a [RecordedEntry],
    ) -> impl Iterator<Item = Event> + use<'a> {
        let own = entries.iter().filter(|it| !it.is_copied);
        own.filter_map(|it| Some(self.event(it.time, it.entry.event()?)))
    }
}

impl Entry {
    /// `None` if it has none: see [`Entry::has_event`]. The beginnings of long texts are enough: see [`Entry::shown_bytes`].
    pub fn event(&self) -> Option<EventKind> {
        Some(match self {
            Entry::Event(kind) => kind.clone(),
            Entry::Replied {
                turn,
                message: _,
                report,
            } => EventKind::TurnCompleted {
                turn: *turn,
                model: report.model.clone(),
                stop_reason: report.stop_reason.clone(),
                input_tokens: report.tokens.input,
                output_tokens: report.tokens.output,
                cache_read_tokens: report.tokens.cache_read,
                cache_write_tokens: report.tokens.cache_write,
                reasoning_tokens: (report.tokens.reasoning > 0).then_some(report.tokens.reasoning),
                tool_calls: report.tool_calls.clone(),
            },
            Entry::CallCompleted {
                turn,
                tool,
                result,
                duration_ms,
                ..
            } => {
                let excerpt = TextExcerpt::new(&result.content, MAX_CALL_BYTES);
                EventKind::ToolCompleted {
                    turn: *turn,
                    tool_call_id: result.call_id.clone(),
                    tool: tool.clone(),
                    duration_ms: *duration_ms,
                    is_error: result.is_error,
                    result: excerpt.text,
                    truncated: excerpt.truncated,
                }
            }
            Entry::CallDecided {
                call_id,
                decision,
                arguments,
                reason,
                by,
            } => {
                let excerpt = arguments
                    .as_ref()
                    .map(|it| ArgumentsExcerpt::new(it, MAX_CONTENT_BYTES));
                EventKind::ApprovalDecided {
                    tool_call_id: call_id.clone(),
                    decision: *decision,
                    truncated: excerpt.as_ref().is_some_and(|excerpt| excerpt.truncated),
                    arguments: excerpt.map(|excerpt| excerpt.json),
                    reason: reason.clone(),
                    by: by.clone(),
                }
            }
            Entry::MessageAdded {
                number,
                content,
                by,
            } => {
                let excerpt = TextExcerpt::new(&content.to_plain_text(), MAX_CONTENT_BYTES);
                EventKind::MessageAdded {
                    number: *number,
                    content: excerpt.text,
                    truncated: excerpt.truncated,
                    by: by.clone(),
                }
            }
            Entry::Compacted { event, .. } => event.clone(),
            Entry::Prompted { .. }
            | Entry::MessagesRead { .. }
            | Entry::Followup { .. }
            | Entry::CallSuspended { .. }
            | Entry::Remembers { .. }
            | Entry::Compacting => return None,
        })
    }

    /// How much of each text the event needs, in bytes; `None` if nothing of the entry is long.
    pub fn shown_bytes(&self) -> Option<usize> {
        match self {
            Entry::Event(_) | Entry::CallDecided { .. } => None,
            Entry::MessageAdded { .. } => Some(MAX_CONTENT_BYTES),
            _ => Some(MAX_CALL_BYTES),
        }
    }
}
