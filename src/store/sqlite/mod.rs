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
use crate::store::outbox::{Delivery, Due, DueQuery, Tried};
use crate::store::sqlite::checkpoint::Checkpointer;
use crate::store::sqlite::files::{Opened, Reserve};
use crate::store::sqlite::lock::Lock;
use crate::store::sqlite::readers::Readers;
use crate::store::sqlite::writer::{Bells, Job, Parcel, Task};
use crate::store::{
    Bell, ChildCall, ClaimKey, Claimed, EventQuery, Gap, Listening, NewestEnded, Outlived,
    OutlivedPage, RunFilter, RunPage, RunStore, SessionQuery, Step, StoreError, Unfinished, Write,
};

mod attachments;
mod broken;
mod checkpoint;
mod clock;
mod definitions;
mod ended;
mod files;
mod lock;
pub mod maintenance;
mod outbox;
mod queries;
mod readers;
mod removal;
mod rows;
mod schema;
mod search;
mod shrink;
mod statements;
mod writer;

/// The database's name in the data directory.
const FILE: &str = "axed.db";

/// What a writer works with.
struct Parts {
    connection: Connection,
    opened: Opened,
    checkpointer: Checkpointer,
    lock: Lock,
}

impl Parts {
    /// Opens the database, made where it is missing, and brings it up.
    fn open(
        dir: &Path,
        file: &Path,
        reserve: &Reserve,
        durability: Durability,
    ) -> Result<Self, StoreError> {
        let lock = lock::take(dir)?;
        files::check_whole(file)?;
        let is_unclean = files::size(&files::log_of(file)).is_some_and(|bytes| bytes > 0);
        lock::private_file(file)?;
        let connection = schema::open_writer(file, durability)?;
        maintenance::check_after_crash(&connection, file, is_unclean)?;
        clock::follow(&connection).map_err(readers::failed)?;
        Ok(Self {
            opened: Opened::new(dir, file),
            checkpointer: Checkpointer::start(file, reserve.path())?,
            connection,
            lock,
        })
    }
}

/// A store in a data directory, which is locked until the store is closed or dropped.
pub struct Sqlite {
    jobs: mpsc::Sender<Job>,
    readers: Readers,
    commits: Arc<AtomicU64>,
    outbox: Arc<Notify>,
    gap: Arc<OnceLock<Gap>>,
    writer: Option<JoinHandle<()>>,
}

impl Sqlite {
    /// Opens it; the directory and the file are made where they are missing. Blocks while it does.
    pub fn open(
        dir: &Path,
        durability: Durability,
        bell: Bell,
        listening: Listening,
    ) -> Result<Self, StoreError> {
        let file = dir.join(FILE);
        let mut reserve = Reserve::new(dir);
        let parts = match Parts::open(dir, &file, &reserve, durability) {
            // With a full disk not even a database that is only read can be opened.
            Err(error) if error.may_be_want_of_space() && reserve.give_up() => {
                tracing::warn!(error = %error, "The data directory could not be opened, trying again without its reserve of space: {error}");
                Parts::open(dir, &file, &reserve, durability)?
            }
            parts => parts?,
        };
        let (jobs, waiting) = mpsc::channel(writer::WAITING_WRITES);
        let commits = Arc::<AtomicU64>::default();
        let counted = Arc::clone(&commits);
        let outbox = Arc::<Notify>::default();
        let gap = Arc::<OnceLock<Gap>>::default();
        let bells = Bells {
            gap: Arc::clone(&gap),
            bell,
            listening,
            outbox: Arc::clone(&outbox),
        };
        let thread = std::thread::Builder::new()
            .name("store-writer".to_owned())
            .spawn(move || {
                writer::serve(parts, reserve, waiting, &bells, &counted);
            })
            .map_err(|error| StoreError::Engine(format!("no thread to write with: {error}")))?;
        Ok(Self {
            jobs,
            readers: Readers::new(file),
            commits,
            outbox,
            gap,
            writer: Some(thread),
        })
    }

    async fn ask(&self, task: Task) -> Result<u64, StoreError> {
        let (answer, result) = oneshot::channel();
        let job = Job {
            task,
            answer: Some(answer),
        };
        self.jobs.send(job).await.map_err(|_| StoreError::Closed)?;
        result.await.map_err(|_| StoreError::Closed)?
    }
}

