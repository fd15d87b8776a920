//! The contract for runs, turns and events, by the jobs of the writer and the readers.

use std::collections::HashSet;
use std::sync::Arc;

use futures_util::future::BoxFuture;

use crate::domain::attachment::{Blobs, Digest};
use crate::domain::event::StoredEvent;
use crate::domain::run::{Run, RunId};
use crate::store::events::{EventLog, EventQuery};
use crate::store::postgres::{PostgresStore, attachments, lists, queries, turns};
use crate::store::runs::{
    ChildCall, RunFilter, RunPage, RunRecords, SessionQuery, UnfinishedRun, WriteFailedFn,
};
use crate::store::turn_record::{TurnEntry, TurnRecord};
use crate::store::turns::{RecordedTurn, TurnRecords};
use crate::store::write_queue::job::Task;
use crate::store::{ClaimedRun, IdempotencyKey, Step, StoreError, Write};

impl RunRecords for PostgresStore {
    fn write(&self, write: Write) -> BoxFuture<'_, Result<u64, StoreError>> {
        self.queue.write(write)
    }

    fn write_with(
        &self,
        write: Write,
        others: Vec<Write>,
    ) -> BoxFuture<'_, Result<u64, StoreError>> {
        self.queue.write_with(write, others)
    }

    fn enqueue(&self, write: Write) -> BoxFuture<'_, Result<(), StoreError>> {
        self.queue.enqueue(write)
    }

    fn on_write_failed(&self, callback: WriteFailedFn) {
        self.queue.on_write_failed(callback);
    }

    fn clear_failed(&self, roots: Vec<RunId>) -> BoxFuture<'_, Result<HashSet<RunId>, StoreError>> {
        let task = |owned| Task::ClearFailed(roots, owned);
        Box::pin(async move { Ok(self.queue.roots(task).await?.into_iter().collect()) })
    }

    fn run(&self, id: RunId) -> BoxFuture<'_, Result<Option<Run>, StoreError>> {
        Box::pin(
            self.readers
                .read(move |db| Box::pin(async move { queries::run(db, id).await })),
        )
    }

    fn list(&self, filter: RunFilter) -> BoxFuture<'_, Result<RunPage, StoreError>> {
        Box::pin(
            self.readers
                .read_snapshot(move |db| Box::pin(async move { lists::list(db, &filter).await })),
        )
    }

    fn session_runs(&self, query: SessionQuery) -> BoxFuture<'_, Result<Vec<Run>, StoreError>> {
        Box::pin(self.readers.read_snapshot(move |db| {
            Box::pin(async move { lists::session_runs(db, &query).await })
        }))
    }

    fn tree(&self, id: RunId) -> BoxFuture<'_, Result<Vec<Run>, StoreError>> {
        Box::pin(
            self.readers
                .read(move |db| Box::pin(async move { queries::tree(db, id).await })),
        )
    }

    fn children(&self, id: RunId) -> BoxFuture<'_, Result<Vec<Run>, StoreError>> {
        Box::pin(
            self.readers
                .read(move |db| Box::pin(async move { queries::children(db, id).await })),
        )
    }

    fn child_calls(&self, id: RunId) -> BoxFuture<'_, Result<Vec<ChildCall>, StoreError>> {
        Box::pin(
            self.readers
                .read(move |db| Box::pin(async move { queries::child_calls(db, id).await })),
        )
    }

    fn is_held(&self, id: RunId) -> BoxFuture<'_, Result<bool, StoreError>> {
        Box::pin(
            self.readers
                .read(move |db| Box::pin(async move { queries::is_held(db, id).await })),
        )
    }

    fn steps(&self, id: RunId) -> BoxFuture<'_, Result<Vec<Step>, StoreError>> {
        Box::pin(
            self.readers
                .read(move |db| Box::pin(async move { queries::steps(db, id).await })),
        )
    }

    fn definition(&self, id: RunId) -> BoxFuture<'_, Result<Option<Arc<str>>, StoreError>> {
        Box::pin(
            self.readers
                .read(move |db| Box::pin(async move { queries::definition(db, id).await })),
        )
    }

    fn pinned_agents(&self, digest: Digest) -> BoxFuture<'_, Result<Option<Arc<str>>, StoreError>> {
        Box::pin(self.readers.read(move |db| {
            Box::pin(async move {
                let found = queries::definitions(db, vec![digest.0]).await?;
                Ok(found.into_values().next())
            })
        }))
    }

    fn blobs(&self, digests: Vec<Digest>) -> BoxFuture<'_, Result<Blobs, StoreError>> {
        Box::pin(
            self.readers
                .read(move |db| Box::pin(async move { attachments::read(db, &digests).await })),
        )
    }

    fn unfinished_runs(&self) -> BoxFuture<'_, Result<Vec<UnfinishedRun>, StoreError>> {
        Box::pin(
            self.readers
                .read_snapshot(|db| Box::pin(queries::unfinished_runs(db))),
        )
    }

    fn claimed_run(
        &self,
        key: IdempotencyKey,
    ) -> BoxFuture<'_, Result<Option<ClaimedRun>, StoreError>> {
        Box::pin(
            self.readers
                .read(move |db| Box::pin(async move { queries::claimed_run(db, &key).await })),
        )
    }
}

impl TurnRecords for PostgresStore {
    fn turns(&self, run: RunId) -> BoxFuture<'_, Result<Vec<TurnRecord>, StoreError>> {
        Box::pin(
            self.readers
                .read(move |db| Box::pin(async move { turns::turns(db, run).await })),
        )
    }

    fn turn(
        &self,
        run: RunId,
        turn: u32,
    ) -> BoxFuture<'_, Result<Option<RecordedTurn>, StoreError>> {
        Box::pin(
            self.readers
                .read_snapshot(move |db| Box::pin(async move { turns::turn(db, run, turn).await })),
        )
    }

    fn copied_turns(
        &self,
        source: RunId,
        last: u32,
        steps: Vec<Step>,
    ) -> BoxFuture<'_, Result<Vec<TurnEntry>, StoreError>> {
        Box::pin(self.readers.read_snapshot(move |db| {
            Box::pin(async move { turns::copied_turns(db, source, last, &steps).await })
        }))
    }
}

impl EventLog for PostgresStore {
    fn events(&self, query: EventQuery) -> BoxFuture<'_, Result<Vec<StoredEvent>, StoreError>> {
        Box::pin(
            self.readers
                .read(move |db| Box::pin(async move { queries::events(db, query).await })),
        )
    }
}
