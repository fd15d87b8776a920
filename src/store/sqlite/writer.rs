//! The writer: one thread that takes the queued jobs, commits them together, publishes their events and replies.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rusqlite::Connection;
use tokio::sync::mpsc::error::TryRecvError;
use tokio::sync::{mpsc, oneshot};
use tracing::{error, warn};

use crate::domain::run::RunId;
use crate::instruments::Histogram;
use crate::store::StoreError;
use crate::store::sqlite::checkpoint::{self, Checkpointer};
use crate::store::sqlite::delete::{self, DeleteProgress};
use crate::store::sqlite::error::{WriteError, is_disk_full, is_single_write_error, store_error};
use crate::store::sqlite::executor::Executor;
use crate::store::sqlite::files::{OpenFiles, Reserve};
use crate::store::sqlite::joined_writes::JoinedWrites;
use crate::store::sqlite::lock::Lock;
use crate::store::sqlite::schema::LOCK_TIMEOUT;
use crate::store::write_queue::callbacks::WriterCallbacks;
use crate::store::write_queue::job::{Job, JobResult, Reply, Task};
use crate::store::write_queue::queue::WriterEnd;

/// Largest number of writes of one commit.
const MAX_BATCH_WRITES: usize = 256;
/// How long a batch waits for another process's lock if the batch before has failed.
const RETRY_LOCK_TIMEOUT: Duration = Duration::from_millis(200);

/// What the writer owns while the store is open.
pub struct WriterResources {
    pub connection: Connection,
    pub open_files: OpenFiles,
    pub checkpointer: Checkpointer,
    /// Held until the database is closed.
    pub lock: Lock,
}

/// Serves jobs until it is closed or all senders are dropped. Then it closes the database and releases the lock.
pub fn run_writer(resources: WriterResources, reserve: Reserve, writer_end: WriterEnd) {
    let WriterEnd {
        mut jobs,
        callbacks,
        commits,
    } = writer_end;
    let WriterResources {
        connection,
        open_files,
        checkpointer,
        lock,
    } = resources;
    let close_request = match Writer::new(&connection, open_files, reserve, &commits) {
        Ok(mut writer) => writer.run(checkpointer, &mut jobs, &callbacks),
        Err(error) => {
            error!(error = %error, "The store's writer could not start: {error}");
            None
        }
    };
    jobs.close();
    let (readers, reply) = close_request.unwrap_or_default();
    for reader in readers {
        if reader.join().is_err() {
            warn!("A reader thread of the store had panicked");
        }
    }
    let checkpoint = connection
        .query_row("PRAGMA wal_checkpoint(truncate)", [], |_| Ok(()))
        .and_then(|()| connection.close().map_err(|(_, error)| error));
    if let Err(error) = checkpoint {
        warn!(error = %error, "The store's log could not be copied into the database, the next start does it: {error}");
    }
    drop(lock);
    if let Some(reply) = reply {
        let _ = reply.send(Ok(Reply::Number(0)));
    }
}

type CloseRequest = (Vec<JoinHandle<()>>, Option<oneshot::Sender<JobResult>>);

struct Writer<'c> {
    connection: &'c Connection,
    executor: Executor<'c>,
    lock_timeout: Duration,
    open_files: OpenFiles,
    reserve: Reserve,
    commits: &'c Histogram,
}

impl<'c> Writer<'c> {
    fn new(
        connection: &'c Connection,
        open_files: OpenFiles,
        reserve: Reserve,
        commits: &'c Histogram,
    ) -> rusqlite::Result<Self> {
        Ok(Self {
            connection,
            executor: Executor::new(connection)?,
            lock_timeout: LOCK_TIMEOUT,
            open_files,
            reserve,
            commits,
        })
    }

    fn run(
        &mut self,
        mut checkpointer: Checkpointer,
        jobs: &mut mpsc::Receiver<Job>,
        callbacks: &WriterCallbacks,
    ) -> Option<CloseRequest> {
        let mut close_request = None;
        let mut batch = Vec::with_capacity(MAX_BATCH_WRITES);
        while self.fill_batch(jobs, &mut batch) {
            let close = batch
                .iter()
                .position(|job| matches!(job.task, Task::Close(_)));
            if let Some(Job {
                task: Task::Close(readers),
                reply,
            }) = close.map(|index| batch.remove(index))
            {
                // Jobs that are queued now are still done; later ones are rejected.
                jobs.close();
                close_request = Some((readers, reply));
            }
            let results = self.commit_batch(&batch);
            let is_notifying = self.executor.take_new_notifications();
            let writes = batch.len();
            let bytes = batch.iter().map(|job| job.task.bytes()).sum();
            callbacks.report(&mut batch, results, is_notifying);
            checkpointer.record_commit(writes, bytes, self.connection);
            if self.reserve.is_disk_full() {
                checkpoint::checkpoint_now(self.connection);
            }
            self.executor.vacuum.truncate_wal(self.connection);
            if self.executor.deletions.is_due(writes) {
                self.delete_next_part();
                checkpointer.record_commit(1, delete::PART_BYTES, self.connection);
            }
        }
        close_request
    }

    /// Moves queued jobs into the batch. Blocks only if nothing else is to be done. Returns false if no job will come.
    fn fill_batch(&self, jobs: &mut mpsc::Receiver<Job>, batch: &mut Vec<Job>) -> bool {
        if !self.executor.deletions.is_due(0) {
            if jobs.blocking_recv_many(batch, MAX_BATCH_WRITES) == 0 {
                return false;
            }
            // Threads that wait for this core have more writes: one commit of many costs little more than one of one.
            std::thread::yield_now();
        }
        while batch.len() < MAX_BATCH_WRITES {
            match jobs.try_recv() {
                Ok(job) => batch.push(job),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return !batch.is_empty(),
            }
        }
        true
    }

