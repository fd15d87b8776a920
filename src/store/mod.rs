//! The store contract: runs, their steps and their events. Knows no engine, no agent and no HTTP.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use crate::domain::attachment::{Attachment, Blobs, Digest};
use crate::domain::content::Content;
use crate::domain::context::Compaction;
use crate::domain::event::{Event, StoredEvent};
use crate::domain::message::{AssistantMessage, Message, ToolResult};
use crate::domain::run::{Outcome, Run, RunId, Status, WaitingFor};
use crate::domain::usage::{TreeUsage, Usage};
use crate::domain::webhook::{DeliveryId, Webhook};
use crate::store::outbox::{AttemptRecord, Delivery, DueDeliveries, DueQuery, NewDelivery};
use crate::workdirs::file_id::FileId;

pub mod open;
pub mod outbox;
pub mod sqlite;

/// A child run, and the tool call that made it.
pub type ChildCall = (RunId, Option<String>);

/// Where runs are kept. Writes of one caller are committed in the order in which they were handed over.
pub trait RunStore: Send + Sync + 'static {
    /// Commits one write with its steps and events, all or nothing, and returns the number of its last event
    /// (0 without events). The bell given at opening rings after the commit.
    fn write(&self, write: Write) -> BoxFuture<'_, Result<u64, StoreError>>;

    /// Commits a write as [`RunStore::write`] does, and others with it in the same transaction, or none of them. One of the
    /// others that is about a run which has ended is left out.
    fn write_with(
        &self,
        write: Write,
        others: Vec<Write>,
    ) -> BoxFuture<'_, Result<u64, StoreError>>;

    /// Hands a write over without waiting for its commit. A failure is logged by the store, and so that no tree goes on
    /// over a gap, every later write of that tree fails too until [`RunStore::mend`].
    fn enqueue(&self, write: Write) -> BoxFuture<'_, Result<(), StoreError>>;

    /// Sets who is called with the root of each posted write that failed: once, by the owner of the runs.
    fn on_write_failed(&self, callback: WriteFailedFn);

    /// Takes writes of these trees again, which go on from what is committed.
    fn clear_failed(&self, roots: Vec<RunId>) -> BoxFuture<'_, Result<(), StoreError>>;

    /// One run, as committed. `tree` of a run that is not terminal is summed over what is committed below it.
    fn run(&self, id: RunId) -> BoxFuture<'_, Result<Option<Run>, StoreError>>;

    /// A page of runs, newest first. It ends early with the run that takes it to [`PAGE_BYTES`], and where the search has
    /// looked at as many runs as one page may cost.
    fn list(&self, filter: RunFilter) -> BoxFuture<'_, Result<RunPage, StoreError>>;

    /// Runs of a session, newest first. It ends early with the run that takes it to [`PAGE_BYTES`].
    fn session_runs(&self, query: SessionQuery) -> BoxFuture<'_, Result<Vec<Run>, StoreError>>;

    /// The run and all its descendants, in the order in which they were made, without their inputs and final texts, and of
    /// their tasks the first [`TASK_CHARS`] characters and one more: a tree may have thousands of runs.
    fn tree(&self, id: RunId) -> BoxFuture<'_, Result<Vec<Run>, StoreError>>;

    /// The direct children of a run, in the order in which they were made.
    fn children(&self, id: RunId) -> BoxFuture<'_, Result<Vec<Run>, StoreError>>;

    /// The direct children of a run with the tool calls that made them, in the order in which they were made.
    fn child_calls(&self, id: RunId) -> BoxFuture<'_, Result<Vec<ChildCall>, StoreError>>;

    /// What a run left in the record, in order.
    fn steps(&self, id: RunId) -> BoxFuture<'_, Result<Vec<Step>, StoreError>>;

    /// The bytes with these digests, as far as some run's record has them.
    fn blobs(&self, digests: Vec<Digest>) -> BoxFuture<'_, Result<Blobs, StoreError>>;

    /// Events after a number, in order.
    fn events(&self, query: EventQuery) -> BoxFuture<'_, Result<Vec<StoredEvent>, StoreError>>;

    /// Runs that are not terminal with what their continuation needs: parents before their children, oldest first.
    /// Their `tree` is summed as [`RunStore::run`] does.
    fn unfinished_runs(&self) -> BoxFuture<'_, Result<Vec<UnfinishedRun>, StoreError>>;

    /// What an idempotency key has accepted, as long as the key is kept.
    fn claimed_run(
        &self,
        key: IdempotencyKey,
    ) -> BoxFuture<'_, Result<Option<ClaimedRun>, StoreError>>;

    /// Webhook deliveries that are due, longest due first, and when the next one will be.
    fn due_deliveries(&self, query: DueQuery) -> BoxFuture<'_, Result<DueDeliveries, StoreError>>;

    /// Writes down a try of a delivery. One that is gone with its run stays gone.
    fn record_attempt(&self, record: AttemptRecord) -> BoxFuture<'_, Result<(), StoreError>>;

    /// The newest deliveries of a run, oldest of them first, at most [`outbox::MOST_LISTED`].
    fn deliveries(&self, run: RunId) -> BoxFuture<'_, Result<Vec<Delivery>, StoreError>>;

    /// Makes a delivery due now, whatever came of it before, and begins its day anew; false where the run has none such.
    fn resend(&self, run: RunId, id: DeliveryId) -> BoxFuture<'_, Result<bool, StoreError>>;

    /// Rings after every commit that made deliveries due. For one listener, who looks whenever it rings: a ring is kept
    /// while he is away, and several may become one.
    fn delivery_notify(&self) -> Arc<Notify>;

    /// Removes a root with its tree, its events, its deliveries and its idempotency keys; false where there is no such root.
    /// Nobody sees anything of it from then on. What is large goes in parts between which others write, over restarts too.
    fn delete(&self, root: RunId) -> BoxFuture<'_, Result<bool, StoreError>>;

    /// A page of ended roots that can go, oldest first. One with an unfinished run in its tree, or with a delivery that
    /// is still to be made, is left out.
    fn expired_roots(&self, query: ExpiredQuery) -> BoxFuture<'_, Result<ExpiredPage, StoreError>>;

    /// An ended root by its place among those in its state, counted from the newest; none where there are fewer.
    fn nth_newest_ended(
        &self,
        query: NthNewestQuery,
    ) -> BoxFuture<'_, Result<Option<RunId>, StoreError>>;

    /// Removes a few definitions that no run refers to, and gives a little of the space that nothing uses any more back
    /// to the file system; true where there may be more to do, also of deletions. Keeps some space for new runs.
    fn vacuum(&self) -> BoxFuture<'_, Result<bool, StoreError>>;

    /// Whether it can be written and read now.
    fn check(&self) -> BoxFuture<'_, Result<(), StoreError>>;

    /// How many transactions it has committed since it was opened.
    fn commit_count(&self) -> u64;

    /// Commits what was handed over and closes; later calls fail with [`StoreError::Closed`].
    fn close(&self) -> BoxFuture<'_, ()>;
}

