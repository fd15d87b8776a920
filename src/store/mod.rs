//! The store's contract: runs, their steps, their events and their webhook deliveries. This file has the values of a write
//! and the errors. The traits are in `runs`, `events`, `outbox` and `retention`; `run_store` has all of them as one.

use std::sync::Arc;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::domain::attachment::Attachment;
use crate::domain::content::Content;
use crate::domain::context::Compaction;
use crate::domain::event::Event;
use crate::domain::message::{AssistantMessage, Message, ToolResult};
use crate::domain::run::{Outcome, Run, RunId, WaitingFor};
use crate::domain::usage::{TreeUsage, Usage};
use crate::domain::webhook::{DeliveryId, Webhook};
use crate::workdirs::file_id::FileId;

pub mod events;
pub mod open;
pub mod outbox;
pub mod retention;
pub mod run_store;
pub mod runs;
pub mod sqlite;

/// A new run as it is accepted.
#[derive(Clone, Debug)]
pub struct NewRun {
    /// Its record.
    pub run: Arc<Run>,
    /// What another process needs to go on with it.
    pub resume_state: ResumeState,
    /// The idempotency key that accepts it, once.
    pub claim: Option<IdempotencyClaim>,
}

/// What a run needs to be continued by another process; clients never see it.
#[derive(Clone, Debug, PartialEq)]
pub struct ResumeState {
    /// The definition that it runs by, overrides applied, as the engine's JSON. Stored once for each content.
    pub definition: Arc<str>,
    /// When it must have ended, and the bound in whole seconds that set it; none while it waits for a slot.
    pub deadline: Option<(Timestamp, u64)>,
    /// Whole seconds that it may take from its start.
    pub timeout: u64,
    /// Whether its tree asks its providers for deltas.
    pub stream: bool,
    /// A root's: where its events are told.
    pub webhooks: Vec<Arc<Webhook>>,
    /// Since when it waits for a person's word, where it does: its time stands still from then on.
    pub waiting_since: Option<Timestamp>,
    /// The directory of its files, where it uses one; none for a run that an older version accepted.
    pub workdir: Option<FileId>,
}

/// What an idempotency key is known by.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct IdempotencyKey {
    /// The credential's name; empty without keys.
    pub credential: String,
    /// The route, such as `POST /agents/planner/runs`.
    pub route: String,
    /// The client's key.
    pub key: String,
}

/// An idempotency key with the body that it stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdempotencyClaim {
    /// The key.
    pub key: IdempotencyKey,
    /// SHA-256 of the request's content type and body.
    pub body_hash: [u8; 32],
    /// Until when it is kept. Expired ones are removed as new ones come.
    pub expires_at: Timestamp,
}

/// What a kept idempotency key has accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClaimedRun {
    /// The run.
    pub run: RunId,
    /// The body that it was accepted for.
    pub body_hash: [u8; 32],
}

/// One transaction's worth of change to one run.
#[derive(Debug)]
pub struct Write {
    /// The run.
    pub run: RunId,
    /// Its root, whose log gets the events.
    pub root: RunId,
    /// What changes in the run's record.
    pub change: Change,
    /// What is added to its steps. The bytes of pictures and files in them are stored with them, once for each digest.
    pub steps: Vec<Step>,
    /// What is added to its tree's log.
    pub events: Vec<Event>,
    /// What is told to webhooks once this is committed.
    pub deliveries: Vec<NewDelivery>,
}

/// A delivery that is committed with a write, due at once.
#[derive(Clone, Debug)]
pub struct NewDelivery {
    pub id: DeliveryId,
    pub webhook: Arc<Webhook>,
    /// The name of the event.
    pub event: &'static str,
    /// The body, the same in all attempts.
    pub body: String,
    /// When the event happened.
    pub created_at: Timestamp,
}

/// A change to a run's record.
#[derive(Debug)]
pub enum Change {
    /// A new record. Fails with [`StoreError::Claimed`] where its idempotency key has accepted a run before.
    Create(Box<NewRun>),
    /// It left the queue.
    Start {
        /// When.
        at: Timestamp,
        /// When it must have ended, and the bound in whole seconds that set it.
        deadline: (Timestamp, u64),
    },
    /// From now on it waits for a person's word. One that has been asked to stop stays `cancelling`.
    Pause {
        /// When its time began to stand still.
        since: Timestamp,
        /// For what.
        waiting_for: WaitingFor,
    },
    /// It waits no longer.
    Unpause {
        /// Its deadline, moved by the time it waited, with the bound in whole seconds that set it.
        deadline: (Timestamp, u64),
    },
    /// Another process goes on with it: one attempt more.
    Resume,
    /// Its record stays as it is; only steps and events are added.
    Unchanged,
    /// It is one reply further.
    Progress(Progress),
    /// It began a tool call: one more, whichever of those at work at once is written first.
    CountToolCall,
    /// It was asked to stop. Ignored (with its events) where the run is already terminal, or was asked before.
    RequestCancel {
        /// The reason given.
        reason: String,
    },
    /// It ended. Fails with [`StoreError::AlreadyTerminal`] where it had ended before: a terminal state is written once.
    Finish(Box<FinishedRun>),
}

