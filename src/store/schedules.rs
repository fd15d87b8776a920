//! What is known of the schedules of agents. Their times and runs are those of the agents' files.

use futures_util::future::BoxFuture;
use jiff::Timestamp;
use uuid::Uuid;

use crate::domain::evaluation::EvalId;
use crate::domain::run::RunId;
use crate::domain::schedule::Started;
use crate::store::StoreError;
use crate::store::changes::Changes;
use crate::store::engine::Engine;
use crate::store::reader::ReadMode;
use crate::store::sql::row::{Row, StoreResult};
use crate::store::sql::value::{NamedValue, free_text, values};

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
    /// The time of the last start, and what was started.
    pub last: Option<(Timestamp, Started)>,
    /// Why nothing started at the last time.
    pub error: Option<String>,
}

#[derive(Clone, Debug)]
pub enum ScheduleChange {
    /// It exists with these times. Nothing changes if they are known.
    Seen { times: String, at: Timestamp },
    /// No agent has it any more. If it comes back, it is as new, but still paused if it was.
    Removed,
    /// Something started for a time. Times up to `handled_at` are handled: after a held time others may have been skipped.
    Started {
        at: Timestamp,
        handled_at: Timestamp,
        started: Started,
    },
    /// Something started without a time.
    Triggered { at: Timestamp, started: Started },
    /// No run started for a time: it is held, or there is an error, or the last run has not ended.
    Skipped {
        at: Timestamp,
        held_at: Option<Timestamp>,
        error: Option<String>,
    },
    /// Paused or resumed. Times up to `at` are handled.
    Paused { is_paused: bool, at: Timestamp },
}

const LIST: &str = "SELECT agent, name, times, handled_at, held_at, is_paused, last_at, last_run, last_eval, error FROM schedules \
     ORDER BY agent, name";

/// A condition: this node is the leader. It stays so until the commit, because the transaction has locked the node's row.
macro_rules! as_leader {
    () => {
        "{| AND EXISTS (SELECT 1 FROM duties d WHERE d.name = 'leader' AND d.node = :node)}"
    };
}

/// A schedule that is new, or has other times.
const UPSERT: &str = "INSERT INTO schedules AS s (agent, name, times, handled_at, is_paused) \
     VALUES (:agent, :name, :times, :at, false) ON CONFLICT (agent, name) \
     DO UPDATE SET times = excluded.times, handled_at = excluded.handled_at, held_at = NULL, error = NULL \
     WHERE s.times <> excluded.times";
const MARK_REMOVED: &str = concat!(
    "UPDATE schedules SET times = '', held_at = NULL WHERE agent = :agent AND name = :name",
    as_leader!()
);
/// The error stays if it is that of a later time.
const RECORD_START: &str = concat!(
    "UPDATE schedules SET handled_at = :handled_at::bigint, held_at = NULL, last_at = :at::bigint, last_run = :run, last_eval = :eval, \
     error = CASE WHEN :handled_at::bigint > :at::bigint THEN error END WHERE agent = :agent AND name = :name",
    as_leader!()
);
const RECORD_TRIGGERED: &str = "UPDATE schedules SET last_at = :at, last_run = :run, last_eval = :eval, error = NULL \
     WHERE agent = :agent AND name = :name";
const SKIP: &str = concat!(
    "UPDATE schedules SET handled_at = :at, held_at = :held_at, error = :error \
     WHERE agent = :agent AND name = :name",
    as_leader!()
);
const PAUSE: &str = "UPDATE schedules SET is_paused = :is_paused, handled_at = :at, held_at = NULL \
     WHERE agent = :agent AND name = :name";

impl<E: Engine> ScheduleRecords for E {
    fn schedules(&self) -> BoxFuture<'_, Result<Vec<ScheduleRecord>, StoreError>> {
        self.read(ReadMode::Statement, |db| {
            Box::pin(db.query(LIST, &[], record))
        })
    }

    fn change_schedule(
        &self,
        id: ScheduleId,
        change: ScheduleChange,
    ) -> BoxFuture<'_, Result<(), StoreError>> {
        let mut changes = match change {
            ScheduleChange::Seen { times, at } => {
                Changes::one(UPSERT, values! {":times": times, ":at": at.as_second()})
            }
            ScheduleChange::Removed => Changes::one(MARK_REMOVED, []),
            ScheduleChange::Started {
                at,
                handled_at,
                started,
            } => {
                let handled_at = values! {":handled_at": handled_at.as_second()};
                let values = start_values(at, started).into_iter().chain(handled_at);
                Changes::default().and_vec(RECORD_START, values.collect())
            }
            ScheduleChange::Triggered { at, started } => {
                Changes::one(RECORD_TRIGGERED, start_values(at, started))
            }
            ScheduleChange::Skipped { at, held_at, error } => Changes::one(
                SKIP,
                values! {
                    ":at": at.as_second(),
                    ":held_at": held_at.map(|at| at.as_second()),
                    ":error": error.map(free_text),
                },
            ),
            ScheduleChange::Paused { is_paused, at } => Changes::one(
                PAUSE,
                values! {":is_paused": is_paused, ":at": at.as_second()},
            ),
        };
        let ScheduleId { agent, name } = id;
        let of_schedule = values! {":agent": agent, ":name": name, ":node": self.writer_id()};
        changes.statements[0].params.extend(of_schedule);
        self.apply(changes)
    }
}

fn start_values(at: Timestamp, started: Started) -> [NamedValue<'static>; 3] {
    let (run, eval) = started.ids();
    values! {":at": at.as_second(), ":run": run, ":eval": eval.map(|eval| eval.0)}
}

fn record(row: &Row<'_>) -> StoreResult<ScheduleRecord> {
    let time = |second| Timestamp::from_second(second).unwrap_or_default();
    let last_at: Option<i64> = row.get("last_at")?;
    let last = match last_at {
        Some(at) => {
            let run: Option<RunId> = row.get("last_run")?;
            let eval: Option<Uuid> = row.get("last_eval")?;
            let eval = || eval.map(|id| Started::Eval(EvalId(id)));
            let started = run.map(Started::Run).or_else(eval);
            started.map(|started| (time(at), started))
        }
        None => None,
    };
    let held_at: Option<i64> = row.get("held_at")?;
    Ok(ScheduleRecord {
        id: ScheduleId {
            agent: row.get("agent")?,
            name: row.get("name")?,
        },
        times: row.get("times")?,
        handled_at: time(row.get("handled_at")?),
        held_at: held_at.map(time),
        is_paused: row.get("is_paused")?,
        last,
        error: row.get("error")?,
    })
}
