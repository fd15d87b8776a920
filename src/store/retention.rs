//! The contract for removing runs, and for finding the ones that are old.

use futures_util::future::BoxFuture;
use jiff::Timestamp;

use crate::domain::run::{RunId, Status};
use crate::store::StoreError;

pub trait RunRetention: Send + Sync + 'static {
    /// Removes a root with its tree, its events, its deliveries and its idempotency keys. Returns false if there is no such
    /// root. The tree is hidden at once. A large one is removed in parts, between other writes and across restarts.
    fn delete(&self, root: RunId) -> BoxFuture<'_, Result<bool, StoreError>>;

    /// A page of ended roots that can be deleted, oldest first. A root with an unfinished run in its tree, or with a pending
    /// delivery, is left out.
    fn expired_roots(&self, query: ExpiredQuery) -> BoxFuture<'_, Result<ExpiredPage, StoreError>>;

    /// The ended root with a given number of newer ones; `None` if there are fewer.
    fn nth_newest_ended(
        &self,
        query: NthNewestQuery,
    ) -> BoxFuture<'_, Result<Option<RunId>, StoreError>>;

    /// Removes a few definitions that no run uses, and returns a little unused space to the file system, except for some that
    /// new runs will use. Returns true if there may be more to do, including deletions.
    fn vacuum(&self) -> BoxFuture<'_, Result<bool, StoreError>>;
}

/// Selects a page of [`RunRetention::expired_roots`].
#[derive(Clone, Copy, Debug)]
pub struct ExpiredQuery {
    pub status: Status,
    pub cutoff: Cutoff,
    /// Only roots that were created after this one (the cursor).
    pub after: Option<RunId>,
}

/// Which roots are old.
#[derive(Clone, Copy, Debug)]
pub enum Cutoff {
    EndedBefore(Timestamp),
    CreatedBefore(RunId),
}

/// A page of ended roots.
#[derive(Clone, Debug, Default)]
pub struct ExpiredPage {
    pub roots: Vec<RunId>,
    /// [`ExpiredQuery::after`] of the next page; `None` if this is the last.
    pub next: Option<RunId>,
}

/// Selects the root of [`RunRetention::nth_newest_ended`].
#[derive(Clone, Copy, Debug)]
pub struct NthNewestQuery {
    pub status: Status,
    /// Only roots that were created before this one.
    pub before: Option<RunId>,
    /// The number of newer roots. The cost grows with it; at most some thousands.
    pub offset: usize,
}
