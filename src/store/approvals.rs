//! The contract for tool calls that wait for approval. The store keeps them together with the events that request and
//! decide them.

use futures_util::future::BoxFuture;

use crate::domain::run::{PendingApproval, RunId};
use crate::store::StoreError;

/// Most calls that [`Run::pending_approvals`] has; the list has all.
///
/// [`Run::pending_approvals`]: crate::domain::run::Run::pending_approvals
pub const MAX_RUN_APPROVALS: usize = 100;

pub trait ApprovalIndex: Send + Sync + 'static {
    /// A page of the calls that wait for approval, by age of their runs.
    fn pending_approvals(
        &self,
        query: ApprovalQuery,
    ) -> BoxFuture<'_, Result<ApprovalPage, StoreError>>;
}

/// Selects the calls of a page. Conditions that are `None` match every call.
#[derive(Clone, Debug, Default)]
pub struct ApprovalQuery {
    /// The API key that has accepted the root.
    pub owner: Option<String>,
    /// Only calls of this root's tree.
    pub root: Option<RunId>,
    /// Only calls of runs that were created after this one (the cursor).
    pub after: Option<RunId>,
    /// The page ends with the run that reaches this number of calls.
    pub limit: usize,
}

#[derive(Clone, Debug, Default)]
pub struct ApprovalPage {
    pub approvals: Vec<PendingApproval>,
    /// [`ApprovalQuery::after`] of the next page; `None` if no more calls wait.
    pub next: Option<RunId>,
}
