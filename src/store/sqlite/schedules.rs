//! What is known of schedules.

use jiff::Timestamp;
use rusqlite::{Connection, Row, named_params};

use crate::store::StoreError;
use crate::store::schedules::{ScheduleChange, ScheduleId, ScheduleRecord};
use crate::store::sqlite::error::store_error;
use crate::store::sqlite::rows;
use crate::store::sqlite::statements::Statements;

pub fn list(db: &Connection) -> Result<Vec<ScheduleRecord>, StoreError> {
    let read = || {
        let mut sql = db.prepare_cached(
            "SELECT agent, name, times, handled_at, held_at, is_paused, last_at, last_run, error FROM schedules",
        )?;
        let records = sql.query_map([], record)?;
        records.collect::<rusqlite::Result<_>>()
    };
    read().map_err(store_error)
}

fn record(row: &Row<'_>) -> rusqlite::Result<ScheduleRecord> {
    let last_at: Option<i64> = row.get("last_at")?;
    let last = match last_at {
        Some(at) => Some((time(at), rows::id(row, "last_run")?)),
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

fn time(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap_or_default()
}

pub fn change(
    sql: &mut Statements<'_>,
    id: &ScheduleId,
    change: &ScheduleChange,
) -> rusqlite::Result<()> {
    let ScheduleId { agent, name } = id;
    let changed = match change {
        ScheduleChange::Seen { times, at } => sql.upsert_schedule.execute(named_params! {
            ":agent": agent, ":name": name, ":times": times, ":at": at.as_second(),
        }),
        ScheduleChange::Removed => sql.mark_schedule_removed.execute(named_params! {
            ":agent": agent, ":name": name,
        }),
        ScheduleChange::Started {
            at,
            handled_at,
            run,
        } => sql.record_scheduled_run.execute(named_params! {
            ":agent": agent, ":name": name, ":at": at.as_second(),
            ":handled_at": handled_at.as_second(), ":run": rows::id_bytes(run),
        }),
        ScheduleChange::Triggered { at, run } => sql.record_triggered_run.execute(named_params! {
            ":agent": agent, ":name": name, ":at": at.as_second(), ":run": rows::id_bytes(run),
        }),
        ScheduleChange::Skipped { at, held_at, error } => {
            sql.skip_scheduled_time.execute(named_params! {
                ":agent": agent, ":name": name, ":at": at.as_second(),
                ":held_at": held_at.map(|it| it.as_second()), ":error": error,
            })
        }
        ScheduleChange::Paused { is_paused, at } => sql.pause_schedule.execute(named_params! {
            ":agent": agent, ":name": name, ":is_paused": is_paused, ":at": at.as_second(),
        }),
    };
    changed.map(drop)
}
