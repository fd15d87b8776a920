//! A store over the real one that accepts a number of writes and then no more, as if the process had died
//! between two commits. It can also lose the answer of a commit, and fail reads.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use axed::domain::attachment::{Blobs, Digest};
use axed::domain::batch::{Batch, BatchCounts, BatchId, BatchLine};
use axed::domain::evaluation::{EvalCase, EvalDefinition, EvalId, EvalRun, Evaluation};
use axed::domain::event::StoredEvent;
use axed::domain::run::{Run, RunId, Status};
use axed::domain::run_ref::IdPart;
use axed::domain::webhook::{DeliveryId, Webhook};
use axed::instruments::Histogram;
use axed::record::entry::RecordedEntry;
use axed::record::stored::StoredEntries;
use axed::store::batches::{
    BatchChange, BatchKey, BatchQuery, BatchRecords, LineQuery, UnusedBatches,
};
use axed::store::changed_runs::{ChangedPage, ChangedQuery, ChangedRuns};
use axed::store::evals::{EvalChange, EvalQuery, EvalRecords};
use axed::store::events::{EventLog, EventQuery};
use axed::store::inputs::{InputIndex, InputPage, InputQuery};
use axed::store::link_secret::{LinkSecret, LinkSecrets};
use axed::store::memories::{
    EntryLimit, MemoryId, MemoryRecordError, MemoryRecords, NewMemoryEntry, NewestEntries,
};
use axed::store::outbox::{AttemptRecord, Delivery, DueDeliveries, DueQuery, Outbox};
use axed::store::push_configs::{PushConfig, PushConfigs};
use axed::store::retention::{ExpiredPage, ExpiredQuery, NthNewestQuery, RunRetention};
use axed::store::rollouts::{
    RolloutChange, RolloutId, RolloutRecord, RolloutRecords, SessionVariant, VariantRuns,
    VersionRuns,
};
use axed::store::run_store::RunStore;
use axed::store::runs::{
    ChildCall, RunFilter, RunPage, RunRecords, SessionQuery, SleepingTree, StatusCount,
    UnfinishedRun, WriteFailedFn,
};
use axed::store::schedules::{ScheduleChange, ScheduleId, ScheduleRecord, ScheduleRecords};
use axed::store::score_sums::{ScoreQuery, ScoreReport, ScoreSums};
use axed::store::scores::{NewScore, Score, ScoreChange, ScoreKey, ScoreRecords, Scoring};
use axed::store::sessions::{SessionIndex, SessionListQuery, SessionPage};
use axed::store::turn_record::{TurnEntry, TurnRecord};
use axed::store::turns::{RecordedTurn, TurnRecords};
use axed::store::usage::{BudgetPeriod, BudgetUsage, UsageLog, UsageQuery, UsageReport};
use axed::store::world_events::{EndedWait, EventWait, NewWorldEvent, Published, WorldEvents};
use axed::store::{Change, ClaimedRun, IdempotencyKey, StoreError, Write};
use futures_util::future::{BoxFuture, pending};
use jiff::Timestamp;
use tokio::sync::{Notify, watch};

/// The store until it dies.
pub struct CrashingStore {
    inner: Arc<dyn RunStore>,
    writes: AtomicUsize,
    max_writes: usize,
    attempted: watch::Sender<usize>,
    loses_answer: AtomicBool,
    looks: AtomicUsize,
    /// How many reads of steps fail.
    unreadable: AtomicUsize,
}

impl CrashingStore {
    /// Accepts this many writes.
    pub fn new(inner: Arc<dyn RunStore>, max_writes: usize) -> Self {
        Self {
            inner,
            writes: AtomicUsize::new(0),
            max_writes,
            attempted: watch::Sender::new(0),
            loses_answer: AtomicBool::new(false),
            looks: AtomicUsize::new(0),
            unreadable: AtomicUsize::new(0),
        }
    }

    /// How often it was read whether a run is paused.
    pub fn looks(&self) -> usize {
        self.looks.load(Ordering::SeqCst)
    }

    /// The next change that a client requests, start of a mutating tool or entry of a memory is committed, and its caller gets an
    /// error.
    pub fn lose_next_answer(&self) {
        self.loses_answer.store(true, Ordering::SeqCst);
    }

    /// So many reads of steps fail, as SQLite's do on a disk that fails.
    pub fn fail_reads_of_steps(&self, count: usize) {
        self.unreadable.store(count, Ordering::SeqCst);
    }

