//! The store in one SQLite file, with one writer thread and a few reader threads.

use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use futures_util::future::BoxFuture;
use uuid::Uuid;

use crate::config::Durability;
use crate::instruments::Histogram;
use crate::store::engine::Engine;
use crate::store::events::{HasSubscribersFn, PublishFn};
use crate::store::reader::{ReadMode, Reader};
use crate::store::run_store::RunStore;
use crate::store::sql::row::StoreResult;
use crate::store::sqlite::checkpoint::Checkpointer;
use crate::store::sqlite::files::{DATABASE_FILE, OpenFiles, Reserve};
use crate::store::sqlite::memory_files::MemoryFiles;
use crate::store::sqlite::reader_pool::ReaderPool;
use crate::store::sqlite::writer::WriterResources;
use crate::store::write_queue::job::Task;
use crate::store::write_queue::queue::WriteQueue;
use crate::store::{StoreError, run_queries};

mod attachments;
mod budgets;
mod checkpoint;
mod clock;
mod delete;
pub mod error;
mod executor;
mod files;
mod inputs;
mod joined_writes;
mod lock;
pub mod maintenance;
pub mod memory_files;
mod memory_records;
pub mod offline;
mod outbox;
mod prepared;
mod push_configs;
pub mod reader;
mod reader_pool;
mod rows;
mod run_changes;
mod run_inserts;
pub mod schema;
pub mod search;
mod sessions;
mod statements;
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
    /// Opens the store of a directory that has one. Nobody follows its events.
    pub fn open_existing(dir: &Path, durability: Durability) -> Result<Self, StoreError> {
        let file = dir.join(DATABASE_FILE);
        if files::file_size(&file).is_none() {
            return Err(StoreError::NoDatabase(file.display().to_string()));
        }
        Self::open(dir, durability, Box::new(|_, _| {}), Box::new(|_| false))
    }

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

impl Engine for SqliteStore {
    fn read<T: Send + 'static>(
        &self,
        mode: ReadMode,
        read: impl for<'r> FnOnce(&'r Reader) -> BoxFuture<'r, StoreResult<T>> + Clone + Send + 'static,
    ) -> BoxFuture<'_, StoreResult<T>> {
        Box::pin(self.readers.read_in(mode, read))
    }

    fn read_list<T: Send + 'static>(
        &self,
        mode: ReadMode,
        read: impl for<'r> FnOnce(&'r Reader) -> BoxFuture<'r, StoreResult<T>> + Clone + Send + 'static,
    ) -> BoxFuture<'_, StoreResult<T>> {
        Box::pin(async move {
            match self.readers.read_in(mode, read.clone()).await {
                Err(StoreError::Malformed(_)) => self.readers.read_without_malformed(read).await,
                found => found,
            }
        })
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
            self.readers
                .read(|db| Box::pin(run_queries::check(db)))
                .await
        })
    }

    fn commits(&self) -> &Histogram {
        self.queue.commits()
    }

    fn queued_writes(&self) -> usize {
        self.queue.queued_jobs()
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
