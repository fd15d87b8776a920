//! The writer: one thread that takes whatever waits, commits it together, rings the bell and answers. Knows no reads.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use rusqlite::{Connection, ErrorCode, OptionalExtension, params};
use tokio::sync::mpsc::error::TryRecvError;
use tokio::sync::{Notify, mpsc, oneshot};
use tracing::{error, warn};

use crate::domain::attachment::Attachment;
use crate::domain::run::{Outcome, Run, RunId, now};
use crate::domain::webhook::DeliveryId;
use crate::ssrf;
use crate::store::outbox::{AttemptOutcome, AttemptRecord, MAX_STORED_ATTEMPTS, NewDelivery};
use crate::store::sqlite::WriterResources;
use crate::store::sqlite::attachments;
use crate::store::sqlite::checkpoint::{self, Checkpointer};
use crate::store::sqlite::clock::ClockSkew;
use crate::store::sqlite::definition_cache::{self, DefinitionCache};
use crate::store::sqlite::delete::{self, DeleteProgress, Deletions};
use crate::store::sqlite::failed_runs::FailedRuns;
use crate::store::sqlite::files::{OpenFiles, Reserve};
use crate::store::sqlite::reader_pool::store_error;
use crate::store::sqlite::rows::{self, Hash};
use crate::store::sqlite::schema::LOCK_TIMEOUT;
use crate::store::sqlite::statements::Statements;
use crate::store::sqlite::vacuum::Vacuum;
use crate::store::{
    Change, FinishedRun, HasSubscribersFn, IdempotencyClaim, NewRun, Progress, PublishFn,
    StoreError, Write, WriteFailedFn,
};

/// Writes that may wait for the writer; whoever has one more waits himself.
pub const MAX_QUEUED_WRITES: usize = 4096;
/// Most writes of one commit.
const MAX_BATCH_WRITES: usize = 256;
/// SQLite takes no text above 10⁹ bytes; what is far below cannot fail for its length in the middle of a batch.
const MAX_WRITE_BYTES: usize = 500_000_000;
/// How long a batch waits for another process's lock after a batch has failed.
const RETRY_LOCK_TIMEOUT: Duration = Duration::from_millis(200);
/// Trees whose last number is kept at hand; the others' are looked up in the log.
const MAX_CACHED_SEQS: usize = 16_384;

/// What the writer is asked for, and who waits for it.
pub struct Job {
    /// What to do.
    pub task: Task,
    /// Nobody, where it was posted.
    pub reply: Option<oneshot::Sender<Result<u64, StoreError>>>,
}

/// What the writer can do.
pub enum Task {
    /// Commits a write; answers the number of its last event.
    Write(EncodedWrite),
    /// Writes down a try of a delivery and answers 0.
    RecordAttempt(AttemptRecord),
    /// Makes a run's delivery due now; answers 1, or 0 where there is none such.
    Resend(RunId, DeliveryId),
    /// Removes a root with its tree, of a large one at first a part: nobody sees the rest any more, which goes by and by.
    /// Answers 1, or 0 where there is no such root.
    Delete(RunId),
    /// Removes a few unused definitions and gives a little unused space back; answers 1 where there may be more, else 0.
    Vacuum,
    /// Takes writes of these trees again after a posted one failed; answers 0.
    ClearFailed(Vec<RunId>),
    /// Writes something and answers 0.
    Check,
    /// Commits what still waits and ends, after the readers have.
    Close(Vec<JoinHandle<()>>),
}

impl Task {
    /// Whether it makes deliveries due.
    fn has_deliveries(&self) -> bool {
        match self {
            Self::Write(write) => {
                let others = write.others.iter().map(|(other, _)| other);
                std::iter::once(write)
                    .chain(others)
                    .any(|write| !write.deliveries.is_empty())
            }
            Self::Resend(..) => true,
            _ => false,
        }
    }

    /// About how many bytes it writes.
    fn bytes(&self) -> usize {
        match self {
            Self::Write(write) => write.bytes(),
            Self::Delete(_) | Self::Vacuum => 64 << 10,
            _ => 0,
        }
    }
}