    /// How many reads of steps are still to fail.
    pub fn unreadable(&self) -> usize {
        self.unreadable.load(Ordering::SeqCst)
    }

    fn takes_loss(&self, change: &Change) -> bool {
        let may_be_lost = matches!(
            change,
            Change::Hold
                | Change::Release
                | Change::AddMessage(_)
                | Change::RequestCancel { .. }
                | Change::CountToolCall
        );
        may_be_lost && self.loses_answer.swap(false, Ordering::SeqCst)
    }

    /// Waits until that many writes were submitted.
    pub async fn wait_for_writes(&self, count: usize) {
        let mut attempted = self.attempted.subscribe();
        let reached = attempted.wait_for(|writes| *writes >= count).await;
        reached.expect("the store is there");
    }

    /// Waits until it has died.
    pub async fn wait_for_crash(&self) {
        self.wait_for_writes(self.max_writes.saturating_add(1))
            .await;
    }

    /// The number of submitted writes.
    pub fn writes(&self) -> usize {
        self.writes.load(Ordering::SeqCst)
    }

    fn admit_write(&self) -> bool {
        let before = self.writes.fetch_add(1, Ordering::SeqCst);
        self.attempted
            .send_modify(|writes| *writes = (*writes).max(before + 1));
        before < self.max_writes
    }
}

impl RunRecords for CrashingStore {
    fn write(&self, write: Write) -> BoxFuture<'_, Result<u64, StoreError>> {
        if self.takes_loss(&write.change) {
            return Box::pin(async {
                self.inner.write(write).await?;
                Err(StoreError::Backend("the answer is lost".to_owned()))
            });
        }
        match self.admit_write() {
            true => self.inner.write(write),
            false => Box::pin(pending()),
        }
    }

    fn write_with(
        &self,
        write: Write,
        others: Vec<Write>,
    ) -> BoxFuture<'_, Result<u64, StoreError>> {
        match self.admit_write() {
            true => self.inner.write_with(write, others),
            false => Box::pin(pending()),
        }
    }

    fn enqueue(&self, write: Write) -> BoxFuture<'_, Result<(), StoreError>> {
        match self.admit_write() {
            true => self.inner.enqueue(write),
            false => Box::pin(pending()),
        }
    }

    fn on_write_failed(&self, gap: WriteFailedFn) {
        self.inner.on_write_failed(gap);
    }

    fn clear_failed(&self, roots: Vec<RunId>) -> BoxFuture<'_, Result<HashSet<RunId>, StoreError>> {
        self.inner.clear_failed(roots)
    }

    fn run(&self, id: RunId) -> BoxFuture<'_, Result<Option<Run>, StoreError>> {
        self.inner.run(id)
    }

    fn session_runs(&self, query: SessionQuery) -> BoxFuture<'_, Result<Vec<Run>, StoreError>> {
        self.inner.session_runs(query)
    }

    fn list(&self, filter: RunFilter) -> BoxFuture<'_, Result<RunPage, StoreError>> {
        self.inner.list(filter)
    }

    fn runs_named(
        &self,
        part: IdPart,
        owner: Option<String>,
        limit: usize,
    ) -> BoxFuture<'_, Result<Vec<RunId>, StoreError>> {
        self.inner.runs_named(part, owner, limit)
    }

    fn count(
        &self,
        filter: RunFilter,
        statuses: Vec<Status>,
    ) -> BoxFuture<'_, Result<Vec<StatusCount>, StoreError>> {
        self.inner.count(filter, statuses)
    }

    fn tree(&self, id: RunId) -> BoxFuture<'_, Result<Vec<Run>, StoreError>> {
        self.inner.tree(id)
    }

    fn children(&self, id: RunId) -> BoxFuture<'_, Result<Vec<Run>, StoreError>> {
        self.inner.children(id)
    }

    fn is_held(&self, id: RunId) -> BoxFuture<'_, Result<bool, StoreError>> {
        self.looks.fetch_add(1, Ordering::SeqCst);
        self.inner.is_held(id)
    }

    fn child_calls(&self, id: RunId) -> BoxFuture<'_, Result<Vec<ChildCall>, StoreError>> {
        self.inner.child_calls(id)
    }

    fn entries(&self, id: RunId) -> BoxFuture<'_, Result<Vec<RecordedEntry>, StoreError>> {
        let one_less = |count: usize| count.checked_sub(1);
        let (set, fetch) = (Ordering::SeqCst, Ordering::SeqCst);
        if self.unreadable.fetch_update(set, fetch, one_less).is_ok() {
            let error = StoreError::Malformed("a page".to_owned());
            return Box::pin(async { Err(error) });
        }
        self.inner.entries(id)
    }

    fn definition(&self, id: RunId) -> BoxFuture<'_, Result<Option<Arc<str>>, StoreError>> {
        self.inner.definition(id)
    }

    fn pinned_agents(&self, digest: Digest) -> BoxFuture<'_, Result<Option<Arc<str>>, StoreError>> {
        self.inner.pinned_agents(digest)
    }

    fn blobs(&self, digests: Vec<Digest>) -> BoxFuture<'_, Result<Blobs, StoreError>> {
        self.inner.blobs(digests)
    }

    fn unfinished_runs(&self) -> BoxFuture<'_, Result<Vec<UnfinishedRun>, StoreError>> {
        self.inner.unfinished_runs()
    }

    fn unfinished_trees(
        &self,
        roots: Vec<RunId>,
    ) -> BoxFuture<'_, Result<Vec<UnfinishedRun>, StoreError>> {
        self.inner.unfinished_trees(roots)
    }

    fn sleeping_trees(
        &self,
        roots: Option<Vec<RunId>>,
    ) -> BoxFuture<'_, Result<Vec<SleepingTree>, StoreError>> {
        self.inner.sleeping_trees(roots)
    }

    fn waits_of(&self, roots: Vec<RunId>) -> BoxFuture<'_, Result<Vec<SleepingTree>, StoreError>> {
        self.inner.waits_of(roots)
    }

    fn claimed_run(
        &self,
        key: IdempotencyKey,
    ) -> BoxFuture<'_, Result<Option<ClaimedRun>, StoreError>> {
        self.inner.claimed_run(key)
    }
}

