//! The store in one SQLite file, with one writer thread and a few reader threads.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use futures_util::future::BoxFuture;
use rusqlite::Connection;
use uuid::Uuid;

use crate::config::Durability;
use crate::domain::attachment::{Blobs, Digest};
use crate::domain::event::StoredEvent;
use crate::domain::run::{Run, RunId};
use crate::store::engine::Engine;
use crate::store::events::{EventLog, EventQuery, HasSubscribersFn, PublishFn};
use crate::store::reader::{ReadMode, Reader};
use crate::store::run_store::RunStore;
use crate::store::runs::{
    ChildCall, RunFilter, RunPage, RunRecords, SessionQuery, UnfinishedRun, WriteFailedFn,
};
use crate::store::sessions::{SessionIndex, SessionListQuery, SessionPage};
use crate::store::sql::row::StoreResult;
use crate::store::sqlite::checkpoint::Checkpointer;
use crate::store::sqlite::files::{DATABASE_FILE, OpenFiles, Reserve};
use crate::store::sqlite::memory_files::MemoryFiles;
use crate::store::sqlite::queries::IfMalformed;
use crate::store::sqlite::reader_pool::ReaderPool;
use crate::store::sqlite::writer::WriterResources;
use crate::store::turn_record::{TurnEntry, TurnRecord};
use crate::store::turns::{RecordedTurn, TurnRecords};
use crate::store::write_queue::job::Task;
use crate::store::write_queue::queue::WriteQueue;
use crate::store::{ClaimedRun, IdempotencyKey, Step, StoreError, Write};

mod approvals;
mod attachments;
mod budgets;
mod checkpoint;
mod clock;
mod delete;
pub mod error;
mod executor;
mod files;
mod joined_writes;
mod lock;
pub mod maintenance;
pub mod memory_files;
mod memory_records;
pub mod offline;
mod outbox;
mod prepared;
mod push_configs;
mod queries;
pub mod reader;
mod reader_pool;
mod rows;
mod run_changes;
mod run_inserts;
pub mod schema;
mod search;
mod sessions;
mod sql_parts;
mod statements;
mod turns;
mod usage_rollup;
mod vacuum;
mod writer;

/// The store of a data directory. The directory is locked until the store is closed or dropped.
pub struct SqliteStore {
    queue: WriteQueue,
    readers: ReaderPool,
    memory_files: Arc<MemoryFiles>,
    writer: Option<JoinHandle<()>>,
}

impl SqliteStore {
    /// Creates the directory and the file if they are missing. Blocks.
    pub fn open(
        dir: &Path,
        durability: Durability,
        publish: PublishFn,
        has_subscribers: HasSubscribersFn,
    ) -> Result<Self, StoreError> {
        let file = dir.join(DATABASE_FILE);
        let mut reserve = Reserve::new(dir);
        let resources = loop {
            match open_writer(dir, &file, &reserve, durability) {
                // On a full disk a database cannot even be opened for reading.
                Err(error) if error.may_be_disk_full() && reserve.release() => {
                    tracing::warn!(error = %error, "The data directory could not be opened, trying again after releasing its reserve of disk space: {error}");
                }
                resources => break resources?,
            }
        };
        let (queue, writer_end) = WriteQueue::new(publish, has_subscribers);
        let thread = std::thread::Builder::new()
            .name("store-writer".to_owned())
            .spawn(move || writer::run_writer(resources, reserve, writer_end))
            .map_err(|error| {
                StoreError::Backend(format!("could not start the writer thread: {error}"))
            })?;
        Ok(Self {
            queue,
            readers: ReaderPool::new(file),
            memory_files: Arc::new(MemoryFiles::new(dir)),
            writer: Some(thread),
        })
    }

    /// Reads again without the runs that SQLite cannot read, if they stay so.
    async fn read_or_leave_out<T: Send + 'static>(
        &self,
        read: impl Fn(&Connection, IfMalformed) -> Result<T, StoreError> + Clone + Send + 'static,
    ) -> Result<T, StoreError> {
        let whole = read.clone();
        let found = self.readers.read(move |db| whole(db, IfMalformed::Fail));
        match found.await {
            Err(StoreError::Malformed(_)) => {
                let rest = self.readers.read(move |db| read(db, IfMalformed::LeaveOut));
                rest.await
            }
            found => found,
        }
    }
}

/// Opens the database, created if it is missing, and locks its directory.
fn open_writer(
    dir: &Path,
    file: &Path,
    reserve: &Reserve,
    durability: Durability,
) -> Result<WriterResources, StoreError> {
    let lock = lock::acquire(dir)?;
    files::check_wal_has_database(file)?;
    let is_unclean = files::file_size(&files::wal_path(file)).is_some_and(|bytes| bytes > 0);
    lock::create_private_file(file)?;
    let connection = schema::open_writer(file, durability)?;
    maintenance::check_after_crash(&connection, file, is_unclean)?;
    clock::align(&connection).map_err(error::store_error)?;
    Ok(WriterResources {
        open_files: OpenFiles::new(dir, file),
        checkpointer: Checkpointer::start(file, reserve.path())?,
        connection,
        lock,
    })
}

