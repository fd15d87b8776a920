//! A few reader threads with one connection each, started when they are needed.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicIsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use tokio::sync::{Semaphore, mpsc, oneshot};

use crate::store::StoreError;
use crate::store::reader::{ReadMode, Reader};
use crate::store::sqlite::reader::SqliteReader;
use crate::store::sqlite::schema;

/// Reads that may wait for a thread. A caller with one more waits for a place in the queue.
const MAX_QUEUED_READS: usize = 1024;
const MAX_READERS: usize = 4;

/// The pauses between the attempts to read what SQLite calls damaged.
const REREAD_PAUSES: [Duration; 5] = [
    Duration::from_millis(100),
    Duration::from_millis(200),
    Duration::from_millis(400),
    Duration::from_millis(800),
    Duration::from_millis(1600),
];
/// How long nothing is read again after a read has stayed damaged through all attempts: a list may meet many such records.
const MIN_REREAD_INTERVAL: Duration = Duration::from_secs(30);

type ReadJob = Box<dyn FnOnce(Result<&Reader, StoreError>) + Send>;

pub struct ReaderPool {
    file: PathBuf,
    max_threads: usize,
    /// Permits of reads that may take long: others find a thread meanwhile, unless there is only one.
    long_reads: Arc<Semaphore>,
    /// `None` after the store was closed.
    state: Mutex<Option<PoolState>>,
    /// When a read last stayed damaged through all attempts; a reread that succeeds resets it.
    gave_up_at: Mutex<Option<Instant>>,
}

struct PoolState {
    job_sender: mpsc::Sender<ReadJob>,
    shared: Arc<SharedQueue>,
    threads: Vec<JoinHandle<()>>,
}

struct SharedQueue {
    job_receiver: Mutex<mpsc::Receiver<ReadJob>>,
    /// Idle threads, less queued reads.
    free: AtomicIsize,
}

impl ReaderPool {
    /// Starts no thread.
    pub fn new(file: PathBuf) -> Self {
        let (sender, receiver) = mpsc::channel(MAX_QUEUED_READS);
        let state = PoolState {
            job_sender: sender,
            shared: Arc::new(SharedQueue {
                job_receiver: Mutex::new(receiver),
                free: AtomicIsize::new(0),
            }),
            threads: Vec::new(),
        };
        let max_threads = std::thread::available_parallelism()
            .map_or(2, usize::from)
            .clamp(1, MAX_READERS);
        Self {
            file,
            max_threads,
            long_reads: Arc::new(Semaphore::new(max_threads.saturating_sub(1).max(1))),
            state: Mutex::new(Some(state)),
            gave_up_at: Mutex::default(),
        }
    }

