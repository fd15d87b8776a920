//! The store's contract: runs, their steps, their events and their webhook deliveries. This file has the values of a write
//! and the errors. The traits are in `runs`, `events`, `inputs`, `batches`, `sessions`, `turns`, `outbox`,
//! `schedules`, `memories`, `usage` and `retention`; `run_store` has all of them as one.

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use crate::domain::period_budget::BudgetCharge;
use crate::domain::run::{Outcome, Run, RunId};
use crate::domain::usage::{ModelUsage, TreeUsage, Usage};
use crate::domain::waiting_for::WaitingFor;
use crate::domain::warning::RunWarning;
use crate::domain::webhook::{DeliveryId, Webhook};
use crate::record::entry::RecordedEntry;
use crate::record::event::Origin;
use crate::store::new_request::NewRequest;
use crate::store::turn_record::TurnEntry;
use crate::workdirs::file_id::FileId;

pub mod batches;
pub mod body_pieces;
pub mod changed_runs;
pub mod changes;
pub mod cluster;
pub mod due_walk;
pub mod duties;
pub mod encoding;
pub mod engine;
pub mod evals;
pub mod events;
pub mod inputs;
pub mod late_events;
pub mod leadership;
pub mod link_secret;
pub mod memories;
pub mod migrate;
pub mod new_request;
pub mod node_messages;
pub mod open;
pub mod outbox;
pub mod outbox_queries;
pub mod postgres;
pub mod push_configs;
pub mod reader;
pub mod request_delta;
pub mod retention;
pub mod rollouts;
pub mod row_changes;
pub mod run_lists;
pub mod run_queries;
pub mod run_records;
pub mod run_requests;
pub mod run_rows;
pub mod run_search;
pub mod run_store;
pub mod runs;
pub mod schedules;
pub mod score_sums;
pub mod scores;
pub mod sessions;
pub mod sql;
pub mod sqlite;
pub mod turn_queries;
pub mod turn_record;
pub mod turns;
pub mod usage;
pub mod usage_queries;
pub mod world_events;
pub mod write_queue;

/// A new run.
#[derive(Clone, Debug)]
pub struct NewRun {
    pub run: Arc<Run>,
    pub resume_state: ResumeState,
    /// The idempotency key that the run was requested with.
    pub claim: Option<IdempotencyClaim>,
    pub entry: QueueEntry,
    /// The labels that a node needs to drive the tree of this root.
    pub node_labels: Arc<[String]>,
    /// The definitions that this root's definition names by their digest. Stored once for each content.
    pub pinned_agents: Option<Arc<str>>,
}

/// How a root run enters the queue of all nodes that share the database; without effect if only one process uses it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueEntry {
    /// Whether it has a permit; else it waits for one.
    pub has_permit: bool,
    /// Fails with [`StoreError::SessionChanged`] if its session has unfinished runs other than these; `None` if it may have any.
    pub known_runs: Option<Vec<RunId>>,
    /// Requests to runs of other nodes that are committed with it: it takes their place in its session.
    pub requests: Vec<NewRequest>,
    /// Whether this node drives it; else one that can claims it.
    pub is_here: bool,
}

impl QueueEntry {
    /// A run that starts at once.
    pub const STARTED: Self = Self {
        has_permit: true,
        known_runs: None,
        requests: Vec::new(),
        is_here: true,
    };
}

/// What another process needs to resume a run; clients never see it.
#[derive(Clone, Debug, PartialEq)]
pub struct ResumeState {
    /// The agent's definition with overrides applied, as the engine's JSON. Stored once for each content.
    pub definition: Arc<str>,
    /// When the run must have ended, and the timeout in whole seconds that set it; `None` while the run is queued.
    pub deadline: Option<(Timestamp, u64)>,
    /// The timeout from its start, in whole seconds.
    pub timeout: u64,
    /// Whether its tree requests streamed replies from providers.
    pub stream: bool,
    /// Webhooks of a root; empty for other runs.
    pub webhooks: Vec<Arc<Webhook>>,
    /// Since when the run waits; its deadline is paused from then on.
    pub waiting_since: Option<Timestamp>,
    /// Whether a client has paused it.
    pub is_held: bool,
    /// The directory of its files; also `None` if an older version accepted the run.
    pub workdir: Option<FileId>,
}

/// An idempotency key is unique for a credential and a route.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct IdempotencyKey {
    /// The name of the API key; empty without keys.
    pub credential: String,
    /// The route, such as `POST /agents/planner/runs`.
    pub route: String,
    pub key: String,
}

/// An idempotency key with the request that it was used for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdempotencyClaim {
    pub key: IdempotencyKey,
    /// SHA-256 of the request's content type and body.
    pub body_hash: [u8; 32],
    /// Expired keys are removed when new ones are inserted.
    pub expires_at: Timestamp,
}

/// How long the idempotency key of a start by this program itself is kept, unless its run is deleted before.
const OWN_CLAIM_RETENTION: SignedDuration = SignedDuration::from_hours(400 * 24);