impl RunStore for Sqlite {
    fn write(&self, write: Write) -> BoxFuture<'_, Result<u64, StoreError>> {
        let parcel = Parcel::pack(write);
        Box::pin(async move { self.ask(Task::Write(parcel?)).await })
    }

    fn write_with(
        &self,
        write: Write,
        others: Vec<Write>,
    ) -> BoxFuture<'_, Result<u64, StoreError>> {
        let parcel = Parcel::pack_with(write, others);
        Box::pin(async move { self.ask(Task::Write(parcel?)).await })
    }

    fn post(&self, write: Write) -> BoxFuture<'_, Result<(), StoreError>> {
        let parcel = Parcel::pack(write);
        Box::pin(async move {
            let job = Job {
                task: Task::Write(parcel?),
                answer: None,
            };
            self.jobs.send(job).await.map_err(|_| StoreError::Closed)
        })
    }

    fn on_gap(&self, gap: Gap) {
        // The first one stays: there is one owner.
        let _ = self.gap.set(gap);
    }

    fn mend(&self, roots: Vec<RunId>) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move { self.ask(Task::Mend(roots)).await.map(drop) })
    }

    fn run(&self, id: RunId) -> BoxFuture<'_, Result<Option<Run>, StoreError>> {
        Box::pin(self.readers.read(move |db| queries::run(db, id)))
    }

    fn list(&self, filter: RunFilter) -> BoxFuture<'_, Result<RunPage, StoreError>> {
        Box::pin(self.readers.read(move |db| queries::list(db, &filter)))
    }

    fn session(&self, query: SessionQuery) -> BoxFuture<'_, Result<Vec<Run>, StoreError>> {
        Box::pin(self.readers.read(move |db| queries::session(db, query)))
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

    fn unfinished(&self) -> BoxFuture<'_, Result<Vec<Unfinished>, StoreError>> {
        Box::pin(self.readers.read(queries::unfinished))
    }

    fn claimed(&self, key: ClaimKey) -> BoxFuture<'_, Result<Option<Claimed>, StoreError>> {
        Box::pin(self.readers.read(move |db| queries::claimed(db, &key)))
    }

    fn due(&self, query: DueQuery) -> BoxFuture<'_, Result<Due, StoreError>> {
        Box::pin(self.readers.read(move |db| outbox::due(db, &query)))
    }

    fn tried(&self, tried: Tried) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move { self.ask(Task::Tried(tried)).await.map(drop) })
    }

    fn deliveries(&self, run: RunId) -> BoxFuture<'_, Result<Vec<Delivery>, StoreError>> {
        Box::pin(self.readers.read(move |db| outbox::of_run(db, run)))
    }

    fn resend(&self, run: RunId, id: DeliveryId) -> BoxFuture<'_, Result<bool, StoreError>> {
        Box::pin(async move { Ok(self.ask(Task::Resend(run, id)).await? > 0) })
    }

    fn outbox(&self) -> Arc<Notify> {
        Arc::clone(&self.outbox)
    }

    fn delete(&self, root: RunId) -> BoxFuture<'_, Result<bool, StoreError>> {
        Box::pin(async move { Ok(self.ask(Task::Delete(root)).await? > 0) })
    }

    fn outlived(&self, query: Outlived) -> BoxFuture<'_, Result<OutlivedPage, StoreError>> {
        Box::pin(self.readers.read(move |db| ended::outlived(db, query)))
    }

    fn newest_ended(&self, query: NewestEnded) -> BoxFuture<'_, Result<Option<RunId>, StoreError>> {
        Box::pin(self.readers.read(move |db| ended::newest(db, query)))
    }

    fn tidy(&self) -> BoxFuture<'_, Result<bool, StoreError>> {
        Box::pin(async move { Ok(self.ask(Task::Tidy).await? > 0) })
    }

    fn check(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            self.ask(Task::Check).await?;
            self.readers.read(queries::check).await
        })
    }

    fn commits(&self) -> u64 {
        self.commits.load(Ordering::Relaxed)
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            // The writer waits for the readers, as the log can only be folded in when nobody reads it.
            let readers = self.readers.close();
            // An error means that it is closed already.
            let _ = self.ask(Task::Close(readers)).await;
        })
    }
}

impl Drop for Sqlite {
    /// Without a close before, what was handed over is committed now, so that the next one finds the lock free.
    fn drop(&mut self) {
        let readers = self.readers.close();
        let (nobody, _) = mpsc::channel(1);
        drop(std::mem::replace(&mut self.jobs, nobody));
        for thread in readers.into_iter().chain(self.writer.take()) {
            let _ = thread.join();
        }
    }
}
