//! How far the times in the ids of runs are from those in their records. With it a search by time becomes a range of ids.
//! New ids always sort after those in the store, so after the clock was set back they are ahead of it.

use jiff::Timestamp;
use rusqlite::{Connection, OptionalExtension, named_params};
use uuid::Uuid;

use crate::domain::run::{RunId, now};
use crate::store::StoreError;
use crate::store::sqlite::error::store_error;

/// No delivery waits longer for its next attempt: twice the longest wait, in milliseconds.
const MAX_RETRY_MS: i64 = 2 * 3_600_000;
/// Bits of an id after its milliseconds.
const ID_RANDOM_BITS: u32 = 80;

/// The largest differences of all runs that were ever accepted, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockSkew {
    /// How far an id is ahead of its record.
    pub lead: i64,
    /// How far an id is behind its record.
    pub lag: i64,
}

impl ClockSkew {
    pub fn read(db: &Connection) -> rusqlite::Result<Self> {
        let stored = db
            .prepare_cached("SELECT lead, lag FROM clock WHERE id = 1")?
            .query_row([], |row| {
                Ok(Self {
                    lead: row.get("lead")?,
                    lag: row.get("lag")?,
                })
            })
            .optional()?;
        Ok(stored.unwrap_or(Self { lead: 0, lag: 0 }))
    }

    pub fn write(self, db: &Connection) -> rusqlite::Result<()> {
        db.prepare_cached("UPDATE clock SET lead = :lead, lag = :lag WHERE id = 1")?
            .execute(named_params! {":lead": self.lead, ":lag": self.lag})
            .map(drop)
    }

    pub fn max(self, other: Self) -> Self {
        Self {
            lead: self.lead.max(other.lead),
            lag: self.lag.max(other.lag),
        }
    }

    /// Adds a run: the times of its id and of its record, in milliseconds.
    pub fn including(self, id_ms: i64, created_ms: i64) -> Self {
        Self {
            lead: self.lead.max(id_ms.saturating_sub(created_ms)),
            lag: self.lag.max(created_ms.saturating_sub(id_ms)),
        }
    }
}

/// Measures the skew of the runs that an older version accepted, along indexes.
pub fn measure(db: &Connection) -> rusqlite::Result<()> {
    let mut skew = ClockSkew::read(db)?;
    for query in [
        "SELECT id, created_at FROM runs INDEXED BY runs_finished WHERE finished_at IS NOT NULL",
        "SELECT id, created_at FROM runs INDEXED BY runs_unfinished WHERE finished_at IS NULL",
    ] {
        let mut sql = db.prepare(query)?;
        let mut found = sql.query([])?;
        while let Some(row) = found.next()? {
            let id = row.get("id").map(u128::from_be_bytes)?;
            skew = skew.including(id_millis(id), row.get("created_at")?);
        }
    }
    skew.write(db)
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
        let stored = ClockSkew::read(db)?;
        let skew = stored.including(id_millis(id), created);
        if skew != stored {
            skew.write(db)?;
        }
    }
    let now = now().as_millisecond();
    db.execute(
        "UPDATE deliveries SET next_at = :now, since = min(since, :now) WHERE next_at > :now + :max_wait",
        named_params! {":now": now, ":max_wait": MAX_RETRY_MS},
    )?;
    Ok(())
}

/// The milliseconds in an id.
fn id_millis(id: u128) -> i64 {
    i64::try_from(id >> ID_RANDOM_BITS).unwrap_or(i64::MAX)
}

/// The times of acceptance that a filter allows, and the range of ids that they can have.
pub struct CreatedRange {
    since: Option<i64>,
    until: Option<i64>,
    skew: ClockSkew,
}

impl CreatedRange {
    /// Times from `since` on, and before `until`.
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

    /// The oldest id that may have such a time.
    pub fn oldest_id(&self) -> Option<u128> {
        let since = self.since?.saturating_sub(self.skew.lag);
        Some(u128::from(since.max(0).unsigned_abs()) << ID_RANDOM_BITS)
    }

    /// All ids with such a time are before this one.
    pub fn end_id(&self) -> Option<u128> {
        let until = self.until?.saturating_add(self.skew.lead);
        let until = u128::from(until.max(0).unsigned_abs());
        (until < 1 << 48).then_some(until << ID_RANDOM_BITS)
    }

    /// Whether the id alone says that the run has such a time.
    pub fn contains_id(&self, id: u128) -> bool {
        let id_ms = id_millis(id);
        let is_late = |since| id_ms.saturating_sub(self.skew.lead) >= since;
        let is_early = |until| id_ms.saturating_add(self.skew.lag) < until;
        self.since.is_none_or(is_late) && self.until.is_none_or(is_early)
    }

    pub fn contains_time(&self, created_ms: i64) -> bool {
        self.since.is_none_or(|since| created_ms >= since)
            && self.until.is_none_or(|until| created_ms < until)
    }
}

/// Rounds up: records have whole milliseconds.
fn ceil_millis(bound: Timestamp) -> i64 {
    let whole = bound.as_millisecond();
    let rest = bound.as_nanosecond() - i128::from(whole) * 1_000_000;
    if rest > 0 { whole + 1 } else { whole }
}
