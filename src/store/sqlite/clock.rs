//! Reads and writes the skew of the runs' ids, and prepares for a clock that was set back.

use jiff::Timestamp;
use rusqlite::{Connection, OptionalExtension, named_params};
use uuid::Uuid;

use crate::domain::run::{RunId, now};
use crate::store::StoreError;
use crate::store::encoding::clock_skew::{ClockSkew, CreatedRange, MAX_RETRY_MS, id_millis};
use crate::store::sqlite::error::store_error;

pub fn read(db: &Connection) -> rusqlite::Result<ClockSkew> {
    let stored = db
        .prepare_cached("SELECT lead, lag FROM clock WHERE id = 1")?
        .query_row([], |row| {
            Ok(ClockSkew {
                lead: row.get("lead")?,
                lag: row.get("lag")?,
            })
        })
        .optional()?;
    Ok(stored.unwrap_or(ClockSkew { lead: 0, lag: 0 }))
}

pub fn write(db: &Connection, skew: ClockSkew) -> rusqlite::Result<()> {
    db.prepare_cached("UPDATE clock SET lead = :lead, lag = :lag WHERE id = 1")?
        .execute(named_params! {":lead": skew.lead, ":lag": skew.lag})
        .map(drop)
}

/// Prepares for a clock that was set back since the last start: new runs sort after the stored ones, and no delivery waits
/// for a time that is far in the future.
pub fn align(db: &Connection) -> rusqlite::Result<()> {
    let newest = db
        .query_row(
            "SELECT id, created_at FROM runs ORDER BY id DESC LIMIT 1",
            [],
            |row| {
                let id = row.get("id").map(u128::from_be_bytes)?;
                Ok((id, row.get("created_at")?))
            },
        )
        .optional()?;
    if let Some((id, created)) = newest {
        RunId(Uuid::from_u128(id)).advance_newest();
        let stored = read(db)?;
        let skew = stored.including(id_millis(id), created);
        if skew != stored {
            write(db, skew)?;
        }
    }
    let now = now().as_millisecond();
    db.execute(
        "UPDATE deliveries SET next_at = :now, since = min(since, :now) WHERE next_at > :now + :max_wait",
        named_params! {":now": now, ":max_wait": MAX_RETRY_MS},
    )?;
    Ok(())
}

/// The times of acceptance that a filter allows.
pub fn created_range(
    db: &Connection,
    since: Option<Timestamp>,
    until: Option<Timestamp>,
) -> Result<CreatedRange, StoreError> {
    let skew = match (since, until) {
        (None, None) => ClockSkew { lead: 0, lag: 0 },
        _ => read(db).map_err(store_error)?,
    };
    Ok(CreatedRange::new(since, until, skew))
}