    /// Removes the next part of a tree that is being deleted, in a transaction of its own.
    fn delete_next_part(&mut self) {
        let Some(root) = self.executor.deletions.next_root() else {
            return;
        };
        let start = Instant::now();
        match self.commit_deletion(root) {
            Ok(progress) => {
                self.commits.observe(start.elapsed());
                if progress == DeleteProgress::Done {
                    self.executor.deletions.remove(root);
                }
            }
            Err(error) => {
                self.roll_back();
                self.executor.deletions.pause();
                if is_disk_full(&error) {
                    self.reserve.release();
                }
                warn!(run.id = %root, run.root = %root, error = %error, "The deletion of {root} failed, trying again after the next write: {error}");
            }
        }
    }

    fn commit_deletion(&mut self, root: RunId) -> rusqlite::Result<DeleteProgress> {
        self.executor.sql.begin.execute(&[])?;
        let progress = self.executor.delete_part(root)?;
        self.executor.sql.commit.execute(&[])?;
        Ok(progress)
    }

    fn roll_back(&mut self) {
        if !self.connection.is_autocommit()
            && let Err(error) = self.connection.execute_batch("ROLLBACK")
        {
            error!(error = %error, "The store could not roll back: {error}");
        }
        self.executor.reset();
    }

    /// Commits a batch. After an error of SQLite nothing of it is committed, unless one write alone causes the error.
    fn commit_batch(&mut self, batch: &[Job]) -> Vec<JobResult> {
        let is_check_requested = (batch.iter()).any(|job| matches!(job.task, Task::Check));
        if let Err(error) = self.open_files.check(is_check_requested) {
            return self.reject_batch(batch, &error);
        }
        self.reserve.reclaim(is_check_requested);
        self.commit_parts(batch)
    }

    /// Commits a batch in as few transactions as possible.
    fn commit_parts(&mut self, batch: &[Job]) -> Vec<JobResult> {
        let mut results = Vec::with_capacity(batch.len());
        let Err(error) = self.try_commit_batch(batch, &mut results) else {
            self.set_lock_timeout(LOCK_TIMEOUT);
            return results;
        };
        // While another process has the lock, callers get an error soon instead of a long wait.
        self.set_lock_timeout(RETRY_LOCK_TIMEOUT);
        self.roll_back();
        if batch.len() > 1 && is_single_write_error(&error) {
            // Finds the write that fails by halving the batch; the others are committed.
            let (first, second) = batch.split_at(batch.len() / 2);
            let mut results = self.commit_parts(first);
            results.extend(self.commit_parts(second));
            return results;
        }
        let error = store_error(error);
        if matches!(error, StoreError::DiskFull) {
            let was_full = self.reserve.is_disk_full();
            if !was_full {
                error!(
                    "The disk is full: until there is space again the store accepts only deletions"
                );
            }
            // Deletions of this batch can use the space of the reserve.
            if self.reserve.release() || !was_full {
                return self.commit_parts(batch);
            }
        }
        self.reject_batch(batch, &error)
    }

    fn reject_batch(&mut self, batch: &[Job], error: &StoreError) -> Vec<JobResult> {
        for job in batch {
            self.mark_failed(job);
        }
        batch.iter().map(|_| Err(error.clone())).collect()
    }

    /// Sets how long a batch waits while another process has the database locked.
    fn set_lock_timeout(&mut self, timeout: Duration) {
        if self.lock_timeout == timeout {
            return;
        }
        match self.connection.busy_timeout(timeout) {
            Ok(()) => self.lock_timeout = timeout,
            Err(error) => {
                warn!(error = %error, "The store's lock timeout could not be changed: {error}");
            }
        }
    }

    fn try_commit_batch(
        &mut self,
        batch: &[Job],
        results: &mut Vec<JobResult>,
    ) -> rusqlite::Result<()> {
        if batch.is_empty() {
            return Ok(());
        }
        let start = Instant::now();
        self.executor.sql.begin.execute(&[])?;
        let is_disk_full = self.reserve.is_disk_full();
        while let Some(job) = batch.get(results.len()) {
            let rest = &batch[results.len()..];
            let joined = JoinedWrites::first_of(rest).filter(|_| !is_disk_full);
            let (count, executed) = match &joined {
                Some(joined) => {
                    let numbers = self.executor.apply_joined(joined);
                    let replies =
                        |numbers: Vec<u64>| numbers.into_iter().map(Reply::Number).collect();
                    (joined.count(), numbers.map(replies))
                }
                None => {
                    let executed = self.executor.execute(&job.task, is_disk_full);
                    (1, executed.map(|reply| vec![reply]))
                }
            };
            match executed {
                Ok(replies) => results.extend(Vec::into_iter(replies).map(Ok)),
                Err(WriteError::Rejected(error)) => {
                    for job in &rest[..count] {
                        // A run that was never accepted has no record with a gap.
                        if !matches!(error, StoreError::AlreadyClaimed(_)) {
                            self.mark_failed(job);
                        }
                        results.push(Err(error.clone()));
                    }
                }
                Err(WriteError::Database(error)) => return Err(error),
            }
        }
        self.executor.flush()?;
        self.executor.sql.commit.execute(&[])?;
        self.commits.observe(start.elapsed());
        Ok(())
    }

    /// Marks the tree of a failed fire-and-forget write: later writes to it are rejected.
    fn mark_failed(&mut self, job: &Job) {
        if let (Task::Write(write), None) = (&job.task, &job.reply) {
            self.executor.failed_runs.insert(write.root);
        }
    }
}
