//! For tests: a store in memory that can only be read.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use futures_util::future::BoxFuture;
use jiff::Timestamp;
use tokio::sync::Notify;

use crate::domain::attachment::{Blobs, Digest};
use crate::domain::batch::{Batch, BatchCounts, BatchId, BatchLine};
use crate::domain::event::StoredEvent;
use crate::domain::run::{self, Run, RunId, Status};
use crate::domain::webhook::DeliveryId;
use crate::store::approvals::{ApprovalIndex, ApprovalPage, ApprovalQuery};
use crate::store::batches::{
    BatchChange, BatchKey, BatchQuery, BatchRecords, LineQuery, UnusedBatches,
};
use crate::store::changed_runs::{ChangedPage, ChangedQuery, ChangedRuns};
use crate::store::events::{EventLog, EventQuery};
use crate::store::memories::{
    EntryLimit, MemoryId, MemoryRecordError, MemoryRecords, NewMemoryEntry, NewestEntries,
};
use crate::store::outbox::{AttemptRecord, Delivery, DueDeliveries, DueQuery, Outbox};
use crate::store::push_configs::{PushConfig, PushConfigs};
use crate::store::retention::{ExpiredPage, ExpiredQuery, NthNewestQuery, RunRetention};
use crate::store::run_store::RunStore;
use crate::store::runs::{
    ChildCall, RunFilter, RunPage, RunRecords, SessionQuery, UnfinishedRun, WriteFailedFn,
};
use crate::store::schedules::{ScheduleChange, ScheduleId, ScheduleRecord, ScheduleRecords};
use crate::store::sessions::{SessionIndex, SessionListQuery, SessionPage};
use crate::store::turn_record::{TurnEntry, TurnRecord};
use crate::store::turns::{RecordedTurn, TurnRecords};
use crate::store::usage::{BudgetPeriod, BudgetUsage, UsageLog, UsageQuery, UsageReport};
use crate::store::{ClaimedRun, IdempotencyKey, Step, StoreError, Write};

/// A store in memory with an event log that can be read while it grows.
#[derive(Default)]
pub struct Log {
    pub events: Mutex<Vec<Arc<StoredEvent>>>,
    /// The followed run and its descendants.
    pub subtree: Vec<RunId>,
}

impl RunRecords for Log {
    fn tree(&self, id: RunId) -> BoxFuture<'_, Result<Vec<Run>, StoreError>> {
        Box::pin(async move { Ok(vec![run(id)]) })
    }

    fn blobs(&self, _: Vec<Digest>) -> BoxFuture<'_, Result<Blobs, StoreError>> {
        unreachable!("events hold no bytes")
    }

    fn on_write_failed(&self, _: WriteFailedFn) {
        unreachable!("a reader does not write")
    }

    fn clear_failed(&self, _: Vec<RunId>) -> BoxFuture<'_, Result<HashSet<RunId>, StoreError>> {
        unreachable!("a reader does not write")
    }

    fn run(&self, id: RunId) -> BoxFuture<'_, Result<Option<Run>, StoreError>> {
        Box::pin(async move { Ok(Some(run(id))) })
    }

    fn write(&self, _: Write) -> BoxFuture<'_, Result<u64, StoreError>> {
        unreachable!("a reader does not write")
    }

    fn write_with(&self, _: Write, _: Vec<Write>) -> BoxFuture<'_, Result<u64, StoreError>> {
        unreachable!("a reader does not write")
    }

    fn enqueue(&self, _: Write) -> BoxFuture<'_, Result<(), StoreError>> {
        unreachable!("a reader does not write")
    }

    fn session_runs(&self, _: SessionQuery) -> BoxFuture<'_, Result<Vec<Run>, StoreError>> {
        unreachable!("a stream knows no sessions")
    }

    fn list(&self, _: RunFilter) -> BoxFuture<'_, Result<RunPage, StoreError>> {
        unreachable!("a stream does not list")
    }

    fn children(&self, _: RunId) -> BoxFuture<'_, Result<Vec<Run>, StoreError>> {
        unreachable!("a stream does not list")
    }

    fn is_held(&self, _: RunId) -> BoxFuture<'_, Result<bool, StoreError>> {
        unreachable!("a stream holds no runs")
    }

    fn child_calls(&self, _: RunId) -> BoxFuture<'_, Result<Vec<ChildCall>, StoreError>> {
        unreachable!("a stream does not list")
    }

    fn steps(&self, _: RunId) -> BoxFuture<'_, Result<Vec<Step>, StoreError>> {
        unreachable!("a stream reads no steps")
    }

    fn definition(&self, _: RunId) -> BoxFuture<'_, Result<Option<Arc<str>>, StoreError>> {
        unreachable!("a stream reads no definitions")
    }

    fn pinned_agents(&self, _: Digest) -> BoxFuture<'_, Result<Option<Arc<str>>, StoreError>> {
        unreachable!("a stream reads no definitions")
    }

    fn unfinished_runs(&self) -> BoxFuture<'_, Result<Vec<UnfinishedRun>, StoreError>> {
        unreachable!("a stream does not list")
    }

    fn claimed_run(
        &self,
        _: IdempotencyKey,
    ) -> BoxFuture<'_, Result<Option<ClaimedRun>, StoreError>> {
        unreachable!("a stream accepts nothing")
    }
}

