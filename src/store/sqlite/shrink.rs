//! Gives pages that nothing uses any more back to the file system, a few at a time. Knows no runs.

use std::time::Duration;

use rusqlite::Connection;
use tracing::warn;

use crate::store::sqlite::schema;

/// Pages (4 KiB each) that one step gives back: each may be one to copy.
const STEP_PAGES: i64 = 64;
/// Free pages that stay, and the share of all pages that does: new runs take them without making the file longer.
const KEPT_PAGES: i64 = 256;
const KEPT_SHARE: i64 = 8;

/// Tries to cut the log before it is left to another time.
const CUTS: u32 = 100;

/// What is done to make the file smaller.
#[derive(Debug)]
pub struct Shrink {
    is_possible: bool,
    /// Whether pages were given back since the log was last cut.
    has_shrunk: bool,
    /// How often the log could not be cut in a row.
    cuts: u32,
    /// Whether the log is to be copied and cut: the file itself gets smaller only then.
    is_settling: bool,
}

impl Shrink {
    /// Of this file.
    pub fn of(connection: &Connection) -> rusqlite::Result<Self> {
        Ok(Self {
            is_possible: schema::can_shrink(connection)?,
            has_shrunk: false,
            cuts: 0,
            is_settling: false,
        })
    }

    /// Gives a few pages back, within the writer's transaction; true where there are more.
    /// Where the disk is full, none are kept for new runs.
    pub fn step(&mut self, connection: &Connection, is_full: bool) -> rusqlite::Result<bool> {
        let count = |name| connection.pragma_query_value(None, name, |row| row.get::<_, i64>(0));
        let (free, pages) = (count("freelist_count")?, count("page_count")?);
        let kept = match is_full {
            true => 0,
            false => KEPT_PAGES.max(pages / KEPT_SHARE),
        };
        let surplus = free - kept;
        if !self.is_possible || surplus <= 0 {
            self.is_settling = self.has_shrunk && self.cuts < CUTS;
            self.cuts = if self.is_settling { self.cuts + 1 } else { 0 };
            return Ok(self.is_settling);
        }
        let step = surplus.min(STEP_PAGES);
        // Each row that is asked for is a page given back.
        let mut sql = connection.prepare(&format!("PRAGMA incremental_vacuum({step})"))?;
        let mut given = sql.query([])?;
        while given.next()?.is_some() {}
        self.has_shrunk = true;
        Ok(true)
    }

    /// Copies and cuts the log where that is due, outside of any transaction. It waits for nobody: where a reader or
    /// another copy is in the way, the next step tries again.
    pub fn settle(&mut self, connection: &Connection) {
        if !std::mem::take(&mut self.is_settling) {
            return;
        }
        let patience = Duration::from_secs(5);
        let cut = connection.busy_timeout(Duration::ZERO).and_then(|()| {
            connection.query_row("PRAGMA wal_checkpoint(truncate)", [], |row| {
                row.get::<_, bool>(0)
            })
        });
        // Whatever came of it: the writer itself is patient.
        let patient = connection.busy_timeout(patience);
        match cut.and_then(|was_busy| patient.map(|()| was_busy)) {
            Ok(was_busy) => self.has_shrunk = was_busy,
            Err(error) => {
                warn!(error = %error, "The store's log could not be cut, trying again: {error}")
            }
        }
    }
}