impl TurnRecords for CrashingStore {
    fn turns(&self, run: RunId) -> BoxFuture<'_, Result<Vec<TurnRecord>, StoreError>> {
        self.inner.turns(run)
    }

    fn turn(
        &self,
        run: RunId,
        turn: u32,
    ) -> BoxFuture<'_, Result<Option<RecordedTurn>, StoreError>> {
        self.inner.turn(run, turn)
    }

    fn copied_turns(
        &self,
        source: RunId,
        last: u32,
        entries: Vec<RecordedEntry>,
    ) -> BoxFuture<'_, Result<Vec<TurnEntry>, StoreError>> {
        self.inner.copied_turns(source, last, entries)
    }
}

impl EventLog for CrashingStore {
    fn events(&self, query: EventQuery) -> BoxFuture<'_, Result<Vec<StoredEvent>, StoreError>> {
        self.inner.events(query)
    }
}

impl ChangedRuns for CrashingStore {
    fn changed_runs(&self, query: ChangedQuery) -> BoxFuture<'_, Result<ChangedPage, StoreError>> {
        self.inner.changed_runs(query)
    }
}

impl PushConfigs for CrashingStore {
    fn push_configs(&self, run: RunId) -> BoxFuture<'_, Result<Vec<PushConfig>, StoreError>> {
        self.inner.push_configs(run)
    }

    fn add_push_config(
        &self,
        run: RunId,
        config: PushConfig,
    ) -> BoxFuture<'_, Result<bool, StoreError>> {
        match self.admit_write() {
            true => self.inner.add_push_config(run, config),
            false => Box::pin(pending()),
        }
    }

    fn delete_push_config(&self, run: RunId, id: String) -> BoxFuture<'_, Result<(), StoreError>> {
        match self.admit_write() {
            true => self.inner.delete_push_config(run, id),
            false => Box::pin(pending()),
        }
    }
}

