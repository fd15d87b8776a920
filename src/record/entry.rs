//! The entries of a run's record: every fact, once, as a type that is written and read.

use std::sync::Arc;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::domain::attachment::Attachment;
use crate::domain::content::Content;
use crate::domain::context::Compaction;
use crate::domain::event::{CalledTool, Decision, EventKind};
use crate::domain::message::{AssistantMessage, Message, ToolResult};
use crate::domain::server_question::ServerQuestions;
use crate::domain::usage::{CallLimit, TokenUsage};

/// An entry with the time of its write.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RecordedEntry {
    #[serde(
        rename = "at",
        with = "jiff::fmt::serde::timestamp::millisecond::required"
    )]
    pub time: Timestamp,
    /// Whether a fork has it from its source: it has no event, and nothing was used for it.
    #[serde(rename = "copied", default, skip_serializing_if = "std::ops::Not::not")]
    pub is_copied: bool,
    pub entry: Entry,
}

/// A fact of a run. The number of events of a kind never changes: see [`Entry::has_event`].
// Externally tagged: serde's other forms do not read raw JSON back as it was written.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Entry {
    /// A fact that its event shows whole.
    Event(EventKind),
    /// The assembled prompt: every run that sent a request to a model has one. Replaces an earlier one.
    Prompted {
        system: String,
        /// The user message.
        message: Content,
        /// Messages before it, oldest first.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        earlier: Vec<Message>,
        /// What requests omit of these messages.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        compaction: Option<Compaction>,
    },
    /// A reply of the model.
    Replied {
        /// Counts from 1.
        turn: u32,
        /// The reply as in the conversation, with unique call ids.
        message: AssistantMessage,
        report: ReplyReport,
    },
    /// A tool call has its result.
    CallCompleted {
        /// The turn whose reply made the call.
        turn: u32,
        /// The index of the call in that reply, from 0.
        position: u32,
        /// The name of the tool.
        tool: String,
        result: ToolResult,
        duration_ms: u64,
        /// The limits that had refused calls of this run, or of runs below it, before this result.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        refused_by: Vec<CallLimit>,
    },
    /// A call that needed approval is decided.
    CallDecided {
        call_id: String,
        decision: Decision,
        /// What the call is executed with instead of the model's arguments.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        arguments: Option<Arc<RawValue>>,
        /// Why, if a person gave a reason.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
        /// The name of the key that decided; `None` without keys.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        by: Option<String>,
    },
    /// The service of a call asks people; the call is made again with their answers, which begins it once more.
    CallSuspended {
        call_id: String,
        /// The number of the first of the questions among all of the call, from 1.
        first: u32,
        required: ServerQuestions,
    },
    /// A message was sent to the run.
    MessageAdded {
        /// Counts the messages that were added to the run, from 1.
        number: u32,
        content: Content,
        /// The name of the key that sent it; `None` without keys.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        by: Option<String>,
    },
    /// The conversation has all messages up to this number, from the request of this turn on.
    MessagesRead { turn: u32, last: u32 },
    /// A message to the model after a reply that did not end the run.
    Followup { content: String },
    /// The final reply is recorded, and the run's entry in its agent's memory is written next.
    Remembers {
        /// The time of the entry, unique among entries.
        at: Timestamp,
    },
    /// A summary of the oldest messages is requested next.
    Compacting,
    /// Later requests leave out some messages.
    Compacted {
        compaction: Compaction,
        /// Always [`EventKind::ContextCompacted`].
        event: EventKind,
    },
}

/// What is known of a reply beside its message.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ReplyReport {
    /// The model that replied, as the provider names it.
    pub model: String,
    /// Why the reply ended, in the provider's own word.
    pub stop_reason: Option<String>,
    pub tokens: TokenUsage,
    /// The calls of the reply, by the names of their tools.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<CalledTool>,
}

impl From<EventKind> for Entry {
    fn from(event: EventKind) -> Self {
        Self::Event(event)
    }
}

impl Entry {
    /// Whether the entry has an event, which takes a number of the tree's log.
    pub fn has_event(&self) -> bool {
        match self {
            Self::Event(_)
            | Self::Replied { .. }
            | Self::CallCompleted { .. }
            | Self::CallDecided { .. }
            | Self::MessageAdded { .. }
            | Self::Compacted { .. } => true,
            Self::Prompted { .. }
            | Self::CallSuspended { .. }
            | Self::MessagesRead { .. }
            | Self::Followup { .. }
            | Self::Remembers { .. }
            | Self::Compacting => false,
        }
    }

