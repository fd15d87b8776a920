//! The contract for lists of an agent's root runs by the time of their last change of status.

use futures_util::future::BoxFuture;
use jiff::Timestamp;

use crate::domain::run::{RunId, Status};
use crate::store::StoreError;

pub trait ChangedRuns: Send + Sync + 'static {
    /// A page of runs, last changed first.
    fn changed_runs(&self, query: ChangedQuery) -> BoxFuture<'_, Result<ChangedPage, StoreError>>;
}

/// A run with the time of its last change of status, which is its place in the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ChangedRun {
    pub at: Timestamp,
    pub run: RunId,
}

/// Conditions that are `None` match every run.
#[derive(Clone, Debug, Default)]
pub struct ChangedQuery {
    pub agent: String,
    pub owner: Option<String>,
    pub session: Option<String>,
    pub statuses: Vec<Status>,
    /// Of runs that wait: whether calls of theirs wait for approval.
    pub waits_for_approval: Option<bool>,
    pub since: Option<Timestamp>,
    /// Only runs after this one in the list (the cursor).
    pub after: Option<ChangedRun>,
    pub limit: usize,
}

#[derive(Clone, Debug, Default)]
pub struct ChangedPage {
    pub runs: Vec<ChangedRun>,
    pub has_more: bool,
    /// The number of runs that match, on all pages.
    pub total: u64,
}
