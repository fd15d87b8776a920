//! Writes, reads and lists runs and their events.

use std::collections::HashSet;
use std::sync::Arc;

use futures_util::future::BoxFuture;

use crate::domain::attachment::{Blobs, Digest};
use crate::domain::event::StoredEvent;
use crate::domain::run::{Run, RunId, Status};
use crate::domain::run_ref::IdPart;
use crate::record::entry::RecordedEntry;
use crate::store::engine::Engine;
use crate::store::events::{EventLog, EventQuery};
use crate::store::reader::ReadMode;
use crate::store::runs::{
    ChildCall, RunFilter, RunPage, RunRecords, SessionQuery, SleepingTree, StatusCount,
    UnfinishedRun, WriteFailedFn,
};
use crate::store::write_queue::job::Task;
use crate::store::{
    ClaimedRun, IdempotencyKey, StoreError, Write, run_lists, run_queries, run_search,
};

impl<E: Engine> RunRecords for E {
    fn write(&self, write: Write) -> BoxFuture<'_, Result<u64, StoreError>> {
        self.queue().write(write)
    }

    fn write_with(
        &self,
        write: Write,
        others: Vec<Write>,
    ) -> BoxFuture<'_, Result<u64, StoreError>> {
        self.queue().write_with(write, others)
    }

    fn enqueue(&self, write: Write) -> BoxFuture<'_, Result<(), StoreError>> {
        self.queue().enqueue(write)
    }

    fn on_write_failed(&self, callback: WriteFailedFn) {
        self.queue().on_write_failed(callback);
    }

    fn clear_failed(&self, roots: Vec<RunId>) -> BoxFuture<'_, Result<HashSet<RunId>, StoreError>> {
        let task = |owned| Task::ClearFailed(roots, owned);
        Box::pin(async move { Ok(self.queue().roots(task).await?.into_iter().collect()) })
    }

    fn run(&self, id: RunId) -> BoxFuture<'_, Result<Option<Run>, StoreError>> {
        self.read(ReadMode::Statement, move |db| {
            Box::pin(run_queries::run(db, id))
        })
    }

    fn list(&self, filter: RunFilter) -> BoxFuture<'_, Result<RunPage, StoreError>> {
        if filter.compares_rows() {
            return Box::pin(run_search::list(self, filter));
        }
        self.read_list(ReadMode::Snapshot, move |db| {
            Box::pin(async move { run_lists::list(db, &filter).await })
        })
    }

    fn count(
        &self,
        filter: RunFilter,
        statuses: Vec<Status>,
    ) -> BoxFuture<'_, Result<Vec<StatusCount>, StoreError>> {
        self.read(ReadMode::Long, move |db| {
            Box::pin(async move { run_lists::count(db, filter, &statuses).await })
        })
    }

    fn session_runs(&self, query: SessionQuery) -> BoxFuture<'_, Result<Vec<Run>, StoreError>> {
        self.read_list(ReadMode::Snapshot, move |db| {
            Box::pin(async move { run_lists::session_runs(db, &query).await })
        })
    }

    fn runs_named(
        &self,
        part: IdPart,
        owner: Option<String>,
        limit: usize,
    ) -> BoxFuture<'_, Result<Vec<RunId>, StoreError>> {
        self.read(ReadMode::Long, move |db| {
            Box::pin(async move { run_lists::runs_named(db, &part, owner.as_deref(), limit).await })
        })
    }

    fn tree(&self, id: RunId) -> BoxFuture<'_, Result<Vec<Run>, StoreError>> {
        self.read(ReadMode::Statement, move |db| {
            Box::pin(run_queries::tree(db, id))
        })
    }

    fn children(&self, id: RunId) -> BoxFuture<'_, Result<Vec<Run>, StoreError>> {
        self.read(ReadMode::Statement, move |db| {
            Box::pin(run_queries::children(db, id))
        })
    }

    fn child_calls(&self, id: RunId) -> BoxFuture<'_, Result<Vec<ChildCall>, StoreError>> {
        self.read(ReadMode::Statement, move |db| {
            Box::pin(run_queries::child_calls(db, id))
        })
    }

    fn is_held(&self, id: RunId) -> BoxFuture<'_, Result<bool, StoreError>> {
        self.read(ReadMode::Statement, move |db| {
            Box::pin(run_queries::is_held(db, id))
        })
    }

    fn entries(&self, id: RunId) -> BoxFuture<'_, Result<Vec<RecordedEntry>, StoreError>> {
        self.read(ReadMode::Statement, move |db| {
            Box::pin(run_queries::entries(db, id))
        })
    }

    fn definition(&self, id: RunId) -> BoxFuture<'_, Result<Option<Arc<str>>, StoreError>> {
        self.read(ReadMode::Statement, move |db| {
            Box::pin(run_queries::definition(db, id))
        })
    }

    fn pinned_agents(&self, digest: Digest) -> BoxFuture<'_, Result<Option<Arc<str>>, StoreError>> {
        self.read(ReadMode::Statement, move |db| {
            Box::pin(async move {
                let found = run_queries::definitions(db, vec![digest.0]).await?;
                Ok(found.into_values().next())
            })
        })
    }

    fn blobs(&self, digests: Vec<Digest>) -> BoxFuture<'_, Result<Blobs, StoreError>> {
        self.read(ReadMode::Statement, move |db| {
            Box::pin(async move { run_queries::blobs(db, &digests).await })
        })
    }

    fn unfinished_runs(&self) -> BoxFuture<'_, Result<Vec<UnfinishedRun>, StoreError>> {
        self.read_list(ReadMode::Snapshot, |db| {
            Box::pin(run_queries::unfinished_runs(db))
        })
    }

    fn unfinished_trees(
        &self,
        roots: Vec<RunId>,
    ) -> BoxFuture<'_, Result<Vec<UnfinishedRun>, StoreError>> {
        self.read_list(ReadMode::Snapshot, move |db| {
            Box::pin(async move { run_queries::unfinished_trees(db, &roots).await })
        })
    }

    fn sleeping_trees(
        &self,
        roots: Option<Vec<RunId>>,
    ) -> BoxFuture<'_, Result<Vec<SleepingTree>, StoreError>> {
        self.read(ReadMode::Statement, move |db| {
            Box::pin(async move { run_queries::sleeping_trees(db, roots.as_deref()).await })
        })
    }

    fn waits_of(&self, roots: Vec<RunId>) -> BoxFuture<'_, Result<Vec<SleepingTree>, StoreError>> {
        self.read(ReadMode::Statement, move |db| {
            Box::pin(async move { run_queries::waits_of(db, &roots).await })
        })
    }

    fn claimed_run(
        &self,
        key: IdempotencyKey,
    ) -> BoxFuture<'_, Result<Option<ClaimedRun>, StoreError>> {
        self.read(ReadMode::Statement, move |db| {
            Box::pin(async move { run_queries::claimed_run(db, &key).await })
        })
    }
}

impl<E: Engine> EventLog for E {
    fn events(&self, query: EventQuery) -> BoxFuture<'_, Result<Vec<StoredEvent>, StoreError>> {
        self.read(ReadMode::Statement, move |db| {
            Box::pin(run_queries::events(db, query))
        })
    }
}