/// Told of every committed write that had events, in the order of the commits, from the store's own thread: it must
/// not block.
pub type PublishFn = Box<dyn Fn(RunId, Vec<StoredEvent>) + Send + Sync>;

/// Called with the root of a posted write that failed, from the store's own thread: it must not block.
pub type WriteFailedFn = Box<dyn Fn(RunId) + Send + Sync>;

/// Asked before events are rendered for the bell: whether anyone listens to this root.
pub type HasSubscribersFn = Box<dyn Fn(RunId) -> bool + Send + Sync>;

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

/// A run that no process drives, with what its continuation needs.
#[derive(Clone, Debug)]
pub struct UnfinishedRun {
    /// Its record.
    pub run: Run,
    /// What else is known; none for a run that an older version accepted.
    pub resume_state: Option<ResumeState>,
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

/// Where a page of runs ends, in bytes of their texts: two hundred runs may each have megabytes, and many may ask.
pub const PAGE_BYTES: usize = 8 << 20;

/// Characters of a task that [`RunStore::tree`] shows.
pub const TASK_CHARS: usize = 2_048;

/// Which runs a page shows.
#[derive(Clone, Debug, Default)]
pub struct RunFilter {
    /// Only this agent's.
    pub agent: Option<String>,
    /// Only those that this key has accepted; none for all.
    pub owner: Option<String>,
    /// Only those that stand so.
    pub status: Option<Status>,
    /// Only this root's tree.
    pub root: Option<RunId>,
    /// Children too; otherwise (and without `root`) only roots.
    pub include_children: bool,
    /// Only those of this session.
    pub session: Option<String>,
    /// Only those with all of these labels.
    pub labels: Vec<(String, String)>,
    /// Only those accepted at this time or later.
    pub since: Option<Timestamp>,
    /// Only those accepted before this time.
    pub until: Option<Timestamp>,
    /// Only those made before this one (the cursor).
    pub before: Option<RunId>,
    /// At most so many.
    pub limit: usize,
}

/// A page of runs.
#[derive(Clone, Debug, Default)]
pub struct RunPage {
    /// Those that fit; fewer than wanted, or none, also where there are more.
    pub runs: Vec<Run>,
    /// [`RunFilter::before`] of the next page; none where nothing more fits.
    pub next: Option<RunId>,
}

/// Which runs of a session are wanted.
#[derive(Clone, Debug, Default)]
pub struct SessionQuery {
    /// The key that the session belongs to; none for those without.
    pub owner: Option<String>,
    /// Its name.
    pub name: String,
    /// Only this agent's.
    pub agent: Option<String>,
    /// Only those that stand so.
    pub status: Option<Status>,
    /// Only those made before this one (the cursor).
    pub before: Option<RunId>,
    /// At most so many.
    pub limit: usize,
}

/// Which events a page shows.
#[derive(Clone, Copy, Debug)]
pub struct EventQuery {
    /// The log: a root's.
    pub root: RunId,
    /// Of this run and its descendants; the root itself for the whole log.
    pub run: RunId,
    /// Leave the descendants out.
    pub exclude_descendants: bool,
    /// Only those with a greater number.
    pub after: u64,
    /// At most about so many (a page ends at a write's last event).
    pub limit: usize,
}

/// Which ended roots a page of [`RunStore::outlived`] shows.
#[derive(Clone, Copy, Debug)]
pub struct ExpiredQuery {
    /// How they ended.
    pub status: Status,
    /// How old they are.
    pub cutoff: Cutoff,
    /// Only those made after this one (the cursor).
    pub after: Option<RunId>,
}

/// Where what is old begins.
#[derive(Clone, Copy, Debug)]
pub enum Cutoff {
    /// Roots that ended before this time.
    EndedBefore(Timestamp),
    /// Roots that were made before this one.
    CreatedBefore(RunId),
}

/// A page of ended roots.
#[derive(Clone, Debug, Default)]
pub struct ExpiredPage {
    /// They can go.
    pub roots: Vec<RunId>,
    /// Where the next page begins; none where there is none.
    pub next: Option<RunId>,
}

/// Which ended root [`RunStore::newest_ended`] finds.
#[derive(Clone, Copy, Debug)]
pub struct NthNewestQuery {
    /// How it ended.
    pub status: Status,
    /// Only among those made before this one.
    pub before: Option<RunId>,
    /// How many newer ones there are among those. Takes time in proportion: at most some thousands.
    pub offset: usize,
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