/// A write whose steps and events are text already: callers do that on their own time.
pub struct EncodedWrite {
    run: RunId,
    root: RunId,
    change: Change,
    steps: Option<String>,
    events: Option<String>,
    event_count: u64,
    /// The pictures and files in its steps, each once.
    attachments: Vec<Attachment>,
    deliveries: Vec<NewDelivery>,
    /// Writes about other runs in the same transaction, each with the number of its last event once that is known.
    others: Vec<(EncodedWrite, Cell<u64>)>,
}

impl EncodedWrite {
    /// Turns steps and events into what lies in the table.
    pub fn encode(write: Write) -> Result<Self, StoreError> {
        debug_assert!(
            write.events.iter().all(|event| event.run_id == write.run),
            "a write's events are about its run"
        );
        let encoded = Self {
            run: write.run,
            root: write.root,
            change: write.change,
            steps: rows::steps_value(&write.steps)?,
            events: rows::events_value(&write.events)?,
            event_count: write.events.len() as u64,
            attachments: attachments::distinct(&write.steps),
            deliveries: write.deliveries,
            others: Vec::new(),
        };
        if encoded.bytes() > MAX_WRITE_BYTES {
            return Err(StoreError::Backend(format!(
                "a write of {} is larger than {MAX_WRITE_BYTES} bytes",
                encoded.run
            )));
        }
        Ok(encoded)
    }

    /// As [`Parcel::pack`], with writes about other runs that are committed with it.
    pub fn encode_with(write: Write, others: Vec<Write>) -> Result<Self, StoreError> {
        let others = others
            .into_iter()
            .map(|other| Ok((Self::encode(other)?, Cell::new(0))));
        Ok(Self {
            others: others.collect::<Result<_, StoreError>>()?,
            ..Self::encode(write)?
        })
    }

    fn bytes(&self) -> usize {
        let len = |text: &Option<String>| text.as_ref().map_or(0, String::len);
        let data = self.attachments.iter().filter_map(|it| it.data.as_ref());
        let data_bytes: usize = data.map(Bytes::len).sum();
        len(&self.steps) + len(&self.events) + self.change_bytes() + data_bytes
    }

    fn change_bytes(&self) -> usize {
        match &self.change {
            Change::Create(new_run) => {
                let run = &new_run.run;
                run.input.text_bytes() + run.task.as_ref().map_or(0, String::len)
            }
            Change::Finish(finished) => match &finished.outcome {
                Outcome::Completed { content, .. } => content.len(),
                Outcome::Failed { partial, .. } | Outcome::Cancelled { partial, .. } => {
                    partial.as_ref().map_or(0, String::len)
                }
            },
            _ => 0,
        }
    }
}

/// Why a write was not done.
enum WriteError {
    /// By its own doing: the others of its batch are none the worse.
    Rejected(StoreError),
    /// By the engine's: nothing of the batch is committed.
    Database(rusqlite::Error),
}

impl From<rusqlite::Error> for WriteError {
    fn from(error: rusqlite::Error) -> Self {
        Self::Database(error)
    }
}

/// Whether the engine refused what was written, so that another write of the same batch may well succeed. Otherwise the
/// database is locked, the disk is full or fails.
fn is_single_write_error(error: &rusqlite::Error) -> bool {
    matches!(
        error.sqlite_error_code(),
        Some(
            ErrorCode::ConstraintViolation
                | ErrorCode::TooBig
                | ErrorCode::TypeMismatch
                | ErrorCode::DatabaseCorrupt
        )
    )
}

/// What is rung after a commit.
pub struct WriterCallbacks {
    /// For events.
    pub publish: PublishFn,
    /// Whether anyone listens to it.
    pub has_subscribers: HasSubscribersFn,
    /// For deliveries.
    pub delivery_notify: Arc<Notify>,
    /// For posted writes that failed.
    pub on_write_failed: Arc<OnceLock<WriteFailedFn>>,
}

