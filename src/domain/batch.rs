//! Batches of runs: many requests that a client sends at once. Not to be confused with the batch service of a provider.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use jiff::Timestamp;
use schemars::JsonSchema;
use serde::{Serialize, Serializer};
use uuid::Uuid;

use crate::domain::run::RunId;

/// Lines of one batch.
pub const MAX_LINES: usize = 10_000;
/// The time in which all lines of a batch have to be recorded, from the making of its id on.
pub const MAX_RECORDING: Duration = Duration::from_secs(30 * 60);

/// `batch_` and a UUIDv7.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, JsonSchema)]
#[schemars(transparent)]
pub struct BatchId(#[schemars(with = "String", regex(pattern = "^batch_[0-9a-f-]{36}$"))] pub Uuid);

impl BatchId {
    pub fn new() -> Self {
        Self(RunId::new().0)
    }
}

impl Default for BatchId {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Display for BatchId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "batch_{}", self.0.as_hyphenated())
    }
}

impl fmt::Debug for BatchId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for BatchId {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let uuid = text.strip_prefix("batch_").filter(|rest| rest.len() == 36);
        Uuid::try_parse(uuid.ok_or(())?).map(Self).map_err(|_| ())
    }
}

impl Serialize for BatchId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A batch as it is recorded, without its lines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    pub id: BatchId,
    pub agent: String,
    /// The key that has sent it; `None` without keys.
    pub owner: Option<String>,
    pub lines: u64,
    pub created_at: Timestamp,
    /// When each line had its result; `None` until then.
    pub finished_at: Option<Timestamp>,
    /// Why it is to be cancelled.
    pub cancel_reason: Option<String>,
    /// SHA-256 of its body.
    pub body_hash: [u8; 32],
}

/// A line of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchLine {
    /// Counts from 0.
    pub index: u32,
    /// The request as JSON, until its run starts or a problem is known.
    pub body: Option<String>,
    pub run: Option<RunId>,
    /// Why no run started, as the JSON of a problem.
    pub problem: Option<String>,
}

/// How many lines have which state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct BatchCounts {
    /// No run has started yet.
    pub pending: u64,
    /// Runs in the queue.
    pub queued: u64,
    /// Runs at work.
    pub running: u64,
    /// Runs that wait for a person or a client.
    pub waiting: u64,
    /// Runs that are being cancelled.
    pub cancelling: u64,
    /// Runs that have completed.
    pub completed: u64,
    /// Runs that have failed.
    pub failed: u64,
    /// Runs that were cancelled, and lines that a cancel of the batch kept from starting.
    pub cancelled: u64,
    /// Lines that no run could start for.
    pub rejected: u64,
    /// Runs that were deleted.
    pub deleted: u64,
}
