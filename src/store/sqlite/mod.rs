//! The store in one SQLite file: a thread that writes, a few that read. Knows no engine and no HTTP.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use futures_util::future::BoxFuture;
use rusqlite::Connection;
use tokio::sync::{Notify, mpsc, oneshot};

use crate::config::Durability;
use crate::domain::attachment::{Blobs, Digest};
use crate::domain::event::StoredEvent;
use crate::domain::run::{Run, RunId};
use crate::domain::webhook::DeliveryId;
use crate::store::outbox::{AttemptRecord, Delivery, DueDeliveries, DueQuery};
use crate::store::sqlite::checkpoint::Checkpointer;
use crate::store::sqlite::files::{OpenFiles, Reserve};
use crate::store::sqlite::lock::Lock;
use crate::store::sqlite::reader_pool::ReaderPool;
use crate::store::sqlite::writer::{EncodedWrite, Job, Task, WriterCallbacks};
use crate::store::{
    ChildCall, ClaimedRun, EventQuery, ExpiredPage, ExpiredQuery, HasSubscribersFn, IdempotencyKey,
    NthNewestQuery, PublishFn, RunFilter, RunPage, RunStore, SessionQuery, Step, StoreError,
    UnfinishedRun, Write, WriteFailedFn,
};

mod attachments;
mod checkpoint;
mod clock;
mod definition_cache;
mod delete;
mod failed_runs;
mod files;
mod lock;
pub mod maintenance;
mod outbox;
mod queries;
mod reader_pool;
mod retention_queries;
mod rows;
mod schema;
mod search;
mod statements;
mod vacuum;
mod writer;

/// The database's name in the data directory.
const DATABASE_FILE: &str = "axed.db";

/// What a writer works with.
struct WriterResources {
    connection: Connection,
    open_files: OpenFiles,
    checkpointer: Checkpointer,
    lock: Lock,
}

impl WriterResources {
    /// Opens the database, made where it is missing, and brings it up.
    fn open(
        dir: &Path,
        file: &Path,
        reserve: &Reserve,
        durability: Durability,
    ) -> Result<Self, StoreError> {
        let lock = lock::acquire(dir)?;
        files::check_wal_has_database(file)?;
        let is_unclean = files::file_size(&files::wal_path(file)).is_some_and(|bytes| bytes > 0);
        lock::create_private_file(file)?;
        let connection = schema::open_writer(file, durability)?;
        maintenance::check_after_crash(&connection, file, is_unclean)?;
        clock::align(&connection).map_err(reader_pool::store_error)?;
        Ok(Self {
            open_files: OpenFiles::new(dir, file),
            checkpointer: Checkpointer::start(file, reserve.path())?,
            connection,
            lock,
        })
    }
}

/// A store in a data directory, which is locked until the store is closed or dropped.
pub struct SqliteStore {
    job_sender: mpsc::Sender<Job>,
    readers: ReaderPool,
    commits: Arc<AtomicU64>,
    delivery_notify: Arc<Notify>,
    on_write_failed: Arc<OnceLock<WriteFailedFn>>,
    writer: Option<JoinHandle<()>>,
}

impl SqliteStore {
    /// Opens it; the directory and the file are made where they are missing. Blocks while it does.
    pub fn open(
        dir: &Path,
        durability: Durability,
        publish: PublishFn,
        has_subscribers: HasSubscribersFn,
    ) -> Result<Self, StoreError> {
        let file = dir.join(DATABASE_FILE);
        let mut reserve = Reserve::new(dir);
        let resources = match WriterResources::open(dir, &file, &reserve, durability) {
            // With a full disk not even a database that is only read can be opened.
            Err(error) if error.may_be_disk_full() && reserve.release() => {
                tracing::warn!(error = %error, "The data directory could not be opened, trying again without its reserve of space: {error}");
                WriterResources::open(dir, &file, &reserve, durability)?
            }
            resources => resources?,
        };
        let (job_sender, job_receiver) = mpsc::channel(writer::MAX_QUEUED_WRITES);
        let commits = Arc::<AtomicU64>::default();
        let commit_counter = Arc::clone(&commits);
        let delivery_notify = Arc::<Notify>::default();
        let on_write_failed = Arc::<OnceLock<WriteFailedFn>>::default();
        let callbacks = WriterCallbacks {
            on_write_failed: Arc::clone(&on_write_failed),
            publish,
            has_subscribers,
            delivery_notify: Arc::clone(&delivery_notify),
        };
        let thread = std::thread::Builder::new()
            .name("store-writer".to_owned())
            .spawn(move || {
                writer::run_writer(
                    resources,
                    reserve,
                    job_receiver,
                    &callbacks,
                    &commit_counter,
                );
            })
            .map_err(|error| StoreError::Backend(format!("no thread to write with: {error}")))?;
        Ok(Self {
            job_sender,
            readers: ReaderPool::new(file),
            commits,
            delivery_notify,
            on_write_failed,
            writer: Some(thread),
        })
    }

    async fn request(&self, task: Task) -> Result<u64, StoreError> {
        let (reply, result) = oneshot::channel();
        let job = Job {
            task,
            reply: Some(reply),
        };
        self.job_sender
            .send(job)
            .await
            .map_err(|_| StoreError::Closed)?;
        result.await.map_err(|_| StoreError::Closed)?
    }
}

