//! How far the times in runs' ids are from those in their records, so that a time bounds ids. Ids never sort before
//! those in the store, so where the clock was set back they are ahead of it. Knows no runs.

use jiff::Timestamp;
use rusqlite::{Connection, OptionalExtension};
use uuid::Uuid;

use crate::domain::run::{RunId, now};
use crate::store::StoreError;
use crate::store::sqlite::reader_pool::store_error;

/// No delivery waits longer for its next try: twice the longest wait, in milliseconds.
const MAX_RETRY_MS: i64 = 2 * 3_600_000;
/// Bits of an id after its milliseconds.
const ID_RANDOM_BITS: u32 = 80;

/// The largest distances of any run that was ever accepted, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockSkew {
    /// The id's time after the record's.
    pub lead: i64,
    /// The record's time after the id's.
    pub lag: i64,
}

impl ClockSkew {
    /// As the store knows it.
    pub fn read(db: &Connection) -> rusqlite::Result<Self> {
        let stored = db
            .prepare_cached("SELECT lead, lag FROM clock WHERE id = 1")?
            .query_row([], |row| {
                Ok(Self {
                    lead: row.get(0)?,
                    lag: row.get(1)?,
                })
            })
            .optional()?;
        Ok(stored.unwrap_or(Self { lead: 0, lag: 0 }))
    }

    /// For whoever searches from now on.
    pub fn write(self, db: &Connection) -> rusqlite::Result<()> {
        db.prepare_cached("UPDATE clock SET lead = ?1, lag = ?2 WHERE id = 1")?
            .execute([self.lead, self.lag])
            .map(drop)
    }

    /// The larger ones of both.
    pub fn max(self, other: Self) -> Self {
        Self {
            lead: self.lead.max(other.lead),
            lag: self.lag.max(other.lag),
        }
    }

    /// With a run whose id was made at one time and whose record says another.
    pub fn including(self, id_ms: i64, created_ms: i64) -> Self {
        Self {
            lead: self.lead.max(id_ms.saturating_sub(created_ms)),
            lag: self.lag.max(created_ms.saturating_sub(id_ms)),
        }
    }
}

/// Finds out how far the ids are that an older version made, along indexes.
pub fn measure(db: &Connection) -> rusqlite::Result<()> {
    let mut skew = ClockSkew::read(db)?;
    for query in [
        "SELECT id, created_at FROM runs INDEXED BY runs_finished WHERE finished_at IS NOT NULL",
        "SELECT id, created_at FROM runs INDEXED BY runs_unfinished WHERE finished_at IS NULL",
    ] {
        let mut sql = db.prepare(query)?;
        let mut found = sql.query([])?;
        while let Some(row) = found.next()? {
            let id = row.get(0).map(u128::from_be_bytes)?;
            skew = skew.including(id_millis(id), row.get(1)?);
        }
    }
    skew.write(db)
}

/// Goes on where the store is, also where the clock was set back since: new runs sort after those that are there, and
/// deliveries do not wait for a time that is far away.
pub fn align(db: &Connection) -> rusqlite::Result<()> {
    let newest = db
        .query_row(
            "SELECT id, created_at FROM runs ORDER BY id DESC LIMIT 1",
            [],
            |row| Ok((row.get(0).map(u128::from_be_bytes)?, row.get(1)?)),
        )
        .optional()?;
    if let Some((id, created)) = newest {
        RunId(Uuid::from_u128(id)).advance_newest();
        let stored = ClockSkew::read(db)?;
        let skew = stored.including(id_millis(id), created);
        if skew != stored {
            skew.write(db)?;
        }
    }
    let now = now().as_millisecond();
    db.execute(
        "UPDATE deliveries SET next_at = ?1, since = min(since, ?1) WHERE next_at > ?1 + ?2",
        [now, MAX_RETRY_MS],
    )?;
    Ok(())
}

/// The milliseconds in an id.
fn id_millis(id: u128) -> i64 {
    i64::try_from(id >> ID_RANDOM_BITS).unwrap_or(i64::MAX)
}

/// The times of acceptance that a filter lets through, and what ids they can have.
pub struct CreatedRange {
    since: Option<i64>,
    until: Option<i64>,
    skew: ClockSkew,
}

impl CreatedRange {
    /// From this time on, and before that one.
    pub fn new(
        db: &Connection,
        since: Option<Timestamp>,
        until: Option<Timestamp>,
    ) -> Result<Self, StoreError> {
        let skew = match (since, until) {
            (None, None) => ClockSkew { lead: 0, lag: 0 },
            _ => ClockSkew::read(db).map_err(store_error)?,
        };
        Ok(Self {
            since: since.map(ceil_millis),
            until: until.map(ceil_millis),
            skew,
        })
    }

    /// The oldest id that may be of such a time.
    pub fn oldest_id(&self) -> Option<u128> {
        let since = self.since?.saturating_sub(self.skew.lag);
        Some(u128::from(since.max(0).unsigned_abs()) << ID_RANDOM_BITS)
    }

    /// All of such a time are before this id.
    pub fn end_id(&self) -> Option<u128> {
        let until = self.until?.saturating_add(self.skew.lead);
        let until = u128::from(until.max(0).unsigned_abs());
        (until < 1 << 48).then_some(until << ID_RANDOM_BITS)
    }

    /// Whether a run of this id is sure to be of such a time, whatever its record says.
    pub fn contains_id(&self, id: u128) -> bool {
        let id_ms = id_millis(id);
        let is_late = |since| id_ms.saturating_sub(self.skew.lead) >= since;
        let is_early = |until| id_ms.saturating_add(self.skew.lag) < until;
        self.since.is_none_or(is_late) && self.until.is_none_or(is_early)
    }

    /// Whether a run that was accepted then is one.
    pub fn contains_time(&self, created_ms: i64) -> bool {
        self.since.is_none_or(|since| created_ms >= since)
            && self.until.is_none_or(|until| created_ms < until)
    }
}

/// Records keep whole milliseconds: what a bound between two of them lets through begins at the next.
fn ceil_millis(bound: Timestamp) -> i64 {
    let whole = bound.as_millisecond();
    let rest = bound.as_nanosecond() - i128::from(whole) * 1_000_000;
    if rest > 0 { whole + 1 } else { whole }
}