impl IdempotencyClaim {
    /// Of a start by this program itself. No route of a client begins with a word that is no method.
    pub fn own(route: String, key: String, now: Timestamp) -> Self {
        Self {
            key: IdempotencyKey {
                credential: String::new(),
                route,
                key,
            },
            body_hash: [0; 32],
            expires_at: now
                .checked_add(OWN_CLAIM_RETENTION)
                .unwrap_or(Timestamp::MAX),
        }
    }
}

/// The run that an idempotency key has accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClaimedRun {
    pub run: RunId,
    /// See [`IdempotencyClaim::body_hash`].
    pub body_hash: [u8; 32],
    /// See [`RequestClaim::number`]; `None` if the request started the run.
    #[serde(rename = "message")]
    pub number: Option<u32>,
}

/// The idempotency key of a request that continued a run.
#[derive(Debug)]
pub struct RequestClaim {
    pub claim: IdempotencyClaim,
    /// What the request gave the run: the number of its message, or the turn whose calls it had results for; 0 if it decided on calls.
    pub number: u32,
}

/// A message that is added to an unfinished run.
#[derive(Debug)]
pub struct NewMessage {
    /// Counts the messages of the run from 1.
    pub number: u32,
    /// The idempotency key that it was sent with.
    pub claim: Option<IdempotencyClaim>,
}

/// What one transaction changes of one run.
#[derive(Debug)]
pub struct Write {
    /// The run, and its root: the events are added to the log of that tree.
    pub origin: Origin,
    pub change: Change,
    /// Entries to add. The bytes of their pictures and files are stored once for each digest.
    pub entries: Vec<RecordedEntry>,
    /// Webhook deliveries to make after the commit.
    pub deliveries: Vec<NewDelivery>,
    /// All warnings of the run, if there are new ones.
    pub warnings: Option<Vec<RunWarning>>,
    /// Turns to add, in order.
    pub turns: Vec<TurnEntry>,
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
    /// The alert of a budget that it reports: it is made only if this write is the first that records the alert.
    pub alert: Option<BudgetAlertId>,
}

/// A share of a budget that was reached in a period.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BudgetAlertId {
    pub budget: String,
    /// Its first quarter hour, counted from 1970.
    pub period_start: i64,
    /// In thousandths.
    pub share: u32,
}

/// A change to a run's record.
#[derive(Debug)]
pub enum Change {
    /// Inserts a run. Fails with [`StoreError::AlreadyClaimed`] if its idempotency key has accepted a run before.
    Create(Box<NewRun>),
    /// The run leaves the queue.
    Start {
        at: Timestamp,
        /// See [`ResumeState::deadline`].
        deadline: (Timestamp, u64),
    },
    /// The run waits, or waits for something else. The status of a run that is being cancelled stays `cancelling`.
    Pause {
        /// When its deadline was paused, if it was not yet.
        since: Timestamp,
        waiting_for: WaitingFor,
    },
    /// The run does not wait any more.
    Unpause {
        /// See [`ResumeState::deadline`]; moved by the time that the run was paused.
        deadline: (Timestamp, u64),
    },
    /// Another process resumes the run: increments its attempts.
    Resume,
    /// Only entries are added.
    Unchanged,
    /// As `Unchanged`, for a request with an idempotency key. Fails with [`StoreError::AlreadyClaimed`] if an earlier request had it.
    Claim(Box<RequestClaim>),
    Progress(Progress),
    /// Increments the number of tool calls; concurrent calls may be written in any order.
    CountToolCall,
    /// The run, and all below it, stop at their next step. Ignored, with its events, if it is held already; fails with
    /// [`StoreError::AlreadyTerminal`] if it has ended or is being cancelled.
    Hold,
    /// The run continues. Ignored, with its events, if it is not held; fails as [`Change::Hold`] does.
    Release,
    /// The run is to be cancelled. Ignored, with its events, if the run has ended or its cancel was requested before.
    RequestCancel {
        reason: String,
    },
    /// A message is added to the run. Fails with [`StoreError::AlreadyTerminal`] if the run has ended or is being
    /// cancelled, and with [`StoreError::MessagesChanged`] if its number is not the next one.
    AddMessage(Box<NewMessage>),
    /// The run has ended. Fails with [`StoreError::MessagesChanged`] if it has other messages than the writer knows, and
    /// with [`StoreError::AlreadyTerminal`] if it had ended before: a final status is written once.
    Finish(Box<FinishedRun>),
}

impl Change {
    /// The change by a request that adds only entries. `number` is [`RequestClaim::number`].
    pub fn by_request(claim: Option<IdempotencyClaim>, number: u32) -> Self {
        match claim {
            Some(claim) => Self::Claim(Box::new(RequestClaim { claim, number })),
            None => Self::Unchanged,
        }
    }

    /// The idempotency key of the request that continued the run with this change, and what it gave the run.
    pub fn request_claim(&self) -> Option<(&IdempotencyClaim, u32)> {
        match self {
            Self::AddMessage(message) => Some((message.claim.as_ref()?, message.number)),
            Self::Claim(request) => Some((&request.claim, request.number)),
            _ => None,
        }
    }
}