impl TurnRecords for Log {
    fn turns(&self, _: RunId) -> BoxFuture<'_, Result<Vec<TurnRecord>, StoreError>> {
        unreachable!("events are no turns")
    }

    fn turn(&self, _: RunId, _: u32) -> BoxFuture<'_, Result<Option<RecordedTurn>, StoreError>> {
        unreachable!("events are no turns")
    }

    fn copied_turns(
        &self,
        _: RunId,
        _: u32,
        _: Vec<Step>,
    ) -> BoxFuture<'_, Result<Vec<TurnEntry>, StoreError>> {
        unreachable!("events are no turns")
    }
}

impl EventLog for Log {
    fn events(&self, query: EventQuery) -> BoxFuture<'_, Result<Vec<StoredEvent>, StoreError>> {
        Box::pin(async move {
            tokio::task::yield_now().await;
            let events = self.events.lock().expect("a log");
            let shown = |event: &&Arc<StoredEvent>| {
                event.seq > query.after
                    && if query.exclude_descendants {
                        event.run_id == query.run
                    } else {
                        query.run == query.root || self.subtree.contains(&event.run_id)
                    }
            };
            let page = events.iter().filter(shown).take(query.limit);
            Ok(page.map(|event| StoredEvent::clone(event)).collect())
        })
    }
}

impl ApprovalIndex for Log {
    fn pending_approvals(
        &self,
        _: ApprovalQuery,
    ) -> BoxFuture<'_, Result<ApprovalPage, StoreError>> {
        unreachable!("a stream does not list")
    }
}

impl SessionIndex for Log {
    fn sessions(&self, _: SessionListQuery) -> BoxFuture<'_, Result<SessionPage, StoreError>> {
        unreachable!("a stream knows no sessions")
    }

    fn delete_session(
        &self,
        _: Option<String>,
        _: String,
    ) -> BoxFuture<'_, Result<bool, StoreError>> {
        unreachable!("a stream removes nothing")
    }
}

impl ChangedRuns for Log {
    fn changed_runs(&self, _: ChangedQuery) -> BoxFuture<'_, Result<ChangedPage, StoreError>> {
        unreachable!("a stream lists nothing")
    }
}

impl PushConfigs for Log {
    fn push_configs(&self, _: RunId) -> BoxFuture<'_, Result<Vec<PushConfig>, StoreError>> {
        unreachable!("a stream notifies nobody")
    }

    fn add_push_config(&self, _: RunId, _: PushConfig) -> BoxFuture<'_, Result<bool, StoreError>> {
        unreachable!("a stream notifies nobody")
    }

    fn delete_push_config(&self, _: RunId, _: String) -> BoxFuture<'_, Result<(), StoreError>> {
        unreachable!("a stream notifies nobody")
    }
}

impl Outbox for Log {
    fn due_deliveries(&self, _: DueQuery) -> BoxFuture<'_, Result<DueDeliveries, StoreError>> {
        unreachable!("a stream delivers nothing")
    }

    fn record_attempt(&self, _: AttemptRecord) -> BoxFuture<'_, Result<(), StoreError>> {
        unreachable!("a stream delivers nothing")
    }

    fn deliveries(&self, _: RunId) -> BoxFuture<'_, Result<Vec<Delivery>, StoreError>> {
        unreachable!("a stream delivers nothing")
    }

    fn resend(&self, _: RunId, _: DeliveryId) -> BoxFuture<'_, Result<bool, StoreError>> {
        unreachable!("a stream delivers nothing")
    }

    fn delivery_notify(&self) -> Arc<Notify> {
        unreachable!("a stream delivers nothing")
    }
}

impl RunRetention for Log {
    fn expired_roots(&self, _: ExpiredQuery) -> BoxFuture<'_, Result<ExpiredPage, StoreError>> {
        unreachable!("a stream removes nothing")
    }

    fn nth_newest_ended(
        &self,
        _: NthNewestQuery,
    ) -> BoxFuture<'_, Result<Option<RunId>, StoreError>> {
        unreachable!("a stream removes nothing")
    }

    fn vacuum(&self) -> BoxFuture<'_, Result<bool, StoreError>> {
        unreachable!("a stream removes nothing")
    }

    fn delete(&self, _: RunId) -> BoxFuture<'_, Result<bool, StoreError>> {
        unreachable!("a reader does not write")
    }
}

