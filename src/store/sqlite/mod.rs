//! The store in one SQLite file, with one writer thread and a few reader threads.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use futures_util::future::BoxFuture;
use jiff::Timestamp;
use tokio::sync::{Notify, mpsc, oneshot};

use crate::config::Durability;
use crate::domain::attachment::{Blobs, Digest};
use crate::domain::event::StoredEvent;
use crate::domain::run::{Run, RunId};
use crate::domain::webhook::DeliveryId;
use crate::store::approvals::{ApprovalIndex, ApprovalPage, ApprovalQuery};
use crate::store::changed_runs::{ChangedPage, ChangedQuery, ChangedRuns};
use crate::store::encoding::encoded_write::EncodedWrite;
use crate::store::events::{EventLog, EventQuery, HasSubscribersFn, PublishFn};
use crate::store::outbox::{AttemptRecord, Delivery, DueDeliveries, DueQuery, Outbox};
use crate::store::push_configs::{PushConfig, PushConfigs};
use crate::store::retention::{ExpiredPage, ExpiredQuery, NthNewestQuery, RunRetention};
use crate::store::run_store::RunStore;
use crate::store::runs::{
    ChildCall, RunFilter, RunPage, RunRecords, SessionQuery, UnfinishedRun, WriteFailedFn,
};
use crate::store::schedules::{ScheduleChange, ScheduleId, ScheduleRecord, ScheduleRecords};
use crate::store::sessions::{SessionIndex, SessionListQuery, SessionPage};
use crate::store::sqlite::checkpoint::Checkpointer;
use crate::store::sqlite::files::{DATABASE_FILE, OpenFiles, Reserve};
use crate::store::sqlite::reader_pool::ReaderPool;
use crate::store::sqlite::writer::WriterResources;
use crate::store::turn_record::{TurnEntry, TurnRecord};
use crate::store::turns::{RecordedTurn, TurnRecords};
use crate::store::usage::{BudgetPeriod, BudgetUsage, UsageLog, UsageQuery, UsageReport};
use crate::store::write_queue::callbacks::WriterCallbacks;
use crate::store::write_queue::job::{ForgetProgress, Job, Task};
use crate::store::{ClaimedRun, IdempotencyKey, Step, StoreError, Write};

mod approvals;
mod attachments;
mod batch_records;
mod batches;
mod budgets;
mod changed_runs;
mod checkpoint;
mod clock;
mod delete;
pub mod error;
mod executor;
mod files;
mod lock;
pub mod maintenance;
pub mod offline;
mod outbox;
mod prepared;
mod push_configs;
mod queries;
mod reader_pool;
mod retention_queries;
mod rows;
mod run_changes;
mod run_inserts;
mod schedules;
mod schema;
mod search;
mod sessions;
mod sql_parts;
mod statements;
mod turns;
mod usage_fill;
mod usage_queries;
mod usage_rollup;
mod vacuum;
mod writer;