impl RunRecords for SqliteStore {
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
        Box::pin(self.readers.read(move |db| queries::run(db, id)))
    }

    fn list(&self, filter: RunFilter) -> BoxFuture<'_, Result<RunPage, StoreError>> {
        let read = move |db: &Connection, if_malformed| queries::list(db, &filter, if_malformed);
        Box::pin(self.read_or_leave_out(read))
    }

    fn session_runs(&self, query: SessionQuery) -> BoxFuture<'_, Result<Vec<Run>, StoreError>> {
        let read = move |db: &Connection, if_malformed| {
            queries::session_runs(db, query.clone(), if_malformed)
        };
        Box::pin(self.read_or_leave_out(read))
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

    fn is_held(&self, id: RunId) -> BoxFuture<'_, Result<bool, StoreError>> {
        Box::pin(self.readers.read(move |db| queries::is_held(db, id)))
    }

    fn steps(&self, id: RunId) -> BoxFuture<'_, Result<Vec<Step>, StoreError>> {
        Box::pin(self.readers.read(move |db| queries::steps(db, id)))
    }

    fn definition(&self, id: RunId) -> BoxFuture<'_, Result<Option<Arc<str>>, StoreError>> {
        Box::pin(self.readers.read(move |db| queries::definition(db, id)))
    }

    fn pinned_agents(&self, digest: Digest) -> BoxFuture<'_, Result<Option<Arc<str>>, StoreError>> {
        Box::pin(
            self.readers
                .read(move |db| queries::load_definition(db, digest.0, &mut HashMap::new())),
        )
    }

    fn blobs(&self, digests: Vec<Digest>) -> BoxFuture<'_, Result<Blobs, StoreError>> {
        Box::pin(self.readers.read(move |db| attachments::read(db, &digests)))
    }

    fn unfinished_runs(&self) -> BoxFuture<'_, Result<Vec<UnfinishedRun>, StoreError>> {
        Box::pin(self.read_or_leave_out(queries::unfinished_runs))
    }

    fn claimed_run(
        &self,
        key: IdempotencyKey,
    ) -> BoxFuture<'_, Result<Option<ClaimedRun>, StoreError>> {
        Box::pin(self.readers.read(move |db| queries::claimed_run(db, &key)))
    }
}

impl TurnRecords for SqliteStore {
    fn turns(&self, run: RunId) -> BoxFuture<'_, Result<Vec<TurnRecord>, StoreError>> {
        Box::pin(self.readers.read(move |db| turns::turns(db, run)))
    }

    fn turn(
        &self,
        run: RunId,
        turn: u32,
    ) -> BoxFuture<'_, Result<Option<RecordedTurn>, StoreError>> {
        Box::pin(self.readers.read(move |db| turns::turn(db, run, turn)))
    }

    fn copied_turns(
        &self,
        source: RunId,
        last: u32,
        steps: Vec<Step>,
    ) -> BoxFuture<'_, Result<Vec<TurnEntry>, StoreError>> {
        Box::pin(
            self.readers
                .read(move |db| turns::copied_turns(db, source, last, &steps)),
        )
    }
}

impl EventLog for SqliteStore {
    fn events(&self, query: EventQuery) -> BoxFuture<'_, Result<Vec<StoredEvent>, StoreError>> {
        Box::pin(self.readers.read(move |db| queries::events(db, query)))
    }
}

impl SessionIndex for SqliteStore {
    fn sessions(&self, query: SessionListQuery) -> BoxFuture<'_, Result<SessionPage, StoreError>> {
        Box::pin(self.readers.read(move |db| sessions::list(db, &query)))
    }

    fn delete_session(
        &self,
        owner: Option<String>,
        name: String,
    ) -> BoxFuture<'_, Result<bool, StoreError>> {
        self.queue.forget_session(owner, name)
    }
}

impl Engine for SqliteStore {
    fn read<T: Send + 'static>(
        &self,
        _: ReadMode,
        read: impl for<'r> FnOnce(&'r Reader) -> BoxFuture<'r, StoreResult<T>> + Clone + Send + 'static,
    ) -> BoxFuture<'_, StoreResult<T>> {
        Box::pin(self.readers.read_by(read))
    }

    fn queue(&self) -> &WriteQueue {
        &self.queue
    }

    fn writer_id(&self) -> Uuid {
        Uuid::nil()
    }
}

impl RunStore for SqliteStore {
    fn check(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            self.queue.request(Task::Check).await?;
            self.readers.read(queries::check).await
        })
    }

    fn commit_count(&self) -> u64 {
        self.queue.commit_count()
    }

    fn ended(&self) -> BoxFuture<'_, ()> {
        self.queue.ended()
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            // The writer waits for the readers: it can copy the whole log only when none of them reads.
            let readers = self.readers.close();
            // An error means that the store is closed already.
            let _ = self.queue.request(Task::Close(readers)).await;
        })
    }
}

impl Drop for SqliteStore {
    /// Commits the queued writes and releases the lock, if the store was not closed before.
    fn drop(&mut self) {
        let readers = self.readers.close();
        self.queue.close();
        for thread in readers.into_iter().chain(self.writer.take()) {
            let _ = thread.join();
        }
    }
}
