//! The contract for deliveries and their receivers, by the jobs of the writer and the readers.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use tokio::sync::Notify;

use crate::domain::run::RunId;
use crate::domain::webhook::DeliveryId;
use crate::store::StoreError;
use crate::store::outbox::{AttemptRecord, Delivery, DueDeliveries, DueQuery, Outbox};
use crate::store::postgres::{PostgresStore, outbox_queries, push_configs};
use crate::store::push_configs::{PushConfig, PushConfigs};
use crate::store::write_queue::job::Task;

impl Outbox for PostgresStore {
    fn due_deliveries(&self, query: DueQuery) -> BoxFuture<'_, Result<DueDeliveries, StoreError>> {
        Box::pin(self.readers.read_snapshot(move |db| {
            Box::pin(async move { outbox_queries::due_deliveries(db, &query).await })
        }))
    }

    fn record_attempt(&self, record: AttemptRecord) -> BoxFuture<'_, Result<(), StoreError>> {
        self.queue.execute(Task::RecordAttempt(record))
    }

    fn deliveries(&self, run: RunId) -> BoxFuture<'_, Result<Vec<Delivery>, StoreError>> {
        Box::pin(
            self.readers
                .read(move |db| Box::pin(async move { outbox_queries::deliveries(db, run).await })),
        )
    }

    fn resend(&self, run: RunId, id: DeliveryId) -> BoxFuture<'_, Result<bool, StoreError>> {
        self.queue.is_positive(Task::Resend(run, id))
    }

    fn delivery_notify(&self) -> Arc<Notify> {
        self.queue.delivery_notify()
    }
}

impl PushConfigs for PostgresStore {
    fn push_configs(&self, run: RunId) -> BoxFuture<'_, Result<Vec<PushConfig>, StoreError>> {
        Box::pin(
            self.readers
                .read(move |db| Box::pin(async move { push_configs::list(db, run).await })),
        )
    }

    fn add_push_config(
        &self,
        run: RunId,
        config: PushConfig,
    ) -> BoxFuture<'_, Result<bool, StoreError>> {
        self.queue
            .is_positive(Task::AddPushConfig(run, Box::new(config)))
    }

    fn delete_push_config(&self, run: RunId, id: String) -> BoxFuture<'_, Result<(), StoreError>> {
        self.queue.execute(Task::DeletePushConfig(run, id))
    }
}