impl ScoreRecords for CrashingStore {
    fn add_score(&self, score: NewScore) -> BoxFuture<'_, Result<ScoreChange, StoreError>> {
        match self.admit_write() {
            true => self.inner.add_score(score),
            false => Box::pin(pending()),
        }
    }

    fn end_scoring(
        &self,
        scoring: Scoring,
        root: RunId,
        entries: Option<StoredEntries>,
    ) -> BoxFuture<'_, Result<bool, StoreError>> {
        match self.admit_write() {
            true => self.inner.end_scoring(scoring, root, entries),
            false => Box::pin(pending()),
        }
    }

    fn scorings(
        &self,
        after: Option<Scoring>,
        limit: usize,
    ) -> BoxFuture<'_, Result<Vec<Scoring>, StoreError>> {
        self.inner.scorings(after, limit)
    }

    fn delete_score(&self, key: ScoreKey) -> BoxFuture<'_, Result<bool, StoreError>> {
        match self.admit_write() {
            true => self.inner.delete_score(key),
            false => Box::pin(pending()),
        }
    }

    fn scores(&self, run: RunId) -> BoxFuture<'_, Result<Vec<Score>, StoreError>> {
        self.inner.scores(run)
    }

    fn webhooks(&self, root: RunId) -> BoxFuture<'_, Result<Vec<Arc<Webhook>>, StoreError>> {
        self.inner.webhooks(root)
    }
}

impl ScoreSums for CrashingStore {
    fn score_report(&self, query: ScoreQuery) -> BoxFuture<'_, Result<ScoreReport, StoreError>> {
        self.inner.score_report(query)
    }

    fn trim_scores(&self, before: Timestamp) -> BoxFuture<'_, Result<bool, StoreError>> {
        self.inner.trim_scores(before)
    }
}

impl RolloutRecords for CrashingStore {
    fn rollouts(&self, a: String) -> BoxFuture<'_, Result<Vec<RolloutRecord>, StoreError>> {
        self.inner.rollouts(a)
    }

    fn change_rollout(
        &self,
        a: RolloutId,
        b: RolloutChange,
    ) -> BoxFuture<'_, Result<bool, StoreError>> {
        match self.admit_write() {
            true => self.inner.change_rollout(a, b),
            false => Box::pin(pending()),
        }
    }

    fn variant_runs(
        &self,
        a: String,
        b: Timestamp,
    ) -> BoxFuture<'_, Result<Vec<VariantRuns>, StoreError>> {
        self.inner.variant_runs(a, b)
    }

    fn newest_candidate(&self, a: RolloutId) -> BoxFuture<'_, Result<Option<RunId>, StoreError>> {
        self.inner.newest_candidate(a)
    }

    fn session_variant(
        &self,
        a: Option<String>,
        b: String,
    ) -> BoxFuture<'_, Result<Option<SessionVariant>, StoreError>> {
        self.inner.session_variant(a, b)
    }

    fn agent_versions(
        &self,
        a: String,
        b: Option<String>,
    ) -> BoxFuture<'_, Result<Vec<VersionRuns>, StoreError>> {
        self.inner.agent_versions(a, b)
    }
}

impl EvalRecords for CrashingStore {
    fn add_eval_cases(&self, a: EvalId, b: Vec<EvalCase>) -> BoxFuture<'_, Result<(), StoreError>> {
        self.inner.add_eval_cases(a, b)
    }

    fn accept_eval(
        &self,
        a: Evaluation,
        b: Vec<EvalDefinition>,
        cases: u32,
    ) -> BoxFuture<'_, Result<(), StoreError>> {
        self.inner.accept_eval(a, b, cases)
    }

    fn eval(&self, a: EvalId) -> BoxFuture<'_, Result<Option<Evaluation>, StoreError>> {
        self.inner.eval(a)
    }

    fn eval_definitions(
        &self,
        a: EvalId,
    ) -> BoxFuture<'_, Result<Vec<EvalDefinition>, StoreError>> {
        self.inner.eval_definitions(a)
    }

    fn evals(&self, a: EvalQuery) -> BoxFuture<'_, Result<Vec<Evaluation>, StoreError>> {
        self.inner.evals(a)
    }

    fn unfinished_evals(&self) -> BoxFuture<'_, Result<Vec<Evaluation>, StoreError>> {
        self.inner.unfinished_evals()
    }

    fn eval_cases(
        &self,
        a: EvalId,
        b: Range<u32>,
    ) -> BoxFuture<'_, Result<Vec<EvalCase>, StoreError>> {
        self.inner.eval_cases(a, b)
    }

    fn eval_case_ids(&self, a: EvalId) -> BoxFuture<'_, Result<Vec<String>, StoreError>> {
        self.inner.eval_case_ids(a)
    }

    fn eval_runs(
        &self,
        a: EvalId,
        b: Range<u32>,
    ) -> BoxFuture<'_, Result<Vec<EvalRun>, StoreError>> {
        self.inner.eval_runs(a, b)
    }

    fn change_eval(&self, a: EvalId, b: EvalChange) -> BoxFuture<'_, Result<(), StoreError>> {
        match self.admit_write() {
            true => self.inner.change_eval(a, b),
            false => Box::pin(pending()),
        }
    }

    fn runs_of_version(
        &self,
        a: String,
        b: String,
        c: usize,
    ) -> BoxFuture<'_, Result<Vec<RunId>, StoreError>> {
        self.inner.runs_of_version(a, b, c)
    }

    fn trim_evals(&self, a: Timestamp) -> BoxFuture<'_, Result<bool, StoreError>> {
        self.inner.trim_evals(a)
    }
}