/// Serves until it is told to close or nobody is left to ask, then closes the database and lets go of the lock.
pub fn run_writer(
    resources: WriterResources,
    reserve: Reserve,
    mut jobs: mpsc::Receiver<Job>,
    callbacks: &WriterCallbacks,
    commit_count: &AtomicU64,
) {
    let WriterResources {
        connection,
        open_files: opened,
        checkpointer,
        lock,
    } = resources;
    let close_request = match Writer::new(&connection, opened, reserve, commit_count) {
        Ok(mut writer) => writer.run(checkpointer, &mut jobs, callbacks),
        Err(error) => {
            error!(error = %error, "The store's writer could not start: {error}");
            None
        }
    };
    jobs.close();
    let (readers, reply) = close_request.unwrap_or_default();
    for reader in readers {
        if reader.join().is_err() {
            warn!("A reader of the store had panicked");
        }
    }
    let checkpoint = connection
        .query_row("PRAGMA wal_checkpoint(truncate)", [], |_| Ok(()))
        .and_then(|()| connection.close().map_err(|(_, error)| error));
    if let Err(error) = checkpoint {
        warn!(error = %error, "The store's log could not be folded in, the next start does it: {error}");
    }
    drop(lock);
    if let Some(reply) = reply {
        let _ = reply.send(Ok(0));
    }
}

type CloseRequest = (
    Vec<JoinHandle<()>>,
    Option<oneshot::Sender<Result<u64, StoreError>>>,
);

struct Writer<'c> {
    connection: &'c Connection,
    sql: Statements<'c>,
    /// The last number of trees at work.
    last_seqs: HashMap<RunId, u64>,
    definition_cache: DefinitionCache,
    failed_runs: FailedRuns,
    clock_skew: ClockSkew,
    deletions: Deletions,
    vacuum: Vacuum,
    lock_timeout: Duration,
    open_files: OpenFiles,
    reserve: Reserve,
    /// Transactions so far, for whoever asks.
    commit_count: &'c AtomicU64,
}

impl<'c> Writer<'c> {
    fn new(
        connection: &'c Connection,
        open_files: OpenFiles,
        reserve: Reserve,
        commit_count: &'c AtomicU64,
    ) -> rusqlite::Result<Self> {
        Ok(Self {
            open_files,
            reserve,
            connection,
            sql: Statements::new(connection)?,
            last_seqs: HashMap::new(),
            definition_cache: DefinitionCache::default(),
            failed_runs: FailedRuns::default(),
            clock_skew: ClockSkew::read(connection)?,
            deletions: Deletions::load(connection)?,
            vacuum: Vacuum::new(connection)?,
            lock_timeout: LOCK_TIMEOUT,
            commit_count,
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
                // What others have handed over until now is still taken; from here on they are refused.
                jobs.close();
                close_request = Some((readers, reply));
            }
            let results = self.commit_batch(&batch);
            for (job, result) in batch.iter().zip(&results) {
                publish_all(job, result, callbacks);
            }
            if batch.iter().any(|job| job.task.has_deliveries()) {
                callbacks.delivery_notify.notify_one();
            }
            let writes = batch.len();
            let bytes = batch.iter().map(|job| job.task.bytes()).sum();
            for (job, result) in batch.drain(..).zip(results) {
                match job.reply {
                    // The caller may have gone: the write stands all the same.
                    Some(reply) => drop(reply.send(result)),
                    None => report_failed_write(&job.task, result, callbacks),
                }
            }
            checkpointer.record_commit(writes, bytes, self.connection);
            if self.reserve.is_disk_full() {
                checkpoint::checkpoint_now(self.connection);
            }
            self.vacuum.truncate_wal(self.connection);
            if self.deletions.is_due(writes) {
                self.delete_next_part();
                checkpointer.record_commit(1, delete::PART_BYTES, self.connection);
            }
        }
        close_request
    }