    /// As [`Self::read`]. What may take long waits for a permit.
    pub async fn read_in<T: Send + 'static>(
        &self,
        mode: ReadMode,
        read: impl for<'r> FnOnce(&'r Reader) -> BoxFuture<'r, Result<T, StoreError>>
        + Clone
        + Send
        + 'static,
    ) -> Result<T, StoreError> {
        if !mode.is_long() {
            return self.read(read).await;
        }
        let permit = Arc::clone(&self.long_reads).acquire_owned().await;
        let permit = Arc::new(permit.map_err(|_| StoreError::Closed)?);
        self.read(move |db| {
            Box::pin(async move {
                // Kept until the read has ended, also if the caller gives up.
                let _permit = permit;
                read(db).await
            })
        })
        .await
    }

    /// As [`Self::read`], without the runs that SQLite cannot read.
    pub async fn read_without_malformed<T: Send + 'static>(
        &self,
        read: impl for<'r> FnOnce(&'r Reader) -> BoxFuture<'r, Result<T, StoreError>>
        + Clone
        + Send
        + 'static,
    ) -> Result<T, StoreError> {
        self.read(move |db| {
            Box::pin(async move {
                let leave_out = |leaves_out| {
                    if let Reader::Sqlite(reader) = db {
                        reader.leave_out_malformed(leaves_out);
                    }
                };
                leave_out(true);
                let found = read(db).await;
                leave_out(false);
                found
            })
        })
        .await
    }

    /// Calls `read` on one of the threads. All its statements see one snapshot of the database. Reads again for some seconds
    /// if SQLite calls the database damaged, since a disk that fails a read looks the same, unless a read has shortly before
    /// stayed damaged through all attempts.
    pub async fn read<T: Send + 'static>(
        &self,
        read: impl for<'r> FnOnce(&'r Reader) -> BoxFuture<'r, Result<T, StoreError>>
        + Clone
        + Send
        + 'static,
    ) -> Result<T, StoreError> {
        let mut result = self.read_once(read.clone()).await;
        if !is_malformed(&result) {
            return result;
        }
        for (attempt, pause) in REREAD_PAUSES.into_iter().enumerate() {
            // Another read may give up meanwhile.
            if self.has_given_up() {
                return result;
            }
            if attempt == 0 {
                log_reread(&result);
            }
            tokio::time::sleep(pause).await;
            result = self.read_once(read.clone()).await;
            if !is_malformed(&result) {
                *self.gave_up_at.lock() = None;
                return result;
            }
        }
        *self.gave_up_at.lock() = Some(Instant::now());
        result
    }

    fn has_given_up(&self) -> bool {
        let gave_up_at = *self.gave_up_at.lock();
        gave_up_at.is_some_and(|at| at.elapsed() < MIN_REREAD_INTERVAL)
    }

    async fn read_once<T: Send + 'static>(
        &self,
        read: impl for<'r> FnOnce(&'r Reader) -> BoxFuture<'r, Result<T, StoreError>> + Send + 'static,
    ) -> Result<T, StoreError> {
        let job_sender = self.job_sender()?;
        let permit = job_sender.reserve().await.map_err(|_| StoreError::Closed)?;
        let (reply, result) = oneshot::channel();
        let job: ReadJob = Box::new(move |reader| {
            // The caller may have given up.
            let _ = reply.send(reader.and_then(|reader| read_now(reader, read)));
        });
        self.provide_thread()?;
        permit.send(job);
        result.await.map_err(|_| StoreError::Closed)?
    }

    /// Rejects further reads. Returns the threads, which end when the queue is empty.
    pub fn close(&self) -> Vec<JoinHandle<()>> {
        let state = self.state.lock().take();
        state.map_or_else(Vec::new, |state| state.threads)
    }

    fn job_sender(&self) -> Result<mpsc::Sender<ReadJob>, StoreError> {
        let state = self.state.lock();
        let state = state.as_ref().ok_or(StoreError::Closed)?;
        Ok(state.job_sender.clone())
    }

    /// Starts another thread if no idle one is free for the read that is queued next.
    fn provide_thread(&self) -> Result<(), StoreError> {
        let mut state = self.state.lock();
        let state = state.as_mut().ok_or(StoreError::Closed)?;
        if state.shared.free.fetch_sub(1, Ordering::Relaxed) <= 0 {
            // A thread that panicked during a read is replaced.
            state.threads.retain(|thread| !thread.is_finished());
            if state.threads.len() < self.max_threads {
                let (file, shared) = (self.file.clone(), Arc::clone(&state.shared));
                let started = std::thread::Builder::new()
                    .name("store-reader".to_owned())
                    .spawn(move || run_reader(&file, &shared));
                match started {
                    Ok(thread) => state.threads.push(thread),
                    Err(error) if state.threads.is_empty() => {
                        state.shared.free.fetch_add(1, Ordering::Relaxed);
                        return Err(StoreError::Backend(format!(
                            "could not start a reader thread: {error}"
                        )));
                    }
                    // The other threads do the read.
                    Err(_) => {}
                }
            }
        }
        Ok(())
    }
}

/// The result of a read, which does not wait.
fn read_now<T>(
    reader: &Reader,
    read: impl for<'r> FnOnce(&'r Reader) -> BoxFuture<'r, Result<T, StoreError>>,
) -> Result<T, StoreError> {
    let Reader::Sqlite(connection) = reader else {
        return Err(StoreError::Closed);
    };
    connection.snapshot(|_| {
        read(reader)
            .now_or_never()
            .unwrap_or(Err(StoreError::Closed))
    })
}

