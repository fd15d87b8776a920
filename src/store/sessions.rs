//! The contract for sessions. A session is the name that root runs share; it exists while a run has the name.

use futures_util::future::BoxFuture;
use jiff::Timestamp;

use crate::domain::run::RunId;
use crate::store::StoreError;

pub trait SessionIndex: Send + Sync + 'static {
    /// A page of a key's sessions, sorted by name.
    fn sessions(&self, query: SessionListQuery) -> BoxFuture<'_, Result<SessionPage, StoreError>>;

    /// Removes the name from all runs of a session: the runs stay. Of a long session several transactions each remove a
    /// part, oldest runs first. Returns false if there is no such session. The caller ensures that all its runs have ended
    /// and that no run enters it meanwhile.
    fn delete_session(
        &self,
        owner: Option<String>,
        name: String,
    ) -> BoxFuture<'_, Result<bool, StoreError>>;
}

#[derive(Clone, Debug, Default)]
pub struct SessionListQuery {
    /// The API key that the sessions belong to; `None` without keys.
    pub owner: Option<String>,
    /// Only sessions whose names sort after this one (the cursor).
    pub after: Option<String>,
    pub limit: usize,
}

#[derive(Clone, Debug, Default)]
pub struct SessionPage {
    pub sessions: Vec<SessionRecord>,
    /// [`SessionListQuery::after`] of the next page; `None` if there are no more sessions.
    pub next: Option<String>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct SessionRecord {
    pub name: String,
    /// The number of its runs.
    pub runs: u64,
    pub last_run: RunId,
    pub last_agent: String,
    /// When its first run was accepted, of those that are stored.
    pub created_at: Timestamp,
    /// When its last run ended or, if that has not ended, was accepted.
    pub updated_at: Timestamp,
}