impl RunStore for SqliteStore {
    fn write(&self, write: Write) -> BoxFuture<'_, Result<u64, StoreError>> {
        let encoded = EncodedWrite::encode(write);
        Box::pin(async move { self.request(Task::Write(encoded?)).await })
    }

    fn write_with(
        &self,
        write: Write,
        others: Vec<Write>,
    ) -> BoxFuture<'_, Result<u64, StoreError>> {
        let encoded = EncodedWrite::encode_with(write, others);
        Box::pin(async move { self.request(Task::Write(encoded?)).await })
    }

    fn enqueue(&self, write: Write) -> BoxFuture<'_, Result<(), StoreError>> {
        let encoded = EncodedWrite::encode(write);
        Box::pin(async move {
            let job = Job {
                task: Task::Write(encoded?),
                reply: None,
            };
            self.job_sender
                .send(job)
                .await
                .map_err(|_| StoreError::Closed)
        })
    }

    fn on_write_failed(&self, callback: WriteFailedFn) {
        // The first one stays: there is one owner.
        let _ = self.on_write_failed.set(callback);
    }

    fn clear_failed(&self, roots: Vec<RunId>) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move { self.request(Task::ClearFailed(roots)).await.map(drop) })
    }

    fn run(&self, id: RunId) -> BoxFuture<'_, Result<Option<Run>, StoreError>> {
        Box::pin(self.readers.read(move |db| queries::run(db, id)))
    }

    fn list(&self, filter: RunFilter) -> BoxFuture<'_, Result<RunPage, StoreError>> {
        Box::pin(self.readers.read(move |db| queries::list(db, &filter)))
    }

    fn session_runs(&self, query: SessionQuery) -> BoxFuture<'_, Result<Vec<Run>, StoreError>> {
        Box::pin(
            self.readers
                .read(move |db| queries::session_runs(db, query)),
        )
    }

    fn tree(&self, id: RunId) -> BoxFuture<'_, Result<Vec<Run>, StoreError>> {
        Box::pin(self.readers.read(move |db| queries::tree(db, id)))
    }

    fn children(&self, id: RunId) -> BoxFuture<'_, Result<Vec<Run>, StoreError>> {
        Box::pin(self.readers.read(move |db| queries::children(db, id)))
    }

    fn child_calls(&self, id: RunId) -> BoxFuture<'_, Result<Vec<ChildCall>, StoreError>> {
        Box::pin(self.readers.read(move |db| queries::child_calls(db, id)))
    }

    fn steps(&self, id: RunId) -> BoxFuture<'_, Result<Vec<Step>, StoreError>> {
        Box::pin(self.readers.read(move |db| queries::steps(db, id)))
    }

    fn blobs(&self, digests: Vec<Digest>) -> BoxFuture<'_, Result<Blobs, StoreError>> {
        Box::pin(self.readers.read(move |db| attachments::read(db, &digests)))
    }

    fn events(&self, query: EventQuery) -> BoxFuture<'_, Result<Vec<StoredEvent>, StoreError>> {
        Box::pin(self.readers.read(move |db| queries::events(db, query)))
    }

    fn unfinished_runs(&self) -> BoxFuture<'_, Result<Vec<UnfinishedRun>, StoreError>> {
        Box::pin(self.readers.read(queries::unfinished_runs))
    }

    fn claimed_run(
        &self,
        key: IdempotencyKey,
    ) -> BoxFuture<'_, Result<Option<ClaimedRun>, StoreError>> {
        Box::pin(self.readers.read(move |db| queries::claimed_run(db, &key)))
    }

    fn due_deliveries(&self, query: DueQuery) -> BoxFuture<'_, Result<DueDeliveries, StoreError>> {
        Box::pin(
            self.readers
                .read(move |db| outbox::due_deliveries(db, &query)),
        )
    }

    fn record_attempt(&self, record: AttemptRecord) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move { self.request(Task::RecordAttempt(record)).await.map(drop) })
    }

    fn deliveries(&self, run: RunId) -> BoxFuture<'_, Result<Vec<Delivery>, StoreError>> {
        Box::pin(self.readers.read(move |db| outbox::list(db, run)))
    }

    fn resend(&self, run: RunId, id: DeliveryId) -> BoxFuture<'_, Result<bool, StoreError>> {
        Box::pin(async move { Ok(self.request(Task::Resend(run, id)).await? > 0) })
    }

    fn delivery_notify(&self) -> Arc<Notify> {
        Arc::clone(&self.delivery_notify)
    }

    fn delete(&self, root: RunId) -> BoxFuture<'_, Result<bool, StoreError>> {
        Box::pin(async move { Ok(self.request(Task::Delete(root)).await? > 0) })
    }

    fn expired_roots(&self, query: ExpiredQuery) -> BoxFuture<'_, Result<ExpiredPage, StoreError>> {
        Box::pin(
            self.readers
                .read(move |db| retention_queries::expired_roots(db, query)),
        )
    }

    fn nth_newest_ended(
        &self,
        query: NthNewestQuery,
    ) -> BoxFuture<'_, Result<Option<RunId>, StoreError>> {
        Box::pin(
            self.readers
                .read(move |db| retention_queries::nth_newest(db, query)),
        )
    }

    fn vacuum(&self) -> BoxFuture<'_, Result<bool, StoreError>> {
        Box::pin(async move { Ok(self.request(Task::Vacuum).await? > 0) })
    }

    fn check(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            self.request(Task::Check).await?;
            self.readers.read(queries::check).await
        })
    }

    fn commit_count(&self) -> u64 {
        self.commits.load(Ordering::Relaxed)
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            // The writer waits for the readers, as the log can only be folded in when nobody reads it.
            let readers = self.readers.close();
            // An error means that it is closed already.
            let _ = self.request(Task::Close(readers)).await;
        })
    }
}

impl Drop for SqliteStore {
    /// Without a close before, what was handed over is committed now, so that the next one finds the lock free.
    fn drop(&mut self) {
        let readers = self.readers.close();
        let (closed, _) = mpsc::channel(1);
        drop(std::mem::replace(&mut self.job_sender, closed));
        for thread in readers.into_iter().chain(self.writer.take()) {
            let _ = thread.join();
        }
    }
}