impl LinkSecrets for CrashingStore {
    fn link_secret(&self) -> BoxFuture<'_, Result<LinkSecret, StoreError>> {
        self.inner.link_secret()
    }
}

impl WorldEvents for CrashingStore {
    fn publish_event(&self, a: NewWorldEvent) -> BoxFuture<'_, Result<Published, StoreError>> {
        self.inner.publish_event(a)
    }

    fn receive_earlier(
        &self,
        a: EventWait,
        b: Timestamp,
    ) -> BoxFuture<'_, Result<bool, StoreError>> {
        self.inner.receive_earlier(a, b)
    }

    fn ended_waits(&self) -> BoxFuture<'_, Result<Vec<EndedWait>, StoreError>> {
        self.inner.ended_waits()
    }
}

impl InputIndex for CrashingStore {
    fn pending_inputs(&self, query: InputQuery) -> BoxFuture<'_, Result<InputPage, StoreError>> {
        self.inner.pending_inputs(query)
    }
}

impl SessionIndex for CrashingStore {
    fn sessions(&self, query: SessionListQuery) -> BoxFuture<'_, Result<SessionPage, StoreError>> {
        self.inner.sessions(query)
    }

    fn delete_session(
        &self,
        owner: Option<String>,
        name: String,
    ) -> BoxFuture<'_, Result<bool, StoreError>> {
        self.inner.delete_session(owner, name)
    }
}

impl Outbox for CrashingStore {
    fn due_deliveries(&self, query: DueQuery) -> BoxFuture<'_, Result<DueDeliveries, StoreError>> {
        self.inner.due_deliveries(query)
    }

    fn record_attempt(&self, tried: AttemptRecord) -> BoxFuture<'_, Result<(), StoreError>> {
        self.inner.record_attempt(tried)
    }

    fn deliveries(&self, run: RunId) -> BoxFuture<'_, Result<Vec<Delivery>, StoreError>> {
        self.inner.deliveries(run)
    }

    fn resend(&self, run: RunId, id: DeliveryId) -> BoxFuture<'_, Result<bool, StoreError>> {
        self.inner.resend(run, id)
    }

    fn count_pending(&self, max: usize) -> BoxFuture<'_, Result<u64, StoreError>> {
        self.inner.count_pending(max)
    }

    fn delivery_notify(&self) -> Arc<Notify> {
        self.inner.delivery_notify()
    }
}

impl RunRetention for CrashingStore {
    fn expired_roots(&self, query: ExpiredQuery) -> BoxFuture<'_, Result<ExpiredPage, StoreError>> {
        self.inner.expired_roots(query)
    }

    fn nth_newest_ended(
        &self,
        query: NthNewestQuery,
    ) -> BoxFuture<'_, Result<Option<RunId>, StoreError>> {
        self.inner.nth_newest_ended(query)
    }

    fn vacuum(&self) -> BoxFuture<'_, Result<bool, StoreError>> {
        self.inner.vacuum()
    }

    fn delete(&self, root: RunId) -> BoxFuture<'_, Result<bool, StoreError>> {
        self.inner.delete(root)
    }
}

impl UsageLog for CrashingStore {
    fn usage(&self, query: UsageQuery) -> BoxFuture<'_, Result<UsageReport, StoreError>> {
        self.inner.usage(query)
    }

    fn budget_usage(
        &self,
        budget: String,
        period: BudgetPeriod,
    ) -> BoxFuture<'_, Result<BudgetUsage, StoreError>> {
        self.inner.budget_usage(budget, period)
    }

    fn trim_usage(&self, before: Timestamp) -> BoxFuture<'_, Result<bool, StoreError>> {
        self.inner.trim_usage(before)
    }
}

