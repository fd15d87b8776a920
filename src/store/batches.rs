//! The contract for batches of runs. A batch exists once [`BatchRecords::accept_batch`] has committed it; lines without a batch
//! are those of a request that ended early, and are removed by it or later.

use futures_util::future::BoxFuture;
use jiff::Timestamp;

use crate::domain::batch::{Batch, BatchCounts, BatchId, BatchLine};
use crate::domain::run::RunId;
use crate::store::StoreError;

pub trait BatchRecords: Send + Sync + 'static {
    /// Adds lines to a batch that is not accepted yet.
    fn add_batch_lines(
        &self,
        batch: BatchId,
        lines: Vec<BatchLine>,
    ) -> BoxFuture<'_, Result<(), StoreError>>;

    /// Makes a batch of the lines that were added. Returns false if its idempotency key has accepted another.
    fn accept_batch(
        &self,
        batch: Batch,
        key: Option<BatchKey>,
    ) -> BoxFuture<'_, Result<bool, StoreError>>;

    /// Removes the lines that were added to a batch, unless it was accepted.
    fn remove_unaccepted_lines(&self, batch: BatchId) -> BoxFuture<'_, Result<(), StoreError>>;

    fn batch(&self, id: BatchId) -> BoxFuture<'_, Result<Option<Batch>, StoreError>>;

    /// The batch that an idempotency key has accepted, until the key expires.
    fn batch_with_key(&self, key: BatchKey) -> BoxFuture<'_, Result<Option<Batch>, StoreError>>;

    /// A page of batches, newest first.
    fn batches(&self, query: BatchQuery) -> BoxFuture<'_, Result<Vec<Batch>, StoreError>>;

    /// The batches that have lines without a result, oldest first.
    fn unfinished_batches(&self) -> BoxFuture<'_, Result<Vec<Batch>, StoreError>>;

    fn batch_counts(&self, id: BatchId) -> BoxFuture<'_, Result<BatchCounts, StoreError>>;

    /// Lines in their order.
    fn batch_lines(&self, query: LineQuery) -> BoxFuture<'_, Result<Vec<BatchLine>, StoreError>>;

    fn change_batch(
        &self,
        id: BatchId,
        change: BatchChange,
    ) -> BoxFuture<'_, Result<(), StoreError>>;

    /// A page of the batches that ended before this time and of which the store has no run, oldest first.
    fn unused_batches(
        &self,
        before: Timestamp,
        after: Option<BatchId>,
    ) -> BoxFuture<'_, Result<UnusedBatches, StoreError>>;

    /// Removes a part of a batch that ended before this time and of which the store has no run. Returns true if there is more
    /// of it.
    fn trim_batch(&self, id: BatchId, before: Timestamp)
    -> BoxFuture<'_, Result<bool, StoreError>>;

    /// Removes the lines of batches whose ids were made before this time and that were not accepted.
    fn trim_unaccepted_lines(&self, before: Timestamp) -> BoxFuture<'_, Result<(), StoreError>>;
}

/// Ended batches that one page of [`BatchRecords::unused_batches`] reads: the lines of each may be searched.
pub const PAGE_ENDED_BATCHES: usize = 16;
/// Lines that [`BatchRecords::trim_batch`] removes at once.
pub const MAX_TRIMMED_LINES: u32 = 1_000;

/// A page of batches that can be removed.
#[derive(Clone, Debug, Default)]
pub struct UnusedBatches {
    pub ids: Vec<BatchId>,
    /// The cursor of the next page; `None` if this is the last.
    pub next: Option<BatchId>,
}

/// An idempotency key; unique for an owner and an agent.
#[derive(Clone, Debug)]
pub struct BatchKey {
    pub owner: Option<String>,
    pub agent: String,
    pub key: String,
    pub expires_at: Timestamp,
}

#[derive(Clone, Debug)]
pub struct BatchQuery {
    /// Only batches of this key.
    pub owner: Option<String>,
    /// Only batches that were created before this one (the cursor).
    pub before: Option<BatchId>,
    pub limit: usize,
}

#[derive(Clone, Copy, Debug)]
pub struct LineQuery {
    pub batch: BatchId,
    /// The first line, counted from 0.
    pub from: u32,
    pub limit: usize,
    /// Only lines that have no result: no run, or one that has not ended.
    pub only_open: bool,
}

#[derive(Clone, Debug)]
pub enum BatchChange {
    /// A run has started for a line.
    Started { index: u32, run: RunId },
    /// No run can start for a line.
    Rejected { index: u32, problem: String },
    /// No more runs start. The first reason stays.
    Cancel { reason: String },
    /// Each line has its result.
    Finish { at: Timestamp },
}
