//! Copies the write-ahead log into the database on a thread of its own, so that the writer does not wait for the disk.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use rusqlite::Connection;
use tracing::warn;

use crate::store::StoreError;
use crate::store::sqlite::{files, schema};

/// Writes, and bytes of their steps and events, after which the log is copied. A short log reuses its blocks. A long one
/// takes new blocks from the file system, which costs more than the copy.
const CHECKPOINT_WRITES: usize = 1024;
const CHECKPOINT_BYTES: usize = 4 << 20;
/// Pages of the log (4 KiB each) above which the writer copies the rest itself, so that the log starts from its beginning
/// again: while the writer writes during a copy, the log only grows.
const LONG_WAL_PAGES: i64 = 8_000;

/// The writer's handle of the copying thread.
pub struct Checkpointer {
    wake: Option<SyncSender<()>>,
    is_wal_long: Arc<AtomicBool>,
    writes: usize,
    bytes: usize,
    thread: Option<JoinHandle<()>>,
}

impl Checkpointer {
    pub fn start(file: &Path, reserve: &Path) -> Result<Self, StoreError> {
        let connection = schema::open_for_checkpoints(file)?;
        let (wake, wake_receiver) = sync_channel(1);
        let is_wal_long = Arc::new(AtomicBool::new(false));
        let is_wal_long_flag = Arc::clone(&is_wal_long);
        let reserve = reserve.to_owned();
        let thread = std::thread::Builder::new()
            .name("store-checkpoint".to_owned())
            .spawn(move || {
                run_checkpoints(&connection, &wake_receiver, &is_wal_long_flag, &reserve)
            })
            .map_err(|error| {
                StoreError::Backend(format!(
                    "could not start the thread that copies the log: {error}"
                ))
            })?;
        Ok(Self {
            wake: Some(wake),
            is_wal_long,
            writes: 0,
            bytes: 0,
            thread: Some(thread),
        })
    }

    /// Counts what the writer has committed. If the log has become long, copies the rest of it, so that the next write starts
    /// at its beginning.
    pub fn record_commit(&mut self, writes: usize, bytes: usize, connection: &Connection) {
        self.writes += writes;
        self.bytes += bytes;
        // At once: the rest is what was written during the copy, and grows with each commit.
        let is_wal_long = self.is_wal_long.swap(false, Ordering::AcqRel);
        if !is_wal_long && self.writes < CHECKPOINT_WRITES && self.bytes < CHECKPOINT_BYTES {
            return;
        }
        (self.writes, self.bytes) = (0, 0);
        if is_wal_long {
            log_failure(checkpoint(connection));
        } else if let Some(wake) = &self.wake {
            // Full: the thread is copying already.
            let _ = wake.try_send(());
        }
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
    is_wal_long: &AtomicBool,
    reserve: &Path,
) {
    while wake_receiver.recv().is_ok() {
        if log_failure(checkpoint(connection)).is_some_and(|pages| pages > LONG_WAL_PAGES) {
            is_wal_long.store(true, Ordering::Release);
        }
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
