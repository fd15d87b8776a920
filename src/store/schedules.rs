//! The contract for what is known of the schedules of agents. Their times and runs are those of the agents' files.

use futures_util::future::BoxFuture;
use jiff::Timestamp;

use crate::domain::run::RunId;
use crate::store::StoreError;

pub trait ScheduleRecords: Send + Sync + 'static {
    /// All that were ever seen.
    fn schedules(&self) -> BoxFuture<'_, Result<Vec<ScheduleRecord>, StoreError>>;

    /// Changes are ignored for a schedule that was never seen, except the one that makes it seen.
    fn change_schedule(
        &self,
        id: ScheduleId,
        change: ScheduleChange,
    ) -> BoxFuture<'_, Result<(), StoreError>>;
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ScheduleId {
    pub agent: String,
    pub name: String,
}

/// Times have whole seconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScheduleRecord {
    pub id: ScheduleId,
    /// See [`crate::domain::schedule::Schedule::times`]. Empty if no agent has the schedule any more.
    pub times: String,
    /// Times up to this one are started, skipped, or from before the schedule existed.
    pub handled_at: Timestamp,
    /// The time whose run waits for the end of the last run.
    pub held_at: Option<Timestamp>,
    pub is_paused: bool,
    /// The time of the last run, and the run. It may be deleted.
    pub last: Option<(Timestamp, RunId)>,
    /// Why no run started at the last time.
    pub error: Option<String>,
}

#[derive(Clone, Debug)]
pub enum ScheduleChange {
    /// It exists with these times. Nothing changes if they are known.
    Seen { times: String, at: Timestamp },
    /// No agent has it any more. If it comes back, it is as new, but still paused if it was.
    Removed,
    /// A run started for a time. Times up to `handled_at` are handled: after a held time others may have been skipped.
    Started {
        at: Timestamp,
        handled_at: Timestamp,
        run: RunId,
    },
    /// A run started without a time.
    Triggered { at: Timestamp, run: RunId },
    /// No run started for a time: it is held, or there is an error, or the last run has not ended.
    Skipped {
        at: Timestamp,
        held_at: Option<Timestamp>,
        error: Option<String>,
    },
    /// Paused or resumed. Times up to `at` are handled.
    Paused { is_paused: bool, at: Timestamp },
}
