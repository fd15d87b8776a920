//! Reads what is known of schedules.

use jiff::Timestamp;
use tokio_postgres::Row;

use crate::store::postgres::rows::{self, StoreResult};
use crate::store::reader::Reader;
use crate::store::schedules::{ScheduleId, ScheduleRecord};

pub async fn list(db: &Reader) -> StoreResult<Vec<ScheduleRecord>> {
    let sql = "SELECT agent, name, times, handled_at, held_at, is_paused, last_at, last_run, error FROM schedules \
               ORDER BY agent, name";
    db.rows(sql, &[]).await?.iter().map(record).collect()
}

fn record(row: &Row) -> StoreResult<ScheduleRecord> {
    let last_at: Option<i64> = rows::get(row, "last_at")?;
    let last = match last_at {
        Some(at) => Some((time(at), rows::id(row, "last_run")?)),
        None => None,
    };
    let held_at: Option<i64> = rows::get(row, "held_at")?;
    Ok(ScheduleRecord {
        id: ScheduleId {
            agent: rows::required_text(row, "agent")?,
            name: rows::required_text(row, "name")?,
        },
        times: rows::required_text(row, "times")?,
        handled_at: time(rows::get(row, "handled_at")?),
        held_at: held_at.map(time),
        is_paused: rows::get(row, "is_paused")?,
        last,
        error: rows::text(row, "error")?,
    })
}

fn time(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap_or_default()
}