impl ScheduleRecords for CrashingStore {
    fn schedules(&self) -> BoxFuture<'_, Result<Vec<ScheduleRecord>, StoreError>> {
        self.inner.schedules()
    }

    fn change_schedule(
        &self,
        id: ScheduleId,
        change: ScheduleChange,
    ) -> BoxFuture<'_, Result<(), StoreError>> {
        self.inner.change_schedule(id, change)
    }
}

impl BatchRecords for CrashingStore {
    fn add_batch_lines(
        &self,
        a: BatchId,
        b: Vec<BatchLine>,
    ) -> BoxFuture<'_, Result<(), StoreError>> {
        self.inner.add_batch_lines(a, b)
    }
    fn accept_batch(
        &self,
        a: Batch,
        b: Option<BatchKey>,
    ) -> BoxFuture<'_, Result<bool, StoreError>> {
        self.inner.accept_batch(a, b)
    }
    fn remove_unaccepted_lines(&self, a: BatchId) -> BoxFuture<'_, Result<(), StoreError>> {
        self.inner.remove_unaccepted_lines(a)
    }
    fn batch(&self, a: BatchId) -> BoxFuture<'_, Result<Option<Batch>, StoreError>> {
        self.inner.batch(a)
    }
    fn batch_with_key(&self, a: BatchKey) -> BoxFuture<'_, Result<Option<Batch>, StoreError>> {
        self.inner.batch_with_key(a)
    }
    fn batches(&self, a: BatchQuery) -> BoxFuture<'_, Result<Vec<Batch>, StoreError>> {
        self.inner.batches(a)
    }
    fn unfinished_batches(&self) -> BoxFuture<'_, Result<Vec<Batch>, StoreError>> {
        self.inner.unfinished_batches()
    }
    fn batch_counts(&self, a: BatchId) -> BoxFuture<'_, Result<BatchCounts, StoreError>> {
        self.inner.batch_counts(a)
    }
    fn batch_lines(&self, a: LineQuery) -> BoxFuture<'_, Result<Vec<BatchLine>, StoreError>> {
        self.inner.batch_lines(a)
    }
    fn change_batch(&self, a: BatchId, b: BatchChange) -> BoxFuture<'_, Result<(), StoreError>> {
        self.inner.change_batch(a, b)
    }
    fn unused_batches(
        &self,
        a: Timestamp,
        b: Option<BatchId>,
    ) -> BoxFuture<'_, Result<UnusedBatches, StoreError>> {
        self.inner.unused_batches(a, b)
    }
    fn trim_batch(&self, a: BatchId, b: Timestamp) -> BoxFuture<'_, Result<bool, StoreError>> {
        self.inner.trim_batch(a, b)
    }
    fn trim_unaccepted_lines(&self, a: Timestamp) -> BoxFuture<'_, Result<(), StoreError>> {
        self.inner.trim_unaccepted_lines(a)
    }
}

impl MemoryRecords for CrashingStore {
    fn memory(
        &self,
        memory: MemoryId,
        limit: EntryLimit,
    ) -> BoxFuture<'_, Result<NewestEntries, MemoryRecordError>> {
        self.inner.memory(memory, limit)
    }

    fn add_to_memory(
        &self,
        memory: MemoryId,
        entry: NewMemoryEntry,
    ) -> BoxFuture<'_, Result<usize, MemoryRecordError>> {
        if self.loses_answer.swap(false, Ordering::SeqCst) {
            return Box::pin(async {
                self.inner.add_to_memory(memory, entry).await?;
                let lost = StoreError::Backend("the answer is lost".to_owned());
                Err(MemoryRecordError::Store(lost))
            });
        }
        self.inner.add_to_memory(memory, entry)
    }

    fn trim_memory(
        &self,
        memory: MemoryId,
        keep: usize,
    ) -> BoxFuture<'_, Result<usize, MemoryRecordError>> {
        self.inner.trim_memory(memory, keep)
    }
}

impl RunStore for CrashingStore {
    fn check(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        self.inner.check()
    }

    fn commits(&self) -> &Histogram {
        self.inner.commits()
    }

    fn queued_writes(&self) -> usize {
        self.inner.queued_writes()
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        self.inner.close()
    }
}
