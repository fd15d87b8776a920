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
use crate::net;
use crate::store::outbox::{KEPT_TRIES, NewDelivery, Then, Tried};
use crate::store::sqlite::Parts;
use crate::store::sqlite::attachments;
use crate::store::sqlite::broken::Broken;
use crate::store::sqlite::checkpoint::{self, Checkpointer};
use crate::store::sqlite::clock::Distance;
use crate::store::sqlite::definitions::{self, Known};
use crate::store::sqlite::files::{Opened, Reserve};
use crate::store::sqlite::readers::failed;
use crate::store::sqlite::removal::{self, Deletions, Left};
use crate::store::sqlite::rows::{self, Hash};
use crate::store::sqlite::schema::LOCK_PATIENCE;
use crate::store::sqlite::shrink::Shrink;
use crate::store::sqlite::statements::Statements;
use crate::store::{
    Bell, Change, Claim, Closing, Gap, Listening, Opening, Progress, StoreError, Write,
};

/// Writes that may wait for the writer; whoever has one more waits himself.
pub const WAITING_WRITES: usize = 4096;
/// Most writes of one commit.
const BATCH: usize = 256;
/// SQLite takes no text above 10⁹ bytes; what is far below cannot fail for its length in the middle of a batch.
const MOST_BYTES: usize = 500_000_000;
/// How long a batch waits for another process's lock after a batch has failed.
const FAILING_LOCK_PATIENCE: Duration = Duration::from_millis(200);
/// Trees whose last number is kept at hand; the others' are looked up in the log.
const NUMBERS_AT_HAND: usize = 16_384;

/// What the writer is asked for, and who waits for it.
pub struct Job {
    /// What to do.
    pub task: Task,
    /// Nobody, where it was posted.
    pub answer: Option<oneshot::Sender<Result<u64, StoreError>>>,
}

/// What the writer can do.
pub enum Task {
    /// Commits a write; answers the number of its last event.
    Write(Parcel),
    /// Writes down a try of a delivery and answers 0.
    Tried(Tried),
    /// Makes a run's delivery due now; answers 1, or 0 where there is none such.
    Resend(RunId, DeliveryId),
    /// Removes a root with its tree, of a large one at first a part: nobody sees the rest any more, which goes by and by.
    /// Answers 1, or 0 where there is no such root.
    Delete(RunId),
    /// Removes a few unused definitions and gives a little unused space back; answers 1 where there may be more, else 0.
    Tidy,
    /// Takes writes of these trees again after a posted one failed; answers 0.
    Mend(Vec<RunId>),
    /// Writes something and answers 0.
    Check,
    /// Commits what still waits and ends, after the readers have.
    Close(Vec<JoinHandle<()>>),
}

impl Task {
    /// Whether it makes deliveries due.
    fn delivers(&self) -> bool {
        match self {
            Self::Write(parcel) => {
                let others = parcel.others.iter().map(|(other, _)| other);
                std::iter::once(parcel)
                    .chain(others)
                    .any(|parcel| !parcel.deliveries.is_empty())
            }
            Self::Resend(..) => true,
            _ => false,
        }
    }

    /// About how many bytes it writes.
    fn bytes(&self) -> usize {
        match self {
            Self::Write(parcel) => parcel.bytes(),
            Self::Delete(_) | Self::Tidy => 64 << 10,
            _ => 0,
        }
    }
}

/// A write whose steps and events are text already: callers do that on their own time.
pub struct Parcel {
    run: RunId,
    root: RunId,
    change: Change,
    steps: Option<String>,
    events: Option<String>,
    count: u64,
    /// The pictures and files in its steps, each once.
    attachments: Vec<Attachment>,
    deliveries: Vec<NewDelivery>,
    /// Writes about other runs in the same transaction, each with the number of its last event once that is known.
    others: Vec<(Parcel, Cell<u64>)>,
}