/// The store of a data directory. The directory is locked until the store is closed or dropped.
pub struct SqliteStore {
    job_sender: mpsc::Sender<Job>,
    readers: ReaderPool,
    commits: Arc<AtomicU64>,
    delivery_notify: Arc<Notify>,
    on_write_failed: Arc<OnceLock<WriteFailedFn>>,
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
        let resources = match open_writer(dir, &file, &reserve, durability) {
            // On a full disk a database cannot even be opened for reading.
            Err(error) if error.may_be_disk_full() && reserve.release() => {
                tracing::warn!(error = %error, "The data directory could not be opened, trying again after releasing its reserve of disk space: {error}");
                open_writer(dir, &file, &reserve, durability)?
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
            .map_err(|error| {
                StoreError::Backend(format!("could not start the writer thread: {error}"))
            })?;
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

    fn definition(&self, id: RunId) -> BoxFuture<'_, Result<Option<Arc<str>>, StoreError>> {
        Box::pin(self.readers.read(move |db| queries::definition(db, id)))
    }

    fn blobs(&self, digests: Vec<Digest>) -> BoxFuture<'_, Result<Blobs, StoreError>> {
        Box::pin(self.readers.read(move |db| attachments::read(db, &digests)))
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

impl ApprovalIndex for SqliteStore {
    fn pending_approvals(
        &self,
        query: ApprovalQuery,
    ) -> BoxFuture<'_, Result<ApprovalPage, StoreError>> {
        Box::pin(self.readers.read(move |db| approvals::list(db, &query)))
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
        Box::pin(async move {
            let mut is_found = false;
            loop {
                let task = Task::ForgetSession(owner.clone(), name.clone());
                let progress = self.request(task).await?;
                is_found |= progress != ForgetProgress::NotFound as u64;
                if progress != ForgetProgress::More as u64 {
                    return Ok(is_found);
                }
            }
        })
    }
}

impl Outbox for SqliteStore {
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
}

impl ChangedRuns for SqliteStore {
    fn changed_runs(&self, query: ChangedQuery) -> BoxFuture<'_, Result<ChangedPage, StoreError>> {
        Box::pin(self.readers.read(move |db| changed_runs::list(db, &query)))
    }
}

impl PushConfigs for SqliteStore {
    fn push_configs(&self, run: RunId) -> BoxFuture<'_, Result<Vec<PushConfig>, StoreError>> {
        Box::pin(self.readers.read(move |db| push_configs::list(db, run)))
    }

    fn add_push_config(
        &self,
        run: RunId,
        config: PushConfig,
    ) -> BoxFuture<'_, Result<bool, StoreError>> {
        Box::pin(async move {
            let task = Task::AddPushConfig(run, Box::new(config));
            Ok(self.request(task).await? > 0)
        })
    }

    fn delete_push_config(&self, run: RunId, id: String) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            self.request(Task::DeletePushConfig(run, id))
                .await
                .map(drop)
        })
    }
}

impl RunRetention for SqliteStore {
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
}

impl UsageLog for SqliteStore {
    fn usage(&self, query: UsageQuery) -> BoxFuture<'_, Result<UsageReport, StoreError>> {
        Box::pin(
            self.readers
                .read(move |db| usage_queries::report(db, &query)),
        )
    }

    fn budget_usage(
        &self,
        budget: String,
        period: BudgetPeriod,
    ) -> BoxFuture<'_, Result<BudgetUsage, StoreError>> {
        Box::pin(
            self.readers
                .read(move |db| budgets::usage(db, &budget, period)),
        )
    }

    fn trim_usage(&self, before: Timestamp) -> BoxFuture<'_, Result<bool, StoreError>> {
        Box::pin(async move { Ok(self.request(Task::TrimUsage(before)).await? > 0) })
    }
}

impl ScheduleRecords for SqliteStore {
    fn schedules(&self) -> BoxFuture<'_, Result<Vec<ScheduleRecord>, StoreError>> {
        Box::pin(self.readers.read(schedules::list))
    }

    fn change_schedule(
        &self,
        id: ScheduleId,
        change: ScheduleChange,
    ) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            let task = Task::ChangeSchedule(id, change);
            self.request(task).await.map(drop)
        })
    }
}

impl RunStore for SqliteStore {
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
            // The writer waits for the readers: it can copy the whole log only when none of them reads.
            let readers = self.readers.close();
            // An error means that the store is closed already.
            let _ = self.request(Task::Close(readers)).await;
        })
    }
}

impl Drop for SqliteStore {
    /// Commits the queued writes and releases the lock, if the store was not closed before.
    fn drop(&mut self) {
        let readers = self.readers.close();
        let (closed, _) = mpsc::channel(1);
        drop(std::mem::replace(&mut self.job_sender, closed));
        for thread in readers.into_iter().chain(self.writer.take()) {
            let _ = thread.join();
        }
    }
}
