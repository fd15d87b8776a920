//! The contract for batches, by the jobs of the writer and the readers.

use futures_util::future::BoxFuture;
use jiff::Timestamp;

use crate::domain::batch::{Batch, BatchCounts, BatchId, BatchLine};
use crate::store::StoreError;
use crate::store::batches::{
    BatchChange, BatchKey, BatchQuery, BatchRecords, LineQuery, UnusedBatches,
};
use crate::store::sqlite::{SqliteStore, batches};
use crate::store::write_queue::job::Task;

impl BatchRecords for SqliteStore {
    fn add_batch_lines(
        &self,
        batch: BatchId,
        lines: Vec<BatchLine>,
    ) -> BoxFuture<'_, Result<(), StoreError>> {
        self.queue.execute(Task::AddBatchLines(batch, lines))
    }

    fn accept_batch(
        &self,
        batch: Batch,
        key: Option<BatchKey>,
    ) -> BoxFuture<'_, Result<bool, StoreError>> {
        self.queue
            .is_positive(Task::AcceptBatch(Box::new(batch), key))
    }

    fn remove_unaccepted_lines(&self, batch: BatchId) -> BoxFuture<'_, Result<(), StoreError>> {
        self.queue.execute(Task::RemoveUnacceptedLines(batch))
    }

    fn batch(&self, id: BatchId) -> BoxFuture<'_, Result<Option<Batch>, StoreError>> {
        Box::pin(self.readers.read(move |db| batches::find(db, id)))
    }

    fn batch_with_key(&self, key: BatchKey) -> BoxFuture<'_, Result<Option<Batch>, StoreError>> {
        Box::pin(self.readers.read(move |db| batches::find_by_key(db, &key)))
    }

    fn batches(&self, query: BatchQuery) -> BoxFuture<'_, Result<Vec<Batch>, StoreError>> {
        Box::pin(self.readers.read(move |db| batches::list(db, &query)))
    }

    fn unfinished_batches(&self) -> BoxFuture<'_, Result<Vec<Batch>, StoreError>> {
        Box::pin(self.readers.read(batches::unfinished))
    }

    fn batch_counts(&self, id: BatchId) -> BoxFuture<'_, Result<BatchCounts, StoreError>> {
        Box::pin(self.readers.read(move |db| batches::counts(db, id)))
    }

    fn batch_lines(&self, query: LineQuery) -> BoxFuture<'_, Result<Vec<BatchLine>, StoreError>> {
        Box::pin(self.readers.read(move |db| batches::lines(db, query)))
    }

    fn change_batch(
        &self,
        id: BatchId,
        change: BatchChange,
    ) -> BoxFuture<'_, Result<(), StoreError>> {
        self.queue.execute(Task::ChangeBatch(id, change))
    }

    fn unused_batches(
        &self,
        before: Timestamp,
        after: Option<BatchId>,
    ) -> BoxFuture<'_, Result<UnusedBatches, StoreError>> {
        Box::pin(
            self.readers
                .read(move |db| batches::unused(db, before, after)),
        )
    }

    fn trim_batch(
        &self,
        id: BatchId,
        before: Timestamp,
    ) -> BoxFuture<'_, Result<bool, StoreError>> {
        self.queue.is_positive(Task::TrimBatch(id, before))
    }

    fn trim_unaccepted_lines(&self, before: Timestamp) -> BoxFuture<'_, Result<(), StoreError>> {
        self.queue.execute(Task::TrimUnacceptedLines(before))
    }
}
