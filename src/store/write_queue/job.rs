//! The jobs of an engine's writer.

use std::thread::JoinHandle;

use jiff::Timestamp;
use tokio::sync::{mpsc, oneshot};

use crate::domain::batch::{Batch, BatchId, BatchLine};
use crate::domain::node::NodeId;
use crate::domain::run::RunId;
use crate::domain::webhook::DeliveryId;
use crate::store::StoreError;
use crate::store::batches::{BatchChange, BatchKey};
use crate::store::cluster::{DecidePermits, PermitChange};
use crate::store::encoding::encoded_write::EncodedWrite;
use crate::store::memories::{MemoryId, NewMemoryEntry};
use crate::store::outbox::AttemptRecord;
use crate::store::push_configs::PushConfig;
use crate::store::run_requests::RequestChange;
use crate::store::schedules::{ScheduleChange, ScheduleId};

pub type JobResult = Result<u64, StoreError>;

pub struct Job {
    pub task: Task,
    /// `None` for a fire-and-forget write.
    pub reply: Option<oneshot::Sender<JobResult>>,
}

#[expect(clippy::large_enum_variant, reason = "almost all tasks are writes")]
pub enum Task {
    /// Commits a write and returns the number of its last event.
    Write(EncodedWrite),
    /// Records an attempt to deliver to a webhook and returns 0.
    RecordAttempt(AttemptRecord),
    /// Makes a delivery of a run due now. Returns 1, or 0 if it does not exist.
    Resend(RunId, DeliveryId),
    /// Adds a configuration of push notifications to a root run. Returns 1, or 0 if it has too many.
    AddPushConfig(RunId, Box<PushConfig>),
    /// Removes a configuration with what is not delivered yet, and returns 0.
    DeletePushConfig(RunId, String),
    /// Removes a root with its tree; returns 1, or 0 if it does not exist. Of a large tree only a part is removed at
    /// once. The rest is hidden from readers and removed later.
    Delete(RunId),
    /// Removes the name of a session (owner and name) from a part of its runs, and returns a [`ForgetProgress`].
    ForgetSession(Option<String>, String),
    /// Removes a few unused definitions and returns a little unused space to the file system. Returns 1 if there may be
    /// more, else 0.
    Vacuum,
    /// Adds lines to a batch that is not accepted yet, and returns 0.
    AddBatchLines(BatchId, Vec<BatchLine>),
    /// Removes the lines of a batch that is not accepted, and returns 0.
    RemoveUnacceptedLines(BatchId),
    /// Makes a batch of its lines. Returns 1, or 0 if its key has accepted another.
    AcceptBatch(Box<Batch>, Option<BatchKey>),
    /// Changes a batch or one of its lines, and returns 0.
    ChangeBatch(BatchId, BatchChange),
    /// Removes a part of a batch that ended before this time and has no run. Returns 1 if there is more of it, else 0.
    TrimBatch(BatchId, Timestamp),
    /// Removes lines from before this time that belong to no batch, and returns 0.
    TrimUnacceptedLines(Timestamp),
    /// Changes the record of a schedule and returns 0.
    ChangeSchedule(ScheduleId, ScheduleChange),
    /// Adds an entry to a memory, unless there is one of its run, and returns the number of entries.
    AddToMemory(MemoryId, NewMemoryEntry),
    /// Removes all but the newest entries of a memory, and returns the number of entries.
    TrimMemory(MemoryId, usize),
    /// Removes a few sums of usage of days that ended before this time. Returns 1 if there may be more, else 0.
    TrimUsage(Timestamp),
    /// Accepts writes of these trees again after a failed fire-and-forget write, sends the roots of those that this node owns,
    /// and returns 0.
    ClearFailed(Vec<RunId>, mpsc::UnboundedSender<RunId>),
    /// Makes this node the owner of trees that nobody owns, at most so many, sends their roots, and returns their number.
    ClaimTrees(usize, mpsc::UnboundedSender<RunId>),
    /// Makes this node the owner of a tree whose labels no node has. Returns 1, or 0 if that is not so.
    ClaimUnserved(RunId),
    /// Leaves a tree of this node to nodes with these labels, and returns 0.
    HandOverTree(RunId, Vec<String>),
    /// Changes the requests to runs of other nodes, by this node. Returns 1, or 0 if nothing was to be changed.
    ChangeRequest(NodeId, RequestChange),
    /// Gives permits to trees, and returns their number.
    GivePermits(DecidePermits),
    /// Changes what a tree of this node has or waits for, and returns 0.
    ChangePermit(RunId, PermitChange),
    /// Gives a duty to this node, if its node is still this one, which is gone. Returns 1, or 0 if another was quicker.
    TakeDuty(&'static str, Option<NodeId>),
    /// Takes a duty from this node, if there is another node. Returns 1, or 0 if nothing was changed.
    HandOverDuty(&'static str),
    /// Writes to the database and returns 0.
    Check,
    /// Commits the queued writes, and ends after these reader threads have ended.
    Close(Vec<JoinHandle<()>>),
}

impl Task {
    /// Whether it makes deliveries due.
    pub fn has_deliveries(&self) -> bool {
        match self {
            Self::Write(write) => {
                let others = write.others.iter().map(|(other, _)| other);
                std::iter::once(write)
                    .chain(others)
                    .any(|write| !write.deliveries.is_empty())
            }
            Self::Resend(..) | Self::AddPushConfig(..) => true,
            _ => false,
        }
    }

    /// About how many bytes it writes.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Write(write) => write.bytes(),
            Self::AddBatchLines(_, lines) => {
                let bodies = lines.iter().filter_map(|line| line.body.as_ref());
                bodies.map(String::len).sum()
            }
            Self::AddToMemory(_, entry) => entry.text.len(),
            Self::Delete(_)
            | Self::ForgetSession(..)
            | Self::Vacuum
            | Self::TrimBatch(..)
            | Self::TrimUsage(_) => 64 << 10,
            Self::ChangeRequest(_, change) => change.bytes(),
            _ => 0,
        }
    }
}

/// The result of [`Task::ForgetSession`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForgetProgress {
    /// No run had the name.
    NotFound = 0,
    /// No run has the name any more.
    Done = 1,
    /// More runs have the name.
    More = 2,
}