impl UsageLog for Log {
    fn usage(&self, _: UsageQuery) -> BoxFuture<'_, Result<UsageReport, StoreError>> {
        unreachable!("a stream sums nothing")
    }

    fn budget_usage(
        &self,
        _: String,
        _: BudgetPeriod,
    ) -> BoxFuture<'_, Result<BudgetUsage, StoreError>> {
        unreachable!("a stream sums nothing")
    }

    fn trim_usage(&self, _: Timestamp) -> BoxFuture<'_, Result<bool, StoreError>> {
        unreachable!("a stream removes nothing")
    }
}

impl ScheduleRecords for Log {
    fn schedules(&self) -> BoxFuture<'_, Result<Vec<ScheduleRecord>, StoreError>> {
        unreachable!("a stream has no schedules")
    }

    fn change_schedule(
        &self,
        _: ScheduleId,
        _: ScheduleChange,
    ) -> BoxFuture<'_, Result<(), StoreError>> {
        unreachable!("a stream has no schedules")
    }
}

impl BatchRecords for Log {
    fn add_batch_lines(
        &self,
        _: BatchId,
        _: Vec<BatchLine>,
    ) -> BoxFuture<'_, Result<(), StoreError>> {
        unreachable!("a stream has no batches")
    }
    fn accept_batch(
        &self,
        _: Batch,
        _: Option<BatchKey>,
    ) -> BoxFuture<'_, Result<bool, StoreError>> {
        unreachable!("a stream has no batches")
    }
    fn remove_unaccepted_lines(&self, _: BatchId) -> BoxFuture<'_, Result<(), StoreError>> {
        unreachable!("a stream has no batches")
    }
    fn batch(&self, _: BatchId) -> BoxFuture<'_, Result<Option<Batch>, StoreError>> {
        unreachable!("a stream has no batches")
    }
    fn batch_with_key(&self, _: BatchKey) -> BoxFuture<'_, Result<Option<Batch>, StoreError>> {
        unreachable!("a stream has no batches")
    }
    fn batches(&self, _: BatchQuery) -> BoxFuture<'_, Result<Vec<Batch>, StoreError>> {
        unreachable!("a stream has no batches")
    }
    fn unfinished_batches(&self) -> BoxFuture<'_, Result<Vec<Batch>, StoreError>> {
        unreachable!("a stream has no batches")
    }
    fn batch_counts(&self, _: BatchId) -> BoxFuture<'_, Result<BatchCounts, StoreError>> {
        unreachable!("a stream has no batches")
    }
    fn batch_lines(&self, _: LineQuery) -> BoxFuture<'_, Result<Vec<BatchLine>, StoreError>> {
        unreachable!("a stream has no batches")
    }
    fn change_batch(&self, _: BatchId, _: BatchChange) -> BoxFuture<'_, Result<(), StoreError>> {
        unreachable!("a stream has no batches")
    }
    fn unused_batches(
        &self,
        _: Timestamp,
        _: Option<BatchId>,
    ) -> BoxFuture<'_, Result<UnusedBatches, StoreError>> {
        unreachable!("a stream has no batches")
    }
    fn trim_batch(&self, _: BatchId, _: Timestamp) -> BoxFuture<'_, Result<bool, StoreError>> {
        unreachable!("a stream has no batches")
    }
    fn trim_unaccepted_lines(&self, _: Timestamp) -> BoxFuture<'_, Result<(), StoreError>> {
        unreachable!("a stream has no batches")
    }
}

impl MemoryRecords for Log {
    fn memory(
        &self,
        _: MemoryId,
        _: EntryLimit,
    ) -> BoxFuture<'_, Result<NewestEntries, MemoryRecordError>> {
        unreachable!("a stream remembers nothing")
    }

    fn add_to_memory(
        &self,
        _: MemoryId,
        _: NewMemoryEntry,
    ) -> BoxFuture<'_, Result<usize, MemoryRecordError>> {
        unreachable!("a stream remembers nothing")
    }

    fn trim_memory(
        &self,
        _: MemoryId,
        _: usize,
    ) -> BoxFuture<'_, Result<usize, MemoryRecordError>> {
        unreachable!("a stream remembers nothing")
    }
}

impl RunStore for Log {
    fn check(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        unreachable!("a stream does not check")
    }

    fn commit_count(&self) -> u64 {
        unreachable!("a stream does not count")
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        unreachable!("a reader does not close")
    }
}

pub fn run(id: RunId) -> Run {
    Run {
        status: Status::Running,
        ..Run::queued(&run::Scope::root(id, None), "a".to_owned())
    }
}
