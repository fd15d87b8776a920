//! The whole contract of a storage engine.

use futures_util::future::BoxFuture;

use crate::instruments::Histogram;
use crate::store::StoreError;
use crate::store::batches::BatchRecords;
use crate::store::changed_runs::ChangedRuns;
use crate::store::cluster::Cluster;
use crate::store::evals::EvalRecords;
use crate::store::events::EventLog;
use crate::store::inputs::InputIndex;
use crate::store::link_secret::LinkSecrets;
use crate::store::memories::MemoryRecords;
use crate::store::outbox::Outbox;
use crate::store::push_configs::PushConfigs;
use crate::store::retention::RunRetention;
use crate::store::rollouts::RolloutRecords;
use crate::store::runs::RunRecords;
use crate::store::schedules::ScheduleRecords;
use crate::store::score_sums::ScoreSums;
use crate::store::scores::ScoreRecords;
use crate::store::sessions::SessionIndex;
use crate::store::turns::TurnRecords;
use crate::store::usage::UsageLog;
use crate::store::world_events::WorldEvents;

/// A write spans several parts, so one engine implements all of them. Callers that need one part take that part.
pub trait RunStore:
    RunRecords
    + TurnRecords
    + EventLog
    + InputIndex
    + SessionIndex
    + Outbox
    + RunRetention
    + UsageLog
    + ScheduleRecords
    + RolloutRecords
    + ScoreRecords
    + ScoreSums
    + BatchRecords
    + EvalRecords
    + ChangedRuns
    + PushConfigs
    + MemoryRecords
    + LinkSecrets
    + WorldEvents
{
    /// Fails if the store cannot be written or read now.
    fn check(&self) -> BoxFuture<'_, Result<(), StoreError>>;

    /// How long each transaction took that was committed since the store was opened.
    fn commits(&self) -> &Histogram;

    /// The number of writes that wait for a transaction.
    fn queued_writes(&self) -> usize;

    /// The nodes that share its database; `None` if only one process can use it.
    fn cluster(&self) -> Option<&dyn Cluster> {
        None
    }

    /// Resolves when the store is closed, or if it has ended by itself, which is a bug: then it commits nothing any more.
    fn ended(&self) -> BoxFuture<'_, ()> {
        Box::pin(std::future::pending())
    }

    /// Commits the queued writes and closes; later calls fail with [`StoreError::Closed`].
    fn close(&self) -> BoxFuture<'_, ()>;
}