impl Parcel {
    /// Turns steps and events into what lies in the table.
    pub fn pack(write: Write) -> Result<Self, StoreError> {
        debug_assert!(
            write.events.iter().all(|event| event.run_id == write.run),
            "a write's events are about its run"
        );
        let parcel = Self {
            run: write.run,
            root: write.root,
            change: write.change,
            steps: rows::steps_value(&write.steps)?,
            events: rows::events_value(&write.events)?,
            count: write.events.len() as u64,
            attachments: attachments::of(&write.steps),
            deliveries: write.deliveries,
            others: Vec::new(),
        };
        if parcel.bytes() > MOST_BYTES {
            return Err(StoreError::Engine(format!(
                "a write of {} is larger than {MOST_BYTES} bytes",
                parcel.run
            )));
        }
        Ok(parcel)
    }

    /// As [`Parcel::pack`], with writes about other runs that are committed with it.
    pub fn pack_with(write: Write, others: Vec<Write>) -> Result<Self, StoreError> {
        let others = others
            .into_iter()
            .map(|other| Ok((Self::pack(other)?, Cell::new(0))));
        Ok(Self {
            others: others.collect::<Result<_, StoreError>>()?,
            ..Self::pack(write)?
        })
    }

    fn bytes(&self) -> usize {
        let of = |text: &Option<String>| text.as_ref().map_or(0, String::len);
        let attached = self.attachments.iter().filter_map(|it| it.data.as_ref());
        let attached: usize = attached.map(Bytes::len).sum();
        of(&self.steps) + of(&self.events) + self.change_bytes() + attached
    }

