//! The jobs of an engine's writer.

use std::thread::JoinHandle;

use jiff::Timestamp;
use tokio::sync::{mpsc, oneshot};

use crate::domain::node::NodeId;
use crate::domain::run::RunId;
use crate::store::StoreError;
use crate::store::changes::Changes;
use crate::store::cluster::{DecidePermits, PermitChange};
use crate::store::encoding::encoded_write::EncodedWrite;
use crate::store::run_requests::RequestChange;

pub type JobResult = Result<Reply, StoreError>;

/// What a job did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// See [`Task`].
    Number(u64),
    /// The number of rows that each statement of [`Task::Change`] changed.
    Changed(Vec<u64>),
}

pub struct Job {
    pub task: Task,
    /// `None` for a fire-and-forget write.
    pub reply: Option<oneshot::Sender<JobResult>>,
}

#[expect(clippy::large_enum_variant, reason = "almost all tasks are writes")]
pub enum Task {
    /// Commits a write and returns the number of its last event.
    Write(EncodedWrite),
    /// Executes statements.
    Change(Changes),
    /// Removes a root with its tree; returns 1, or 0 if it does not exist. Of a large tree only a part is removed at
    /// once. The rest is hidden from readers and removed later.
    Delete(RunId),
    /// Removes the name of a session (owner and name) from a part of its runs, and returns a [`ForgetProgress`].
    ForgetSession(Option<String>, String),
    /// Removes a few unused definitions and returns a little unused space to the file system. Returns 1 if there may be
    /// more, else 0.
    Vacuum,
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
            Self::Change(changes) => changes.makes_deliveries_due,
            _ => false,
        }
    }

    /// About how many bytes it writes.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Write(write) => write.bytes(),
            Self::Change(changes) => changes.bytes(),
            Self::Delete(_) | Self::ForgetSession(..) | Self::Vacuum | Self::TrimUsage(_) => {
                64 << 10
            }
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
