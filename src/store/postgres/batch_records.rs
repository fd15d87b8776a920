//! The contract for batches and schedules, by the jobs of the writer and the readers.

use futures_util::future::BoxFuture;
use jiff::Timestamp;

use crate::domain::batch::{Batch, BatchCounts, BatchId, BatchLine};
use crate::store::StoreError;
use crate::store::batches::{
    BatchChange, BatchKey, BatchQuery, BatchRecords, LineQuery, UnusedBatches,
};
use crate::store::postgres::{PostgresStore, batch_queries, schedules};
use crate::store::schedules::{ScheduleChange, ScheduleId, ScheduleRecord, ScheduleRecords};
use crate::store::write_queue::job::Task;

impl BatchRecords for PostgresStore {
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
        Box::pin(
            self.readers
                .read(move |db| Box::pin(async move { batch_queries::find(db, id).await })),
        )
    }

    fn batch_with_key(&self, key: BatchKey) -> BoxFuture<'_, Result<Option<Batch>, StoreError>> {
        Box::pin(
            self.readers.read(move |db| {
                Box::pin(async move { batch_queries::find_by_key(db, &key).await })
            }),
        )
    }

    fn batches(&self, query: BatchQuery) -> BoxFuture<'_, Result<Vec<Batch>, StoreError>> {
        Box::pin(
            self.readers
                .read(move |db| Box::pin(async move { batch_queries::list(db, &query).await })),
        )
    }

    fn unfinished_batches(&self) -> BoxFuture<'_, Result<Vec<Batch>, StoreError>> {
        Box::pin(
            self.readers
                .read(|db| Box::pin(batch_queries::unfinished(db))),
        )
    }

    fn batch_counts(&self, id: BatchId) -> BoxFuture<'_, Result<BatchCounts, StoreError>> {
        Box::pin(
            self.readers
                .read(move |db| Box::pin(async move { batch_queries::counts(db, id).await })),
        )
    }

    fn batch_lines(&self, query: LineQuery) -> BoxFuture<'_, Result<Vec<BatchLine>, StoreError>> {
        Box::pin(
            self.readers
                .read(move |db| Box::pin(async move { batch_queries::lines(db, query).await })),
        )
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
        Box::pin(self.readers.read(move |db| {
            Box::pin(async move { batch_queries::unused(db, before, after).await })
        }))
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

impl ScheduleRecords for PostgresStore {
    fn schedules(&self) -> BoxFuture<'_, Result<Vec<ScheduleRecord>, StoreError>> {
        Box::pin(self.readers.read(|db| Box::pin(schedules::list(db))))
    }

    fn change_schedule(
        &self,
        id: ScheduleId,
        change: ScheduleChange,
    ) -> BoxFuture<'_, Result<(), StoreError>> {
        self.queue.execute(Task::ChangeSchedule(id, change))
    }
}