/// How far a run is: totals, not differences.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    /// Replies received.
    pub turns: u32,
    /// The model that answered last.
    pub model: String,
    /// Why its reply ended.
    pub stop_reason: Option<String>,
    /// The run's own usage.
    pub usage: Usage,
}

/// A run's end.
#[derive(Clone, Debug)]
pub struct FinishedRun {
    /// How it ended.
    pub outcome: Outcome,
    /// When.
    pub finished_at: Timestamp,
    /// How far it came.
    pub progress: Progress,
    /// Whether the task of an unnamed agent's run was done; none for other runs.
    pub completion_status: Option<&'static str>,
    /// Usage of the run with all its descendants, all of which have ended.
    pub tree_usage: TreeUsage,
}

/// What a turn leaves in the record.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// The assembled prompt; the first step of every run that came to ask a model.
    Prompt {
        /// The system prompt.
        system: String,
        /// The user message.
        message: Content,
        /// What was said before it, oldest first.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        earlier: Vec<Message>,
    },
    /// A reply of the model.
    Reply {
        /// Counts from 1.
        turn: u32,
        /// The reply as it stands in the conversation, call ids already unique.
        message: AssistantMessage,
    },
    /// A tool call's result.
    Result {
        /// The turn whose reply made the call.
        turn: u32,
        /// The call's place in that reply, from 0.
        position: u32,
        /// The result.
        result: ToolResult,
    },
    /// The final reply is recorded, and the run's entry in its agent's memory is written next.
    Remembers {
        /// The time of the entry, which no other entry has.
        at: Timestamp,
    },
    /// What the model is told after its last reply, which was not the last word.
    Said {
        /// The text.
        content: String,
    },
    /// A summary of the oldest messages is requested next.
    Compacting,
    /// From here on requests leave out what this says.
    Compacted {
        /// All that they leave out.
        compaction: Compaction,
    },
}

impl Step {
    /// The pictures and files in it.
    pub fn attachments(&self) -> Vec<&Attachment> {
        match self {
            Self::Prompt {
                message, earlier, ..
            } => {
                let earlier = earlier.iter().flat_map(Message::attachments);
                message.attachments().chain(earlier).collect()
            }
            Self::Result { result, .. } => result.attachments.iter().collect(),
            Self::Reply { .. }
            | Self::Remembers { .. }
            | Self::Said { .. }
            | Self::Compacting
            | Self::Compacted { .. } => Vec::new(),
        }
    }
}

/// Why the store did not do it.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StoreError {
    /// It has been closed, or its writer has ended.
    #[error("the store is closed")]
    Closed,
    /// The run had already ended.
    #[error("{0} has already ended")]
    AlreadyTerminal(RunId),
    /// The idempotency key has accepted this run before.
    #[error("the idempotency key has accepted {} before", .0.run)]
    AlreadyClaimed(ClaimedRun),
    /// There is no such run to change.
    #[error("there is no {0} in the store")]
    RunNotFound(RunId),
    /// The data directory belongs to another process.
    #[error(
        "the data directory {dir} is in use by {holder}; stop it, or choose another directory with --data"
    )]
    Locked {
        /// The directory.
        dir: String,
        /// Who holds it, as far as it can be told.
        holder: String,
    },
    /// An earlier write of the tree failed: it stops, and goes on from its record once the store works.
    #[error("a write failed, and the store has not worked since")]
    Suspended,
    /// What is in the database cannot be what was written.
    #[error(
        "the database is damaged: {0}; axed data check shows what else is, and a backup or sqlite3's .recover mends it"
    )]
    Corrupt(String),
    /// There is no space left to write to.
    #[error(
        "the disk is full: nothing but deletions is taken until there is space again; delete runs, or other files"
    )]
    DiskFull,
    /// The engine beneath failed.
    #[error("the store failed: {0}")]
    Backend(String),
}

impl StoreError {
    /// Whether there would be none if the disk had space.
    pub fn may_be_disk_full(&self) -> bool {
        matches!(self, Self::DiskFull | Self::Backend(_))
    }
}
