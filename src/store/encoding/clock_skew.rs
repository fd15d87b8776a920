//! How far the times in the ids of runs are from those in their records. With it a search by time becomes a range of ids.
//! New ids always sort after those in the store, so after the clock was set back they are ahead of it.

use jiff::Timestamp;
use uuid::Uuid;

use crate::domain::run::RunId;
use crate::store::encoding::integers::signed;

/// No delivery waits longer for its next attempt: twice the longest wait, in milliseconds.
pub const MAX_RETRY_MS: i64 = 2 * 3_600_000;
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

/// The milliseconds in an id.
pub fn id_millis(id: u128) -> i64 {
    i64::try_from(id >> ID_RANDOM_BITS).unwrap_or(i64::MAX)
}

/// When a run's id was made, in milliseconds since 1970. Ids sort by this time.
pub fn created_ms(run: RunId) -> i64 {
    let created = run.0.get_timestamp().map_or((0, 0), |time| time.to_unix());
    signed(created.0.saturating_mul(1000) + u64::from(created.1 / 1_000_000))
}

/// No id that was made at this time is before this one.
pub fn first_id(at: Timestamp) -> Uuid {
    let milliseconds = u128::from(at.as_millisecond().max(0).unsigned_abs());
    Uuid::from_u128(milliseconds << ID_RANDOM_BITS)
}

/// The times of acceptance that a filter allows, and the range of ids that they can have.
pub struct CreatedRange {
    /// In milliseconds.
    pub since: Option<i64>,
    /// In milliseconds, excluded.
    pub until: Option<i64>,
    skew: ClockSkew,
}

impl CreatedRange {
    /// Times from `since` on, and before `until`.
    pub fn new(since: Option<Timestamp>, until: Option<Timestamp>, skew: ClockSkew) -> Self {
        Self {
            since: since.map(ceil_millis),
            until: until.map(ceil_millis),
            skew,
        }
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
