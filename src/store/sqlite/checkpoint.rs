//! Copies the write-ahead log into the database on a thread of its own, so that the writer does not wait for the disk.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use rusqlite::Connection;
use tracing::warn;

use crate::standing_task;
use crate::store::StoreError;
use crate::store::encoding::integers;
use crate::store::sqlite::{files, schema};

/// Writes, and bytes of their steps and events, after which the log is copied. A short log reuses its blocks. A long one
/// takes new blocks from the file system, which costs more than the copy.
const CHECKPOINT_WRITES: usize = 1024;
const CHECKPOINT_BYTES: usize = 4 << 20;
/// Pages of the log (4 KiB each) above which the writer copies the rest itself, so that the log starts from its beginning
/// again: while the writer writes during a copy, the log only grows.
const LONG_WAL_PAGES: i64 = 8_000;
/// Pages by which a copy may enlarge the database file. If more are in the log, the writer copies them itself: on a full disk the
/// reserve has to suffice for them.
const MAX_GROWTH_PAGES: i64 = 1_024;
/// Bytes of steps and events after which the growth is measured.
const MEASURE_BYTES: usize = 256 << 10;
const PAGE_BYTES: u64 = 4_096;
/// Writes after which the reserve is created: a process that records few runs writes none.
const RESERVE_WRITES: usize = 64;

/// The writer's handle of the copying thread.
pub struct Checkpointer {
    wake: Option<SyncSender<()>>,
    shared: Arc<Shared>,
    writes: usize,
    bytes: usize,
    unmeasured_bytes: usize,
    file: PathBuf,
    /// The growth at which the writer copies again.
    max_growth: i64,
    is_reserve_requested: bool,
    thread: Option<JoinHandle<()>>,
}

/// What the copying thread tells the writer.
#[derive(Default)]
struct Shared {
    is_wal_long: AtomicBool,
    /// Pages of the database file after the last copy.
    file_pages: AtomicI64,
}

impl Checkpointer {
    pub fn start(file: &Path, reserve: &Path) -> Result<Self, StoreError> {
        let connection = schema::open_for_checkpoints(file)?;
        let (wake, wake_receiver) = sync_channel(1);
        let shared = Arc::new(Shared::default());
        let thread_shared = Arc::clone(&shared);
        let (thread_file, reserve) = (file.to_owned(), reserve.to_owned());
        shared.measure(file);
        let thread = std::thread::Builder::new()
            .name("store-checkpoint".to_owned())
            .spawn(move || {
                standing_task::run_thread("Copying the store's log", || {
                    run_checkpoints(
                        &connection,
                        &wake_receiver,
                        &thread_shared,
                        &thread_file,
                        &reserve,
                    );
                });
            })
            .map_err(|error| {
                StoreError::Backend(format!(
                    "could not start the thread that copies the log: {error}"
                ))
            })?;
        Ok(Self {
            wake: Some(wake),
            shared,
            writes: 0,
            bytes: 0,
            unmeasured_bytes: 0,
            file: file.to_owned(),
            max_growth: MAX_GROWTH_PAGES,
            is_reserve_requested: false,
            thread: Some(thread),
        })
    }

    /// Counts what the writer has committed. If the log has become long, copies the rest of it, so that the next write starts
    /// at its beginning.
    pub fn record_commit(&mut self, writes: usize, bytes: usize, connection: &Connection) {
        self.writes += writes;
        self.bytes += bytes;
        // At once: the rest is what was written during the copy, and grows with each commit.
        if self.shared.is_wal_long.swap(false, Ordering::AcqRel) {
            self.copy(connection);
            (self.writes, self.bytes) = (0, 0);
        }
        self.unmeasured_bytes += bytes;
        if self.unmeasured_bytes >= MEASURE_BYTES {
            self.unmeasured_bytes = 0;
            self.limit_growth(connection);
        }
        let is_due = self.writes >= CHECKPOINT_WRITES || self.bytes >= CHECKPOINT_BYTES;
        let needs_reserve = !self.is_reserve_requested && self.writes >= RESERVE_WRITES;
        if is_due || needs_reserve {
            (self.writes, self.bytes) = (0, 0);
            self.is_reserve_requested = true;
            if let Some(wake) = &self.wake {
                // Full: the thread is copying already.
                let _ = wake.try_send(());
            }
        }
    }

    /// Copies the log if too many of its pages are not in the database file. Readers may prevent that, so the next copy is tried
    /// after as many pages more.
    fn limit_growth(&mut self, connection: &Connection) {
        let growth = self.growth(connection);
        if growth > self.max_growth {
            self.copy(connection);
            self.max_growth = self.growth(connection) + MAX_GROWTH_PAGES;
        } else {
            self.max_growth = self.max_growth.min(growth + MAX_GROWTH_PAGES);
        }
    }

    /// Pages of the database that are not in its file.
    fn growth(&self, connection: &Connection) -> i64 {
        let pages = connection.pragma_query_value(None, "page_count", |row| row.get::<_, i64>(0));
        let file_pages = self.shared.file_pages.load(Ordering::Acquire);
        pages.map_or(0, |pages| (pages - file_pages).max(0))
    }

    fn copy(&self, connection: &Connection) {
        log_failure(checkpoint(connection));
        self.shared.measure(&self.file);
    }
}

impl Shared {
    fn measure(&self, file: &Path) {
        let pages = files::file_size(file).unwrap_or(0) / PAGE_BYTES;
        self.file_pages
            .store(integers::signed(pages), Ordering::Release);
    }
}

/// Copies as much of the log as readers allow: on a full disk it must not grow.
pub fn checkpoint_now(connection: &Connection) {
    log_failure(checkpoint(connection));
}

impl Drop for Checkpointer {
    fn drop(&mut self) {
        drop(self.wake.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn run_checkpoints(
    connection: &Connection,
    wake_receiver: &Receiver<()>,
    shared: &Shared,
    file: &Path,
    reserve: &Path,
) {
    while wake_receiver.recv().is_ok() {
        if log_failure(checkpoint(connection)).is_some_and(|pages| pages > LONG_WAL_PAGES) {
            shared.is_wal_long.store(true, Ordering::Release);
        }
        shared.measure(file);
        files::create_reserve(reserve);
    }
}

/// Copies as much as readers allow; returns the log's length in pages.
fn checkpoint(connection: &Connection) -> rusqlite::Result<i64> {
    connection.query_row("PRAGMA wal_checkpoint(passive)", [], |row| row.get("log"))
}

fn log_failure(result: rusqlite::Result<i64>) -> Option<i64> {
    result.inspect_err(
        |error| warn!(error = %error, "The store's log could not be copied, trying again: {error}"),
    )
    .ok()
}