fn is_malformed<T>(result: &Result<T, StoreError>) -> bool {
    matches!(result, Err(StoreError::Malformed(_)))
}

fn log_reread<T>(result: &Result<T, StoreError>) {
    if let Err(error) = result {
        tracing::warn!(error = %error, "SQLite cannot read the database, trying again: {error}");
    }
}

fn run_reader(file: &std::path::Path, shared: &SharedQueue) {
    let mut reader = None;
    while let Some(job) = next_job(shared) {
        if reader.is_none() {
            match schema::open_reader(file) {
                Ok(opened) => reader = Some(Reader::Sqlite(SqliteReader::new(opened))),
                Err(error) => {
                    job(Err(error));
                    continue;
                }
            }
        }
        if let Some(reader) = &reader {
            job(Ok(reader));
        }
    }
}

/// Idle threads wait for the lock; the one that has it waits for the next read.
fn next_job(shared: &SharedQueue) -> Option<ReadJob> {
    shared.free.fetch_add(1, Ordering::Relaxed);
    shared.job_receiver.lock().blocking_recv()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use rusqlite::Connection;
    use tempfile::TempDir;

    use super::*;

    /// A read that uses no connection.
    fn now<T: Send + 'static>(
        read: impl FnOnce() -> Result<T, StoreError> + Clone,
    ) -> impl for<'r> FnOnce(&'r Reader) -> BoxFuture<'r, Result<T, StoreError>> + Clone {
        move |_| Box::pin(std::future::ready(read()))
    }

    fn pool() -> (TempDir, ReaderPool) {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("axed.db");
        let db = Connection::open(&file).expect("a database");
        db.execute_batch("CREATE TABLE t (n)").expect("a table");
        (dir, ReaderPool::new(file))
    }

    #[tokio::test]
    async fn what_sqlite_calls_damaged_is_read_again() {
        let (_dir, pool) = pool();
        let attempts = Arc::new(AtomicUsize::new(0));
        let read = move || match attempts.fetch_add(1, Ordering::Relaxed) {
            0 | 1 => Err(StoreError::Malformed("a page".to_owned())),
            attempt => Ok(attempt),
        };
        assert_eq!(pool.read(now(read)).await.expect("a value"), 2);
    }

    #[tokio::test]
    async fn what_stays_damaged_is_read_once_for_a_while() {
        let (_dir, pool) = pool();
        let attempts = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&attempts);
        let read = move || {
            counted.fetch_add(1, Ordering::Relaxed);
            Err::<(), _>(StoreError::Malformed("a page".to_owned()))
        };
        let mut reads = Vec::new();
        for _ in 0..3 {
            let before = attempts.load(Ordering::Relaxed);
            let result = pool.read(now(read.clone())).await;
            assert!(is_malformed(&result), "{result:?}");
            reads.push(attempts.load(Ordering::Relaxed) - before);
        }
        assert_eq!(reads, [REREAD_PAUSES.len() + 1, 1, 1]);
    }

    #[tokio::test]
    async fn a_read_does_not_wait_for_one_that_takes_long() {
        let (_dir, pool) = pool();
        let pool = ReaderPool {
            max_threads: 2,
            ..pool
        };
        pool.read(now(|| Ok(()))).await.expect("a thread");
        let has_idle_thread = || {
            let state = pool.state.lock();
            let free = &state.as_ref().expect("an open pool").shared.free;
            free.load(Ordering::Relaxed) == 1
        };
        while !has_idle_thread() {
            std::thread::yield_now();
        }
        let (end, ended) = std::sync::mpsc::channel();
        let ended = Arc::new(Mutex::new(ended));
        let long = pool.read(now(move || {
            Ok(ended.lock().recv_timeout(Duration::from_secs(10)))
        }));
        let short = async {
            pool.read(now(|| Ok(()))).await.expect("read");
            end.send(()).expect("a long read");
        };
        let (long, ()) = tokio::join!(long, short);
        assert_eq!(long.expect("read"), Ok(()), "the other one ended meanwhile");
    }
}