    /// Whether the conversation of the run has something of it.
    pub fn is_step(&self) -> bool {
        let has_nothing = matches!(
            self,
            Self::Event(_)
                | Self::CallSuspended { .. }
                | Self::CallDecided {
                    arguments: None,
                    ..
                }
        );
        !has_nothing
    }

    /// The pictures and files of the entry.
    pub fn attachments(&self) -> Vec<&Attachment> {
        match self {
            Self::Prompted {
                message, earlier, ..
            } => {
                let earlier = earlier.iter().flat_map(Message::attachments);
                message.attachments().chain(earlier).collect()
            }
            Self::CallCompleted { result, .. } => result.attachments.iter().collect(),
            Self::MessageAdded { content, .. } => content.attachments().collect(),
            _ => Vec::new(),
        }
    }
}

/// The entries that a conversation is made of, in order.
pub fn steps(entries: Vec<RecordedEntry>) -> Vec<Entry> {
    let entries = entries.into_iter().map(|it| it.entry);
    entries.filter(Entry::is_step).collect()
}

#[cfg(test)]
mod tests {
    use super::{Entry, RecordedEntry};

    /// What each kind is stored as. A change of these makes a database of the version before unreadable.
    const STORED: [&str; 12] = [
        r#"{"at":7,"entry":{"event":{"turn.started":{"turn":1,"messages":1,"results":0}}}}"#,
        r#"{"at":7,"entry":{"prompted":{"system":"s","message":"m"}}}"#,
        r#"{"at":7,"entry":{"replied":{"turn":1,"message":{"content":"c"},"report":{"model":"m","stop_reason":"end","tokens":{"input":1,"output":2,"cache_read":0,"cache_write":0,"reasoning":0}}}}}"#,
        r#"{"at":7,"entry":{"call_completed":{"turn":1,"position":0,"tool":"t","result":{"call_id":"c1","content":"r","is_error":false},"duration_ms":3}}}"#,
        r#"{"at":7,"entry":{"call_decided":{"call_id":"c1","decision":"approved","arguments":{"n": 1.0},"by":"ci"}}}"#,
        r#"{"at":7,"entry":{"call_suspended":{"call_id":"c1","first":1,"required":{"state":"s","questions":[{"key":"k","server":"m","text":"t","schema":{"n": 1.0}}]}}}}"#,
        r#"{"at":7,"entry":{"message_added":{"number":1,"content":"m"}}}"#,
        r#"{"at":7,"entry":{"messages_read":{"turn":1,"last":1}}}"#,
        r#"{"at":7,"copied":true,"entry":{"followup":{"content":"c"}}}"#,
        r#"{"at":7,"entry":{"remembers":{"at":"2026-01-02T03:04:05Z"}}}"#,
        r#"{"at":7,"entry":"compacting"}"#,
        r#"{"at":7,"entry":{"compacted":{"compaction":{"before":1,"task":null,"summary":"s","results_before":0},"event":{"context.compacted":{"turn":2,"strategy":"compact","from_turn":1,"to_turn":1,"messages":1,"results":0,"tokens_before":9,"tokens_after":1,"input_tokens":0,"output_tokens":0}}}}}"#,
    ];

    #[test]
    fn each_kind_is_written_as_it_is_read_and_keeps_its_count_of_events() {
        let counts = [1, 0, 1, 1, 1, 0, 1, 0, 0, 0, 0, 1];
        for (json, count) in STORED.into_iter().zip(counts) {
            let read: RecordedEntry = serde_json::from_str(json).expect("an entry");
            assert_eq!(serde_json::to_string(&read).expect("JSON"), json);
            assert_eq!(usize::from(read.entry.has_event()), count, "{json}");
            assert_eq!(read.entry.event().is_some(), read.entry.has_event());
        }
        let unknown = r#"{"at":7,"entry":{"strolled":{}}}"#;
        assert!(serde_json::from_str::<RecordedEntry>(unknown).is_err());
        let more = r#"{"at":7,"entry":{"followup":{"content":"c","later":1}}}"#;
        let read: RecordedEntry = serde_json::from_str(more).expect("unknown fields are ignored");
        assert!(matches!(read.entry, Entry::Followup { .. }));
    }
}