    /// Takes what waits into the batch. Waits for it only where there is nothing else to do; false at the end.
    fn fill_batch(&self, jobs: &mut mpsc::Receiver<Job>, batch: &mut Vec<Job>) -> bool {
        if !self.deletions.is_due(0) {
            return jobs.blocking_recv_many(batch, MAX_BATCH_WRITES) > 0;
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

    /// Removes a part more of a tree that is being removed, in a transaction of its own.
    fn delete_next_part(&mut self) {
        let Some(root) = self.deletions.next() else {
            return;
        };
        let result = self
            .sql
            .begin
            .execute([])
            .and_then(|_| self.delete_part(root))
            .and_then(|progress| self.sql.commit.execute([]).map(|_| progress));
        match result {
            Ok(progress) => {
                self.commit_count.fetch_add(1, Ordering::Relaxed);
                if progress == DeleteProgress::Done {
                    self.deletions.remove(root);
                }
            }
            Err(error) => {
                self.roll_back();
                self.deletions.pause();
                warn!(run.id = %root, run.root = %root, error = %error, "The tree of {root} could not be removed further, trying again after the next write: {error}");
            }
        }
    }

    /// Removes a part of a tree, whose root is marked as long as there is more of it.
    fn delete_part(&mut self, root: RunId) -> rusqlite::Result<DeleteProgress> {
        let progress = delete::delete_part(&mut self.sql, &mut self.definition_cache, root)?;
        let id = params![rows::id_bytes(&root)];
        match progress {
            DeleteProgress::More => self.sql.mark_deletion.execute(id)?,
            DeleteProgress::Done => self.sql.unmark_deletion.execute(id)?,
        };
        Ok(progress)
    }

    fn roll_back(&mut self) {
        if !self.connection.is_autocommit()
            && let Err(error) = self.connection.execute_batch("ROLLBACK")
        {
            error!(error = %error, "The store could not roll back: {error}");
        }
        self.last_seqs.clear();
        self.definition_cache.clear();
        // What was written of these is gone: the next run writes the one again, and the table knows the others.
        self.clock_skew = ClockSkew { lead: 0, lag: 0 };
        self.deletions = Deletions::load(self.connection).unwrap_or_default();
    }

    /// Commits a batch. After a failure of the engine nothing of it is committed, unless that is one write's alone.
    fn commit_batch(&mut self, batch: &[Job]) -> Vec<Result<u64, StoreError>> {
        let is_check_requested = (batch.iter()).any(|job| matches!(job.task, Task::Check));
        if let Err(error) = self.open_files.check(is_check_requested) {
            return self.reject_batch(batch, &error);
        }
        self.reserve.reclaim(is_check_requested);
        let mut results = Vec::with_capacity(batch.len());
        let Err(error) = self.try_commit_batch(batch, &mut results) else {
            self.set_lock_timeout(LOCK_TIMEOUT);
            return results;
        };
        // What waits behind a lock is refused soon: whoever waits for it is better off with an answer.
        self.set_lock_timeout(RETRY_LOCK_TIMEOUT);
        self.roll_back();
        if batch.len() > 1 && is_single_write_error(&error) {
            // The others of the batch have not failed: whichever it was is found by halves.
            let (first, second) = batch.split_at(batch.len() / 2);
            let mut results = self.commit_batch(first);
            results.extend(self.commit_batch(second));
            return results;
        }
        let error = store_error(error);
        if matches!(error, StoreError::DiskFull) && !self.reserve.is_disk_full() {
            error!(
                "The disk is full: until there is space again the store takes nothing but deletions"
            );
            self.reserve.release();
            // Deletions among these have the reserve now.
            return self.commit_batch(batch);
        }
        self.reject_batch(batch, &error)
    }

    /// Nothing of a batch is written.
    fn reject_batch(&mut self, batch: &[Job], error: &StoreError) -> Vec<Result<u64, StoreError>> {
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
            Err(error) => warn!(error = %error, "The store keeps its patience with locks: {error}"),
        }
    }

    fn try_commit_batch(
        &mut self,
        batch: &[Job],
        results: &mut Vec<Result<u64, StoreError>>,
    ) -> rusqlite::Result<()> {
        if batch.is_empty() {
            return Ok(());
        }
        self.sql.begin.execute([])?;
        for job in batch {
            match self.execute(&job.task) {
                Ok(number) => results.push(Ok(number)),
                Err(WriteError::Rejected(error)) => {
                    // A refused key leaves no gap: the run never was.
                    if !matches!(error, StoreError::AlreadyClaimed(_)) {
                        self.mark_failed(job);
                    }
                    results.push(Err(error));
                }
                Err(WriteError::Database(error)) => return Err(error),
            }
        }
        self.sql.commit.execute([])?;
        self.commit_count.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Remembers the tree of a posted write that failed.
    fn mark_failed(&mut self, job: &Job) {
        if let (Task::Write(write), None) = (&job.task, &job.reply) {
            self.failed_runs.insert(write.root);
        }
    }

    fn execute(&mut self, task: &Task) -> Result<u64, WriteError> {
        let frees_space = matches!(task, Task::Delete(_) | Task::Vacuum | Task::Close(_));
        if self.reserve.is_disk_full() && !frees_space {
            return Err(WriteError::Rejected(StoreError::DiskFull));
        }
        match task {
            Task::Write(write) => self.apply_all(write),
            Task::RecordAttempt(record) => self.record_attempt(record),
            Task::Resend(run, id) => self.resend(*run, *id),
            Task::Delete(root) => self.delete(*root),
            Task::Vacuum => self.vacuum_step(),
            Task::ClearFailed(roots) => {
                roots.iter().for_each(|root| self.failed_runs.remove(*root));
                Ok(0)
            }
            Task::Check => {
                self.sql.write_check.execute([])?;
                Ok(0)
            }
            Task::Close(_) => Ok(0),
        }
    }

    /// A write, and those that go with it.
    fn apply_all(&mut self, write: &EncodedWrite) -> Result<u64, WriteError> {
        let last_seq = self.apply(write)?;
        for (other, other_last_seq) in &write.others {
            match self.apply(other) {
                Ok(last_seq) => other_last_seq.set(last_seq),
                Err(WriteError::Rejected(error)) => {
                    warn!(run.id = %other.run, run.root = %other.root, error = %error, "A write about {} came too late: {error}", other.run);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(last_seq)
    }

    /// Whatever can be wrong with a write shows before its first change, or in that change, which then is none.
    fn apply(&mut self, write: &EncodedWrite) -> Result<u64, WriteError> {
        if self.failed_runs.contains(write.root) {
            return Err(WriteError::Rejected(StoreError::Suspended));
        }
        let opens_root = write.run == write.root && matches!(write.change, Change::Create(_));
        let previous_seq = if opens_root {
            0
        } else {
            self.last_seq(write.root)?
        };
        let last_seq = previous_seq + write.event_count;
        // 0 leaves the run's own last number as it is.
        let run_seq = if write.event_count > 0 { last_seq } else { 0 };
        if !self.update_run(write, run_seq)? {
            return Ok(0);
        }
        if write.event_count > 0 || write.steps.is_some() {
            self.sql.insert_entry.execute(params![
                rows::id_bytes(&write.root),
                rows::signed(last_seq),
                rows::id_bytes(&write.run),
                rows::signed(write.event_count),
                write.events,
                write.steps,
            ])?;
        }
        for attachment in &write.attachments {
            attachments::insert(&mut self.sql, write.run, attachment)?;
        }
        for delivery in &write.deliveries {
            self.insert_delivery(write.run, delivery)?;
        }
        self.cache_last_seq(write, last_seq);
        Ok(run_seq)
    }

    /// Changes the run's record; false where the write is to be ignored.
    fn update_run(&mut self, write: &EncodedWrite, last_seq: u64) -> Result<bool, WriteError> {
        let id = rows::id_bytes(&write.run);
        let last_seq = rows::signed(last_seq);
        let changed = match &write.change {
            Change::Create(new_run) => {
                self.insert_run(new_run, last_seq)?;
                1
            }
            Change::Start { at, deadline } => self.sql.start_run.execute(params![
                id,
                last_seq,
                at.as_millisecond(),
                deadline.0.as_millisecond(),
                rows::signed(deadline.1),
            ])?,
            Change::Pause {
                since,
                waiting_for: on,
            } => {
                let waiting_for = serde_json::to_string(on).ok();
                let since = since.as_millisecond();
                self.sql
                    .pause_run
                    .execute(params![id, last_seq, since, waiting_for])?
            }
            Change::Unpause { deadline } => self.sql.unpause_run.execute(params![
                id,
                last_seq,
                deadline.0.as_millisecond(),
                rows::signed(deadline.1),
            ])?,
            Change::Resume => self.sql.resume_run.execute(params![id, last_seq])?,
            Change::Unchanged => self.sql.update_last_event.execute(params![id, last_seq])?,
            Change::Progress(progress) => self.update_progress(id, last_seq, progress)?,
            Change::CountToolCall => self.sql.count_tool_call.execute(params![id, last_seq])?,
            Change::RequestCancel { reason } => self
                .sql
                .request_cancel
                .execute(params![id, last_seq, reason])?,
            Change::Finish(finished) => self.finish_run(id, last_seq, finished)?,
        };
        if changed > 0 {
            return Ok(true);
        }
        if !self.sql.has_run.exists(params![id])? {
            return Err(WriteError::Rejected(StoreError::RunNotFound(write.run)));
        }
        if matches!(write.change, Change::RequestCancel { .. }) {
            return Ok(false);
        }
        Err(WriteError::Rejected(StoreError::AlreadyTerminal(write.run)))
    }

    fn insert_run(&mut self, new_run: &NewRun, last_seq: i64) -> Result<(), WriteError> {
        if let Some(claim) = &new_run.claim {
            self.check_unclaimed(claim)?;
        }
        let run = &new_run.run;
        let resume_state = &new_run.resume_state;
        let definition = self.store_definition(&resume_state.definition, run.id)?;
        let input = rows::input_value(&run.input);
        let is_inline = rows::is_inline_input(run);
        let usage = rows::usage_values(&run.usage);
        let labels = rows::labels_value(&run.labels);
        let webhooks = Some(&resume_state.webhooks).filter(|webhooks| !webhooks.is_empty());
        let webhooks = webhooks.map(|webhooks| serde_json::to_string(webhooks).unwrap_or_default());
        let inserted = self.sql.insert_run.execute(params![
            rows::id_bytes(&run.id),
            rows::id_bytes(&run.root_id),
            run.parent_id.as_ref().map(rows::id_bytes),
            run.parent_id.is_some(),
            run.depth.0,
            run.status.as_str(),
            run.agent,
            run.created_at.as_millisecond(),
            run.started_at.map(|at| at.as_millisecond()),
            last_seq,
            run.attempt,
            run.turns,
            usage[0],
            usage[1],
            usage[2],
            usage[3],
            usage[4],
            usage[5],
            usage[6],
            usage[7],
            run.model,
            run.stop_reason,
            run.agent_version,
            run.tool_call_id,
            run.label,
            run.completion_status,
            labels,
            run.cancel_reason,
            is_inline.then_some(&input),
            run.task.as_ref().filter(|_| is_inline),
            run.owner,
            definition,
            resume_state.deadline.map(|(at, _)| at.as_millisecond()),
            resume_state.deadline.map(|(_, bound)| rows::signed(bound)),
            rows::signed(resume_state.timeout),
            resume_state.stream,
            webhooks,
            run.session,
            resume_state.workdir.map(|id| id.device.cast_signed()),
            resume_state.workdir.map(|id| id.inode.cast_signed()),
        ]);
        match inserted {
            Err(error) if error.sqlite_error_code() == Some(ErrorCode::ConstraintViolation) => {
                return Err(WriteError::Rejected(StoreError::Backend(format!(
                    "{} is in the store already",
                    run.id
                ))));
            }
            other => other?,
        };
        if !is_inline {
            self.sql
                .insert_text
                .execute(params![rows::id_bytes(&run.id), input, run.task])?;
        }
        for (key, value) in &run.labels {
            self.sql
                .insert_label
                .execute(params![key, value, rows::id_bytes(&run.id)])?;
        }
        if let Some(claim) = &new_run.claim {
            self.insert_claim(claim, run.id)?;
        }
        self.update_clock_skew(run)
    }

    /// Writes down how far the run's id is from its record's time, where no run's was as far.
    fn update_clock_skew(&mut self, run: &Run) -> Result<(), WriteError> {
        let created_ms = run.created_at.as_millisecond();
        let skew = self
            .clock_skew
            .including(delete::created_ms(run.id), created_ms);
        if skew != self.clock_skew {
            // Never less than what is written, which after a failure is not known.
            let stored = ClockSkew::read(self.connection)?;
            self.clock_skew = stored.max(skew);
            self.clock_skew.write(self.connection)?;
        }
        Ok(())
    }

    /// Fails where the key has accepted a run that it still stands for.
    fn check_unclaimed(&mut self, claim: &IdempotencyClaim) -> Result<(), WriteError> {
        let key = &claim.key;
        let now = now().as_millisecond();
        let key_params = params![key.credential, key.route, key.key, now];
        let claimed = self
            .sql
            .find_claim
            .query_row(key_params, rows::claimed_run)
            .optional()?;
        claimed.map_or(Ok(()), |claimed| {
            Err(WriteError::Rejected(StoreError::AlreadyClaimed(claimed)))
        })
    }

    fn insert_claim(&mut self, claim: &IdempotencyClaim, run: RunId) -> rusqlite::Result<()> {
        self.sql
            .delete_expired_claims
            .execute([now().as_millisecond()])?;
        let key = &claim.key;
        self.sql
            .upsert_claim
            .execute(params![
                key.credential,
                key.route,
                key.key,
                rows::id_bytes(&run),
                claim.body_hash,
                claim.expires_at.as_millisecond(),
            ])
            .map(drop)
    }

    /// What the definition is known by in the table, which knows from now on that this run has it.
    fn store_definition(&mut self, text: &Arc<str>, run: RunId) -> rusqlite::Result<Hash> {
        let accepted_ms = delete::created_ms(run);
        if let Some(hash) = self.definition_cache.get(text, accepted_ms) {
            return Ok(hash);
        }
        let hash = definition_cache::hash(text);
        let used_until = DefinitionCache::used_until(accepted_ms);
        self.sql.upsert_definition.execute(params![
            hash,
            text,
            used_until,
            rows::id_bytes(&run)
        ])?;
        self.definition_cache.insert(text, hash, accepted_ms);
        Ok(hash)
    }

    fn update_progress(
        &mut self,
        id: &[u8; 16],
        last_seq: i64,
        progress: &Progress,
    ) -> rusqlite::Result<usize> {
        let usage = rows::usage_values(&progress.usage);
        self.sql.update_progress.execute(params![
            id,
            last_seq,
            progress.turns,
            progress.model,
            progress.stop_reason,
            usage[0],
            usage[1],
            usage[2],
            usage[3],
            usage[4],
            usage[5],
            usage[6],
            usage[7],
        ])
    }

    fn finish_run(
        &mut self,
        id: &[u8; 16],
        last_seq: i64,
        finished: &FinishedRun,
    ) -> rusqlite::Result<usize> {
        let structured = matches!(
            finished.outcome,
            Outcome::Completed {
                structured: true,
                ..
            }
        );
        let (content, partial, failure, reason) = match &finished.outcome {
            Outcome::Completed { content, .. } => (Some(content), None, None, None),
            Outcome::Failed { failure, partial } => (None, partial.as_ref(), Some(failure), None),
            Outcome::Cancelled { reason, partial } => (None, partial.as_ref(), None, Some(reason)),
        };
        let error = failure.map(|failure| serde_json::to_string(failure).unwrap_or_default());
        let progress = &finished.progress;
        let own = rows::usage_values(&progress.usage);
        let tree = rows::usage_values(&finished.tree_usage.usage);
        self.sql.finish_run.execute(params![
            id,
            last_seq,
            progress.turns,
            progress.model,
            progress.stop_reason,
            own[0],
            own[1],
            own[2],
            own[3],
            own[4],
            own[5],
            own[6],
            own[7],
            finished.outcome.status().as_str(),
            finished.finished_at.as_millisecond(),
            content,
            partial,
            error,
            reason,
            rows::signed(finished.tree_usage.runs),
            tree[0],
            tree[1],
            tree[2],
            tree[3],
            tree[4],
            tree[5],
            tree[6],
            tree[7],
            structured.then_some(true),
            finished.completion_status,
        ])
    }

    fn insert_delivery(&mut self, run: RunId, delivery: &NewDelivery) -> rusqlite::Result<()> {
        let webhook = &delivery.webhook;
        let host = ssrf::parse_url(&webhook.url).ok();
        let host = host.as_ref().and_then(|url| url.host_str());
        self.sql.insert_delivery.execute(params![
            delivery.id.0.as_bytes(),
            rows::id_bytes(&run),
            delivery.event,
            ssrf::normalize_host(host.unwrap_or_default()),
            webhook.url,
            webhook.secret_env,
            delivery.body,
            delivery.created_at.as_millisecond(),
        ])?;
        Ok(())
    }

    fn record_attempt(&mut self, record: &AttemptRecord) -> Result<u64, WriteError> {
        let (status, next_at) = match record.outcome {
            AttemptOutcome::Delivered => ("delivered", None),
            AttemptOutcome::RetryAt(at) => ("pending", Some(at.as_millisecond())),
            AttemptOutcome::GivenUp => ("failed", None),
        };
        let attempt = serde_json::to_string(&record.attempt).unwrap_or_default();
        let id = record.id.0.as_bytes();
        self.sql.record_attempt.execute(params![
            id,
            status,
            next_at,
            attempt,
            MAX_STORED_ATTEMPTS as i64,
            record.since.as_millisecond(),
        ])?;
        Ok(0)
    }

    fn resend(&mut self, run: RunId, id: DeliveryId) -> Result<u64, WriteError> {
        let now = now().as_millisecond();
        let ids = params![id.0.as_bytes(), rows::id_bytes(&run), now];
        Ok(self.sql.resend_delivery.execute(ids)? as u64)
    }

    fn delete(&mut self, root: RunId) -> Result<u64, WriteError> {
        let id = params![rows::id_bytes(&root)];
        if !self.sql.has_root.exists(id)? || self.sql.has_deletion.exists(id)? {
            return Ok(0);
        }
        self.last_seqs.remove(&root);
        if let DeleteProgress::More = self.delete_part(root)? {
            self.deletions.add(root);
        }
        Ok(1)
    }

    fn vacuum_step(&mut self) -> Result<u64, WriteError> {
        let has_more =
            delete::delete_unused_definitions(&mut self.sql, &mut self.definition_cache)?;
        let has_more = has_more || self.deletions.is_due(1);
        let is_full = self.reserve.is_disk_full();
        Ok(u64::from(
            self.vacuum.step(self.connection, is_full)? || has_more,
        ))
    }

    /// The last number given in a tree.
    fn last_seq(&mut self, root: RunId) -> Result<u64, WriteError> {
        if let Some(last_seq) = self.last_seqs.get(&root) {
            return Ok(*last_seq);
        }
        let found = self
            .sql
            .last_seq
            .query_row(params![rows::id_bytes(&root)], |row| row.get(0));
        match found {
            Ok(last_seq) => Ok(rows::unsigned(last_seq)),
            Err(rusqlite::Error::QueryReturnedNoRows) => {
                Err(WriteError::Rejected(StoreError::RunNotFound(root)))
            }
            Err(error) => Err(WriteError::Database(error)),
        }
    }

    fn cache_last_seq(&mut self, write: &EncodedWrite, last_seq: u64) {
        if write.run == write.root && matches!(write.change, Change::Finish(_)) {
            self.last_seqs.remove(&write.root);
            return;
        }
        if self.last_seqs.len() >= MAX_CACHED_SEQS {
            self.last_seqs.clear();
        }
        self.last_seqs.insert(write.root, last_seq);
    }
}

/// Tells the listeners of a committed write's events.
fn publish_all(job: &Job, result: &Result<u64, StoreError>, callbacks: &WriterCallbacks) {
    let (Task::Write(write), Ok(last_seq)) = (&job.task, result) else {
        return;
    };
    publish_write(write, *last_seq, callbacks);
    for (other, other_last_seq) in &write.others {
        publish_write(other, other_last_seq.get(), callbacks);
    }
}

fn publish_write(write: &EncodedWrite, last_seq: u64, callbacks: &WriterCallbacks) {
    let Some(lines) = write.events.as_ref().filter(|_| last_seq > 0) else {
        return;
    };
    if (callbacks.has_subscribers)(write.root) {
        (callbacks.publish)(
            write.root,
            rows::events(write.run, last_seq, write.event_count, lines).collect(),
        );
    }
}

/// Tells the log and the tree's owner of a posted write that failed: nobody waits for it.
fn report_failed_write(task: &Task, result: Result<u64, StoreError>, callbacks: &WriterCallbacks) {
    if let (Task::Write(write), Err(error)) = (task, result) {
        let (agent, depth) = write.events.as_deref().and_then(rows::event_agent).unzip();
        warn!(run.id = %write.run, run.root = %write.root, agent, depth, error = %error, "A step of {} was not recorded: {error}", write.run);
        if let Some(on_write_failed) = callbacks.on_write_failed.get() {
            on_write_failed(write.root);
        }
    }
}
