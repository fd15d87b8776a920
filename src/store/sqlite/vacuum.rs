//! Returns unused pages to the file system, a few at a time.

use std::time::Duration;

use rusqlite::Connection;
use tracing::warn;

use crate::store::sqlite::schema;

/// Pages (4 KiB each) that one step returns. Each may require copying another page.
const STEP_PAGES: i64 = 64;
/// Free pages that are kept, at least this number and this share of all pages: new runs use them before the file grows.
const MIN_FREE_PAGES: i64 = 256;
const FREE_PAGES_DIVISOR: i64 = 8;

/// Attempts in a row to truncate the log.
const MAX_TRUNCATE_ATTEMPTS: u32 = 100;

#[derive(Debug)]
pub struct Vacuum {
    is_supported: bool,
    /// Whether pages were returned since the log was last truncated.
    needs_truncate: bool,
    /// Failed attempts in a row.
    truncate_attempts: u32,
    /// Whether the log is to be copied and truncated; the file shrinks only then.
    is_truncate_due: bool,
}

impl Vacuum {
    pub fn new(connection: &Connection) -> rusqlite::Result<Self> {
        Ok(Self {
            is_supported: schema::has_incremental_vacuum(connection)?,
            needs_truncate: false,
            truncate_attempts: 0,
            is_truncate_due: false,
        })
    }

    /// Returns a few pages, within the writer's transaction; true if there is more to do. If the disk is full, no free pages
    /// are kept.
    pub fn step(&mut self, connection: &Connection, is_disk_full: bool) -> rusqlite::Result<bool> {
        let count =
            |name: &str| connection.pragma_query_value(None, name, |row| row.get::<_, i64>(name));
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
        // Each row that is read returns one page.
        let mut sql = connection.prepare(&format!("PRAGMA incremental_vacuum({step})"))?;
        let mut freed = sql.query([])?;
        while freed.next()?.is_some() {}
        self.needs_truncate = true;
        Ok(true)
    }

    /// Copies and truncates the log if that is due, outside of any transaction. It does not wait for readers: if one is in
    /// the way, the next step tries again.
    pub fn truncate_wal(&mut self, connection: &Connection) {
        if !std::mem::take(&mut self.is_truncate_due) {
            return;
        }
        let busy_timeout = Duration::from_secs(5);
        let truncated = connection.busy_timeout(Duration::ZERO).and_then(|()| {
            connection.query_row("PRAGMA wal_checkpoint(truncate)", [], |row| {
                row.get::<_, bool>("busy")
            })
        });
        let restored = connection.busy_timeout(busy_timeout);
        match truncated.and_then(|was_busy| restored.map(|()| was_busy)) {
            Ok(was_busy) => self.needs_truncate = was_busy,
            Err(error) => {
                warn!(error = %error, "The store's log could not be truncated, trying again: {error}")
            }
        }
    }
}