    fn change_bytes(&self) -> usize {
        match &self.change {
            Change::Open(opening) => {
                let run = &opening.run;
                run.input.text_bytes() + run.task.as_ref().map_or(0, String::len)
            }
            Change::Close(closing) => match &closing.outcome {
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
enum Fault {
    /// By its own doing: the others of its batch are none the worse.
    Own(StoreError),
    /// By the engine's: nothing of the batch is committed.
    Engine(rusqlite::Error),
}

impl From<rusqlite::Error> for Fault {
    fn from(error: rusqlite::Error) -> Self {
        Self::Engine(error)
    }
}

/// Whether the engine refused what was written, so that another write of the same batch may well succeed. Otherwise the
/// database is locked, the disk is full or fails.
fn is_of_one_write(error: &rusqlite::Error) -> bool {
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
pub struct Bells {
    /// For events.
    pub bell: Bell,
    /// Whether anyone listens to it.
    pub listening: Listening,
    /// For deliveries.
    pub outbox: Arc<Notify>,
    /// For posted writes that failed.
    pub gap: Arc<OnceLock<Gap>>,
}

/// Serves until it is told to close or nobody is left to ask, then closes the database and lets go of the lock.
pub fn serve(
    parts: Parts,
    reserve: Reserve,
    mut jobs: mpsc::Receiver<Job>,
    bells: &Bells,
    commits: &AtomicU64,
) {
    let Parts {
        connection,
        opened,
        checkpointer,
        lock,
    } = parts;
    let ended = match Writer::new(&connection, opened, reserve, commits) {
        Ok(mut writer) => writer.work(checkpointer, &mut jobs, bells),
        Err(error) => {
            error!(error = %error, "The store's writer could not start: {error}");
            None
        }
    };
    jobs.close();
    let (readers, answer) = ended.unwrap_or_default();
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
    if let Some(answer) = answer {
        let _ = answer.send(Ok(0));
    }
}

type Ending = (
    Vec<JoinHandle<()>>,
    Option<oneshot::Sender<Result<u64, StoreError>>>,
);

struct Writer<'c> {
    connection: &'c Connection,
    sql: Statements<'c>,
    /// The last number of trees at work.
    numbers: HashMap<RunId, u64>,
    definitions: Known,
    broken: Broken,
    distance: Distance,
    deletions: Deletions,
    shrink: Shrink,
    lock_patience: Duration,
    opened: Opened,
    reserve: Reserve,
    /// Transactions so far, for whoever asks.
    commits: &'c AtomicU64,
}

impl<'c> Writer<'c> {
    fn new(
        connection: &'c Connection,
        opened: Opened,
        reserve: Reserve,
        commits: &'c AtomicU64,
    ) -> rusqlite::Result<Self> {
        Ok(Self {
            opened,
            reserve,
            connection,
            sql: Statements::new(connection)?,
            numbers: HashMap::new(),
            definitions: Known::default(),
            broken: Broken::default(),
            distance: Distance::read(connection)?,
            deletions: Deletions::read(connection)?,
            shrink: Shrink::of(connection)?,
            lock_patience: LOCK_PATIENCE,
            commits,
        })
    }

    fn work(
        &mut self,
        mut checkpointer: Checkpointer,
        jobs: &mut mpsc::Receiver<Job>,
        bells: &Bells,
    ) -> Option<Ending> {
        let mut ending = None;
        let mut batch = Vec::with_capacity(BATCH);
        while self.receive(jobs, &mut batch) {
            let close = batch
                .iter()
                .position(|job| matches!(job.task, Task::Close(_)));
            if let Some(Job {
                task: Task::Close(readers),
                answer,
            }) = close.map(|place| batch.remove(place))
            {
                // What others have handed over until now is still taken; from here on they are refused.
                jobs.close();
                ending = Some((readers, answer));
            }
            let results = self.commit(&batch);
            for (job, result) in batch.iter().zip(&results) {
                ring(job, result, bells);
            }
            if batch.iter().any(|job| job.task.delivers()) {
                bells.outbox.notify_one();
            }
            let writes = batch.len();
            let bytes = batch.iter().map(|job| job.task.bytes()).sum();
            for (job, result) in batch.drain(..).zip(results) {
                match job.answer {
                    // The caller may have gone: the write stands all the same.
                    Some(answer) => drop(answer.send(result)),
                    None => report(&job.task, result, bells),
                }
            }
            checkpointer.committed(writes, bytes, self.connection);
            if self.reserve.is_full() {
                checkpoint::at_once(self.connection);
            }
            self.shrink.settle(self.connection);
            if self.deletions.is_due(writes) {
                self.delete_further();
                checkpointer.committed(1, removal::PART_BYTES, self.connection);
            }
        }
        ending
    }

    /// Takes what waits into the batch. Waits for it only where there is nothing else to do; false at the end.
    fn receive(&self, jobs: &mut mpsc::Receiver<Job>, batch: &mut Vec<Job>) -> bool {
        if !self.deletions.is_due(0) {
            return jobs.blocking_recv_many(batch, BATCH) > 0;
        }
        while batch.len() < BATCH {
            match jobs.try_recv() {
                Ok(job) => batch.push(job),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return !batch.is_empty(),
            }
        }
        true
    }

    /// Removes a part more of a tree that is being removed, in a transaction of its own.
    fn delete_further(&mut self) {
        let Some(root) = self.deletions.next() else {
            return;
        };
        let removed = self
            .sql
            .begin
            .execute([])
            .and_then(|_| self.remove(root))
            .and_then(|left| self.sql.commit.execute([]).map(|_| left));
        match removed {
            Ok(left) => {
                self.commits.fetch_add(1, Ordering::Relaxed);
                if left == Left::Nothing {
                    self.deletions.end(root);
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
    fn remove(&mut self, root: RunId) -> rusqlite::Result<Left> {
        let left = removal::remove_part(&mut self.sql, &mut self.definitions, root)?;
        let id = params![rows::bytes(&root)];
        match left {
            Left::More => self.sql.mark_deletion.execute(id)?,
            Left::Nothing => self.sql.end_deletion.execute(id)?,
        };
        Ok(left)
    }

    fn roll_back(&mut self) {
        if !self.connection.is_autocommit()
            && let Err(error) = self.connection.execute_batch("ROLLBACK")
        {
            error!(error = %error, "The store could not roll back: {error}");
        }
        self.numbers.clear();
        self.definitions.clear();
        // What was written of these is gone: the next run writes the one again, and the table knows the others.
        self.distance = Distance { lead: 0, lag: 0 };
        self.deletions = Deletions::read(self.connection).unwrap_or_default();
    }

    /// Commits a batch. After a failure of the engine nothing of it is committed, unless that is one write's alone.
    fn commit(&mut self, batch: &[Job]) -> Vec<Result<u64, StoreError>> {
        let is_checked = (batch.iter()).any(|job| matches!(job.task, Task::Check));
        if let Err(error) = self.opened.check(is_checked) {
            return self.refuse(batch, &error);
        }
        self.reserve.take_again(is_checked);
        let mut results = Vec::with_capacity(batch.len());
        let Err(error) = self.try_commit(batch, &mut results) else {
            self.wait_for_locks(LOCK_PATIENCE);
            return results;
        };
        // What waits behind a lock is refused soon: whoever waits for it is better off with an answer.
        self.wait_for_locks(FAILING_LOCK_PATIENCE);
        self.roll_back();
        if batch.len() > 1 && is_of_one_write(&error) {
            // The others of the batch have not failed: whichever it was is found by halves.
            let (first, second) = batch.split_at(batch.len() / 2);
            let mut results = self.commit(first);
            results.extend(self.commit(second));
            return results;
        }
        let error = failed(error);
        if matches!(error, StoreError::Full) && !self.reserve.is_full() {
            error!(
                "The disk is full: until there is space again the store takes nothing but deletions"
            );
            self.reserve.give_up();
            // Deletions among these have the reserve now.
            return self.commit(batch);
        }
        self.refuse(batch, &error)
    }

    /// Nothing of a batch is written.
    fn refuse(&mut self, batch: &[Job], error: &StoreError) -> Vec<Result<u64, StoreError>> {
        for job in batch {
            self.note_gap(job);
        }
        batch.iter().map(|_| Err(error.clone())).collect()
    }

    /// Sets how long a batch waits while another process has the database locked.
    fn wait_for_locks(&mut self, patience: Duration) {
        if self.lock_patience == patience {
            return;
        }
        match self.connection.busy_timeout(patience) {
            Ok(()) => self.lock_patience = patience,
            Err(error) => warn!(error = %error, "The store keeps its patience with locks: {error}"),
        }
    }

    fn try_commit(
        &mut self,
        batch: &[Job],
        results: &mut Vec<Result<u64, StoreError>>,
    ) -> rusqlite::Result<()> {
        if batch.is_empty() {
            return Ok(());
        }
        self.sql.begin.execute([])?;
        for job in batch {
            match self.perform(&job.task) {
                Ok(number) => results.push(Ok(number)),
                Err(Fault::Own(error)) => {
                    // A refused key leaves no gap: the run never was.
                    if !matches!(error, StoreError::Claimed(_)) {
                        self.note_gap(job);
                    }
                    results.push(Err(error));
                }
                Err(Fault::Engine(error)) => return Err(error),
            }
        }
        self.sql.commit.execute([])?;
        self.commits.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Remembers the tree of a posted write that failed.
    fn note_gap(&mut self, job: &Job) {
        if let (Task::Write(parcel), None) = (&job.task, &job.answer) {
            self.broken.note(parcel.root);
        }
    }

    fn perform(&mut self, task: &Task) -> Result<u64, Fault> {
        let makes_space = matches!(task, Task::Delete(_) | Task::Tidy | Task::Close(_));
        if self.reserve.is_full() && !makes_space {
            return Err(Fault::Own(StoreError::Full));
        }
        match task {
            Task::Write(parcel) => self.write_all(parcel),
            Task::Tried(tried) => self.tried(tried),
            Task::Resend(run, id) => self.resend(*run, *id),
            Task::Delete(root) => self.delete(*root),
            Task::Tidy => self.tidy(),
            Task::Mend(roots) => {
                roots.iter().for_each(|root| self.broken.mend(*root));
                Ok(0)
            }
            Task::Check => {
                self.sql.check.execute([])?;
                Ok(0)
            }
            Task::Close(_) => Ok(0),
        }
    }

    /// A write, and those that go with it.
    fn write_all(&mut self, parcel: &Parcel) -> Result<u64, Fault> {
        let last = self.write(parcel)?;
        for (other, number) in &parcel.others {
            match self.write(other) {
                Ok(last) => number.set(last),
                Err(Fault::Own(error)) => {
                    warn!(run.id = %other.run, run.root = %other.root, error = %error, "A write about {} came too late: {error}", other.run);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(last)
    }

    /// Whatever can be wrong with a write shows before its first change, or in that change, which then is none.
    fn write(&mut self, parcel: &Parcel) -> Result<u64, Fault> {
        if self.broken.contains(parcel.root) {
            return Err(Fault::Own(StoreError::Suspended));
        }
        let opens_root = parcel.run == parcel.root && matches!(parcel.change, Change::Open(_));
        let before = if opens_root {
            0
        } else {
            self.number(parcel.root)?
        };
        let last = before + parcel.count;
        // 0 leaves the run's own last number as it is.
        let own = if parcel.count > 0 { last } else { 0 };
        if !self.change(parcel, own)? {
            return Ok(0);
        }
        if parcel.count > 0 || parcel.steps.is_some() {
            self.sql.entry.execute(params![
                rows::bytes(&parcel.root),
                rows::signed(last),
                rows::bytes(&parcel.run),
                rows::signed(parcel.count),
                parcel.events,
                parcel.steps,
            ])?;
        }
        for attachment in &parcel.attachments {
            attachments::keep(&mut self.sql, parcel.run, attachment)?;
        }
        for delivery in &parcel.deliveries {
            self.deliver(parcel.run, delivery)?;
        }
        self.keep_number(parcel, last);
        Ok(own)
    }

    /// Changes the run's record; false where the write is to be ignored.
    fn change(&mut self, parcel: &Parcel, last: u64) -> Result<bool, Fault> {
        let id = rows::bytes(&parcel.run);
        let last = rows::signed(last);
        let changed = match &parcel.change {
            Change::Open(opening) => {
                self.open(opening, last)?;
                1
            }
            Change::Start { at, deadline } => self.sql.start.execute(params![
                id,
                last,
                at.as_millisecond(),
                deadline.0.as_millisecond(),
                rows::signed(deadline.1),
            ])?,
            Change::Waiting { since, on } => {
                let on = serde_json::to_string(on).ok();
                let since = since.as_millisecond();
                self.sql.waiting.execute(params![id, last, since, on])?
            }
            Change::Going { deadline } => self.sql.going.execute(params![
                id,
                last,
                deadline.0.as_millisecond(),
                rows::signed(deadline.1),
            ])?,
            Change::Resume => self.sql.resume.execute(params![id, last])?,
            Change::Nothing => self.sql.nothing.execute(params![id, last])?,
            Change::Progress(progress) => self.progress(id, last, progress)?,
            Change::Call => self.sql.call.execute(params![id, last])?,
            Change::Cancelling { reason } => {
                self.sql.cancelling.execute(params![id, last, reason])?
            }
            Change::Close(closing) => self.close(id, last, closing)?,
        };
        if changed > 0 {
            return Ok(true);
        }
        if !self.sql.exists.exists(params![id])? {
            return Err(Fault::Own(StoreError::NoSuchRun(parcel.run)));
        }
        if matches!(parcel.change, Change::Cancelling { .. }) {
            return Ok(false);
        }
        Err(Fault::Own(StoreError::AlreadyTerminal(parcel.run)))
    }

    fn open(&mut self, opening: &Opening, last: i64) -> Result<(), Fault> {
        if let Some(claim) = &opening.claim {
            self.refuse_claimed(claim)?;
        }
        let run = &opening.run;
        let continuation = &opening.continuation;
        let definition = self.definition(&continuation.definition, run.id)?;
        let input = rows::input_value(&run.input);
        let small = rows::is_small(run);
        let usage = rows::usage_values(&run.usage);
        let labels = rows::labels_value(&run.labels);
        let webhooks = Some(&continuation.webhooks).filter(|webhooks| !webhooks.is_empty());
        let webhooks = webhooks.map(|webhooks| serde_json::to_string(webhooks).unwrap_or_default());
        let inserted = self.sql.open.execute(params![
            rows::bytes(&run.id),
            rows::bytes(&run.root_id),
            run.parent_id.as_ref().map(rows::bytes),
            run.parent_id.is_some(),
            run.depth.0,
            run.status.as_str(),
            run.agent,
            run.created_at.as_millisecond(),
            run.started_at.map(|at| at.as_millisecond()),
            last,
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
            small.then_some(&input),
            run.task.as_ref().filter(|_| small),
            run.owner,
            definition,
            continuation.deadline.map(|(at, _)| at.as_millisecond()),
            continuation.deadline.map(|(_, bound)| rows::signed(bound)),
            rows::signed(continuation.timeout),
            continuation.stream,
            webhooks,
            run.session,
            continuation.workdir.map(|id| id.device.cast_signed()),
            continuation.workdir.map(|id| id.inode.cast_signed()),
        ]);
        match inserted {
            Err(error) if error.sqlite_error_code() == Some(ErrorCode::ConstraintViolation) => {
                return Err(Fault::Own(StoreError::Engine(format!(
                    "{} is in the store already",
                    run.id
                ))));
            }
            other => other?,
        };
        if !small {
            self.sql
                .text
                .execute(params![rows::bytes(&run.id), input, run.task])?;
        }
        for (key, value) in &run.labels {
            self.sql
                .label
                .execute(params![key, value, rows::bytes(&run.id)])?;
        }
        if let Some(claim) = &opening.claim {
            self.claim(claim, run.id)?;
        }
        self.keep_distance(run)
    }

    /// Writes down how far the run's id is from its record's time, where no run's was as far.
    fn keep_distance(&mut self, run: &Run) -> Result<(), Fault> {
        let created = run.created_at.as_millisecond();
        let distance = self.distance.with(removal::made_at(run.id), created);
        if distance != self.distance {
            // Never less than what is written, which after a failure is not known.
            let stored = Distance::read(self.connection)?;
            self.distance = stored.max(distance);
            self.distance.write(self.connection)?;
        }
        Ok(())
    }

    /// Fails where the key has accepted a run that it still stands for.
    fn refuse_claimed(&mut self, claim: &Claim) -> Result<(), Fault> {
        let key = &claim.key;
        let now = now().as_millisecond();
        let of = params![key.credential, key.route, key.key, now];
        let claimed = self.sql.claimed.query_row(of, rows::claimed).optional()?;
        claimed.map_or(Ok(()), |claimed| {
            Err(Fault::Own(StoreError::Claimed(claimed)))
        })
    }

    fn claim(&mut self, claim: &Claim, run: RunId) -> rusqlite::Result<()> {
        self.sql.expire.execute([now().as_millisecond()])?;
        let key = &claim.key;
        self.sql
            .claim
            .execute(params![
                key.credential,
                key.route,
                key.key,
                rows::bytes(&run),
                claim.body,
                claim.expires.as_millisecond(),
            ])
            .map(drop)
    }

    /// What the definition is known by in the table, which knows from now on that this run has it.
    fn definition(&mut self, text: &Arc<str>, run: RunId) -> rusqlite::Result<Hash> {
        let at = removal::made_at(run);
        if let Some(hash) = self.definitions.hash(text, at) {
            return Ok(hash);
        }
        let hash = definitions::hash(text);
        let until = Known::used_until(at);
        self.sql
            .definition
            .execute(params![hash, text, until, rows::bytes(&run)])?;
        self.definitions.add(text, hash, at);
        Ok(hash)
    }

    fn progress(
        &mut self,
        id: &[u8; 16],
        last: i64,
        progress: &Progress,
    ) -> rusqlite::Result<usize> {
        let usage = rows::usage_values(&progress.usage);
        self.sql.progress.execute(params![
            id,
            last,
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

    fn close(&mut self, id: &[u8; 16], last: i64, closing: &Closing) -> rusqlite::Result<usize> {
        let structured = matches!(
            closing.outcome,
            Outcome::Completed {
                structured: true,
                ..
            }
        );
        let (content, partial, failure, reason) = match &closing.outcome {
            Outcome::Completed { content, .. } => (Some(content), None, None, None),
            Outcome::Failed { failure, partial } => (None, partial.as_ref(), Some(failure), None),
            Outcome::Cancelled { reason, partial } => (None, partial.as_ref(), None, Some(reason)),
        };
        let error = failure.map(|failure| serde_json::to_string(failure).unwrap_or_default());
        let progress = &closing.progress;
        let own = rows::usage_values(&progress.usage);
        let tree = rows::usage_values(&closing.tree.usage);
        self.sql.close.execute(params![
            id,
            last,
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
            closing.outcome.status().as_str(),
            closing.at.as_millisecond(),
            content,
            partial,
            error,
            reason,
            rows::signed(closing.tree.runs),
            tree[0],
            tree[1],
            tree[2],
            tree[3],
            tree[4],
            tree[5],
            tree[6],
            tree[7],
            structured.then_some(true),
            closing.completion_status,
        ])
    }

    fn deliver(&mut self, run: RunId, delivery: &NewDelivery) -> rusqlite::Result<()> {
        let webhook = &delivery.webhook;
        let host = net::parse(&webhook.url).ok();
        let host = host.as_ref().and_then(|url| url.host_str());
        self.sql.delivery.execute(params![
            delivery.id.0.as_bytes(),
            rows::bytes(&run),
            delivery.event,
            net::host_name(host.unwrap_or_default()),
            webhook.url,
            webhook.secret_env,
            delivery.body,
            delivery.at.as_millisecond(),
        ])?;
        Ok(())
    }

    fn tried(&mut self, tried: &Tried) -> Result<u64, Fault> {
        let (status, next) = match tried.then {
            Then::Delivered => ("delivered", None),
            Then::Again(at) => ("pending", Some(at.as_millisecond())),
            Then::GivenUp => ("failed", None),
        };
        let attempt = serde_json::to_string(&tried.attempt).unwrap_or_default();
        let id = tried.id.0.as_bytes();
        self.sql.tried.execute(params![
            id,
            status,
            next,
            attempt,
            KEPT_TRIES as i64,
            tried.since.as_millisecond(),
        ])?;
        Ok(0)
    }

    fn resend(&mut self, run: RunId, id: DeliveryId) -> Result<u64, Fault> {
        let now = now().as_millisecond();
        let of = params![id.0.as_bytes(), rows::bytes(&run), now];
        Ok(self.sql.resend.execute(of)? as u64)
    }

    fn delete(&mut self, root: RunId) -> Result<u64, Fault> {
        let id = params![rows::bytes(&root)];
        if !self.sql.is_root.exists(id)? || self.sql.is_deletion.exists(id)? {
            return Ok(0);
        }
        self.numbers.remove(&root);
        if let Left::More = self.remove(root)? {
            self.deletions.add(root);
        }
        Ok(1)
    }

    fn tidy(&mut self) -> Result<u64, Fault> {
        let more = removal::drop_definitions(&mut self.sql, &mut self.definitions)?;
        let more = more || self.deletions.is_due(1);
        let is_full = self.reserve.is_full();
        Ok(u64::from(
            self.shrink.step(self.connection, is_full)? || more,
        ))
    }

    /// The last number given in a tree.
    fn number(&mut self, root: RunId) -> Result<u64, Fault> {
        if let Some(number) = self.numbers.get(&root) {
            return Ok(*number);
        }
        let found = self
            .sql
            .number
            .query_row(params![rows::bytes(&root)], |row| row.get(0));
        match found {
            Ok(number) => Ok(rows::unsigned(number)),
            Err(rusqlite::Error::QueryReturnedNoRows) => {
                Err(Fault::Own(StoreError::NoSuchRun(root)))
            }
            Err(error) => Err(Fault::Engine(error)),
        }
    }

    fn keep_number(&mut self, parcel: &Parcel, last: u64) {
        if parcel.run == parcel.root && matches!(parcel.change, Change::Close(_)) {
            self.numbers.remove(&parcel.root);
            return;
        }
        if self.numbers.len() >= NUMBERS_AT_HAND {
            self.numbers.clear();
        }
        self.numbers.insert(parcel.root, last);
    }
}

/// Tells the listeners of a committed write's events.
fn ring(job: &Job, result: &Result<u64, StoreError>, bells: &Bells) {
    let (Task::Write(parcel), Ok(last)) = (&job.task, result) else {
        return;
    };
    publish(parcel, *last, bells);
    for (other, number) in &parcel.others {
        publish(other, number.get(), bells);
    }
}

fn publish(parcel: &Parcel, last: u64, bells: &Bells) {
    let Some(lines) = parcel.events.as_ref().filter(|_| last > 0) else {
        return;
    };
    if (bells.listening)(parcel.root) {
        (bells.bell)(
            parcel.root,
            rows::events(parcel.run, last, parcel.count, lines).collect(),
        );
    }
}

/// Tells the log and the tree's owner of a posted write that failed: nobody waits for it.
fn report(task: &Task, result: Result<u64, StoreError>, bells: &Bells) {
    if let (Task::Write(parcel), Err(error)) = (task, result) {
        let (agent, depth) = parcel.events.as_deref().and_then(rows::place).unzip();
        warn!(run.id = %parcel.run, run.root = %parcel.root, agent, depth, error = %error, "A step of {} was not recorded: {error}", parcel.run);
        if let Some(gap) = bells.gap.get() {
            gap(parcel.root);
        }
    }
}
