//! The contract for turns. The reply of a turn is not recorded with it: the run's entries have it.

use std::sync::Arc;

use futures_util::future::BoxFuture;

use crate::domain::message::AssistantMessage;
use crate::domain::request_head::RequestHead;
use crate::domain::run::RunId;
use crate::record::entry::RecordedEntry;
use crate::store::StoreError;
use crate::store::turn_record::{TurnEntry, TurnRecord};

/// A request is stored whole at least this often; the others as differences from the one before.
pub const MAX_DIFFERENCES: u32 = 31;

/// A turn with its request and its reply.
#[derive(Clone, Debug)]
pub struct RecordedTurn {
    pub record: TurnRecord,
    /// The request that was answered, else the last one; `None` if requests were not recorded.
    pub request: Option<TurnRequest>,
    /// `None` if there is none.
    pub reply: Option<AssistantMessage>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TurnRequest {
    pub head: Arc<RequestHead>,
    /// As it was sent, unless the turn is redacted.
    pub body: Vec<u8>,
}

/// Turns are written with [`crate::store::Write::turns`], in the transaction of their reply or of their run's end.
pub trait TurnRecords: Send + Sync + 'static {
    /// The turns of a run, in order. Empty if an older version recorded the run.
    fn turns(&self, run: RunId) -> BoxFuture<'_, Result<Vec<TurnRecord>, StoreError>>;

    /// One turn; `None` if the run has no record of it.
    fn turn(
        &self,
        run: RunId,
        turn: u32,
    ) -> BoxFuture<'_, Result<Option<RecordedTurn>, StoreError>>;

    /// The turns of a run up to `last`, marked as copied, for the write that creates a copy of the run whose record begins
    /// with `entries`. They do not refer to the source, which may be deleted.
    fn copied_turns(
        &self,
        source: RunId,
        last: u32,
        entries: Vec<RecordedEntry>,
    ) -> BoxFuture<'_, Result<Vec<TurnEntry>, StoreError>>;
}