/// The progress of a run: totals, not differences.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    /// Replies received.
    pub turns: u32,
    /// The model of the last reply; before it, of a request that failed and used tokens.
    pub model: String,
    /// Why the last reply ended.
    pub stop_reason: Option<String>,
    /// Without that of descendants.
    pub usage: Usage,
    /// The same by model, without tool calls; empty if all of it is that of `model`, without reasoning tokens.
    pub models: Vec<ModelUsage>,
    /// What the write adds to budgets over time.
    pub charges: Vec<BudgetCharge>,
}

#[derive(Clone, Debug)]
pub struct FinishedRun {
    pub outcome: Outcome,
    pub finished_at: Timestamp,
    pub progress: Progress,
    /// Whether an ad-hoc sub-agent has completed its task; `None` for other runs.
    pub completion_status: Option<&'static str>,
    /// Usage of the run with all its descendants, all of which have ended.
    pub tree_usage: TreeUsage,
    /// How many messages were added to it; `None` if the writer does not know.
    pub messages: Option<u32>,
    /// The scorers that are to score it.
    pub scorers: Vec<String>,
}

#[derive(Clone, Debug, thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StoreError {
    /// The store was closed, or its writer thread has ended.
    #[error("the store is closed")]
    Closed,
    #[error("{0} has already ended")]
    AlreadyTerminal(RunId),
    /// The run has more or fewer messages than the writer assumes.
    #[error("{0} has got other messages meanwhile")]
    MessagesChanged(RunId),
    #[error("the idempotency key has accepted {} before", .0.run)]
    AlreadyClaimed(ClaimedRun),
    /// The run to change does not exist.
    #[error("there is no {0} in the store")]
    RunNotFound(RunId),
    /// The run does not come after the last one of its session, or that has not ended.
    #[error("another node has accepted a run of the session meanwhile; try again")]
    SessionChanged,
    /// The run to fork was deleted in the meantime.
    #[error("{0} was deleted")]
    SourceDeleted(RunId),
    /// The database is one of another program, or of a newer version.
    #[error("{0}")]
    Unusable(String),
    /// The data directory belongs to another process.
    #[error(
        "the data directory {dir} is in use by {holder}; stop it, or choose another directory with --data"
    )]
    Locked {
        dir: String,
        /// The name of the process that holds the lock, if known.
        holder: String,
    },
    /// An earlier write of the tree failed. The tree stops, and resumes from its record when the store works.
    #[error("a write failed, and the store has not worked since")]
    Suspended,
    /// Other nodes have taken over the trees of this one: they end here as they do if the store fails.
    #[error(
        "this node showed no sign of life, and other nodes have taken over its runs; it joins again"
    )]
    Fenced,
    /// No node that drives the run has taken the request.
    #[error("no node has taken the request to {0} in time, and nothing has happened; try again")]
    NotTaken(RunId),
    /// Many requests of the same owner to runs of other nodes wait for their answers.
    #[error(
        "too many requests of this key to runs of other nodes, such as {0}, wait for their answers; nothing has happened, try again"
    )]
    TooManyRequests(RunId),
    /// A node has taken the request and has not answered.
    #[error(
        "the node that drives {0} has not said in time whether it has done this; look at the run"
    )]
    Unanswered(RunId),
    /// The database does not contain what was written.
    #[error(
        "the database is damaged: {0}; axed data check (PostgreSQL: pg_amcheck) shows what else is, and a backup or sqlite3's .recover mends it"
    )]
    Corrupt(String),
    /// SQLite calls the file damaged, also when it reads again. It does so as well if the disk fails a read.
    #[error(
        "the database is damaged, or its disk fails: {0}; axed data check shows what else is damaged, and a backup or sqlite3's .recover mends it"
    )]
    Malformed(String),
    #[error(
        "the disk is full: nothing but deletions is taken until there is space again; delete runs, or other files"
    )]
    DiskFull,
    #[error("there is no database {0}; --data names the data directory")]
    NoDatabase(String),
    /// The storage engine works, and has refused what was to be written.
    #[error("the store failed: {0}")]
    Refused(String),
    /// The storage engine failed.
    #[error("the store failed: {0}")]
    Backend(String),
}

impl StoreError {
    /// Whether the write may be in the record nevertheless: its commit may have succeeded although its answer was lost.
    pub fn may_be_recorded(&self) -> bool {
        matches!(self, Self::Backend(_) | Self::Refused(_))
    }

    /// Whether what was read is not what was written, as far as one read shows.
    pub fn is_damage(&self) -> bool {
        matches!(self, Self::Corrupt(_) | Self::Malformed(_))
    }

    /// Whether a full disk may be the cause.
    pub fn may_be_disk_full(&self) -> bool {
        matches!(self, Self::DiskFull | Self::Backend(_) | Self::Refused(_))
    }
}
