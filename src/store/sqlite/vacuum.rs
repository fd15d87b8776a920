//! Gives pages that nothing uses any more back to the file system, a few at a time. Knows no runs.

use std::time::Duration;

use rusqlite::Connection;
use tracing::warn;

use crate::store::sqlite::schema;

/// Pages (4 KiB each) that one step gives back: each may be one to copy.
const STEP_PAGES: i64 = 64;
/// Free pages that stay, and the share of all pages that does: new runs take them without making the file longer.
const MIN_FREE_PAGES: i64 = 256;
const FREE_PAGES_DIVISOR: i64 = 8;

/// Tries to cut the log before it is left to another time.
const MAX_TRUNCATE_ATTEMPTS: u32 = 100;

/// What is done to make the file smaller.
#[derive(Debug)]
pub struct Vacuum {
    is_supported: bool,
    /// Whether pages were given back since the log was last cut.
    needs_truncate: bool,
    /// How often the log could not be cut in a row.
    truncate_attempts: u32,
    /// Whether the log is to be copied and cut: the file itself gets smaller only then.
    is_truncate_due: bool,
}

impl Vacuum {
    /// Of this file.
    pub fn new(connection: &Connection) -> rusqlite::Result<Self> {
        Ok(Self {
            is_supported: schema::has_incremental_vacuum(connection)?,
            needs_truncate: false,
            truncate_attempts: 0,
            is_truncate_due: false,
        })
    }

    /// Gives a few pages back, within the writer's transaction; true where there are more.
    /// Where the disk is full, none are kept for new runs.
    pub fn step(&mut self, connection: &Connection, is_disk_full: bool) -> rusqlite::Result<bool> {
        let count = |name| connection.pragma_query_value(None, name, |row| row.get::<_, i64>(0));
        let (free, pages) = (count("freelist_count")?, count("page_count")?);
        let reserved = match is_disk_full {
            true => 0,
            false => MIN_FREE_PAGES.max(pages / FREE_PAGES_DIVISOR),
        };
        let surplus = free - reserved;
        if !self.is_supported || surplus <= 0 {
            self.is_truncate_due =
                self.needs_truncate && self.truncate_attempts < MAX_TRUNCATE_ATTEMPTS;
            self.truncate_attempts = if self.is_truncate_due {
                self.truncate_attempts + 1
            } else {
                0
            };
            return Ok(self.is_truncate_due);
        }
        let step = surplus.min(STEP_PAGES);
        // Each row that is asked for is a page given back.
        let mut sql = connection.prepare(&format!("PRAGMA incremental_vacuum({step})"))?;
        let mut freed = sql.query([])?;
        while freed.next()?.is_some() {}
        self.needs_truncate = true;
        Ok(true)
    }

    /// Copies and cuts the log where that is due, outside of any transaction. It waits for nobody: where a reader or
    /// another copy is in the way, the next step tries again.
    pub fn truncate_wal(&mut self, connection: &Connection) {
        if !std::mem::take(&mut self.is_truncate_due) {
            return;
        }
        let busy_timeout = Duration::from_secs(5);
        let truncated = connection.busy_timeout(Duration::ZERO).and_then(|()| {
            connection.query_row("PRAGMA wal_checkpoint(truncate)", [], |row| {
                row.get::<_, bool>(0)
            })
        });
        // Whatever came of it: the writer itself is patient.
        let restored = connection.busy_timeout(busy_timeout);
        match truncated.and_then(|was_busy| restored.map(|()| was_busy)) {
            Ok(was_busy) => self.needs_truncate = was_busy,
            Err(error) => {
                warn!(error = %error, "The store's log could not be cut, trying again: {error}")
            }
        }
    }
}
