//! A few reader threads with one connection each, started when they are needed.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;

use parking_lot::Mutex;
use rusqlite::Connection;
use tokio::sync::{mpsc, oneshot};

use crate::store::StoreError;
use crate::store::sqlite::error::store_error;
use crate::store::sqlite::schema;

/// Reads that may wait for a thread. A caller with one more waits for a place in the queue.
const MAX_QUEUED_READS: usize = 1024;
const MAX_READERS: usize = 4;

type ReadJob = Box<dyn FnOnce(Result<&Connection, StoreError>) + Send>;

pub struct ReaderPool {
    file: PathBuf,
    max_threads: usize,
    /// `None` after the store was closed.
    state: Mutex<Option<PoolState>>,
}

struct PoolState {
    job_sender: mpsc::Sender<ReadJob>,
    shared: Arc<SharedQueue>,
    threads: Vec<JoinHandle<()>>,
}

struct SharedQueue {
    job_receiver: Mutex<mpsc::Receiver<ReadJob>>,
    idle: AtomicUsize,
}

impl ReaderPool {
    /// Starts no thread.
    pub fn new(file: PathBuf) -> Self {
        let (sender, receiver) = mpsc::channel(MAX_QUEUED_READS);
        let state = PoolState {
            job_sender: sender,
            shared: Arc::new(SharedQueue {
                job_receiver: Mutex::new(receiver),
                idle: AtomicUsize::new(0),
            }),
            threads: Vec::new(),
        };
        Self {
            file,
            max_threads: std::thread::available_parallelism()
                .map_or(2, usize::from)
                .clamp(1, MAX_READERS),
            state: Mutex::new(Some(state)),
        }
    }

    /// Calls `read` on one of the threads. All its statements see one snapshot of the database.
    pub async fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&Connection) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let job_sender = self.job_sender()?;
        let (reply, result) = oneshot::channel();
        let job: ReadJob = Box::new(move |connection| {
            // The caller may have given up.
            let _ = reply.send(connection.and_then(|connection| read_snapshot(connection, read)));
        });
        job_sender.send(job).await.map_err(|_| StoreError::Closed)?;
        result.await.map_err(|_| StoreError::Closed)?
    }

    /// Rejects further reads. Returns the threads, which end when the queue is empty.
    pub fn close(&self) -> Vec<JoinHandle<()>> {
        let state = self.state.lock().take();
        state.map_or_else(Vec::new, |state| state.threads)
    }

    /// Starts another thread if all are busy.
    fn job_sender(&self) -> Result<mpsc::Sender<ReadJob>, StoreError> {
        let mut state = self.state.lock();
        let state = state.as_mut().ok_or(StoreError::Closed)?;
        if state.shared.idle.load(Ordering::Relaxed) == 0 {
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
                        return Err(StoreError::Backend(format!(
                            "could not start a reader thread: {error}"
                        )));
                    }
                    // The other threads do the read.
                    Err(_) => {}
                }
            }
        }
        Ok(state.job_sender.clone())
    }
}

fn run_reader(file: &std::path::Path, shared: &SharedQueue) {
    let mut connection = None;
    while let Some(job) = next_job(shared) {
        if connection.is_none() {
            match schema::open_reader(file) {
                Ok(opened) => connection = Some(opened),
                Err(error) => {
                    job(Err(error));
                    continue;
                }
            }
        }
        if let Some(connection) = &connection {
            job(Ok(connection));
        }
    }
}

/// Idle threads wait for the lock; the one that has it waits for the next read.
fn next_job(shared: &SharedQueue) -> Option<ReadJob> {
    shared.idle.fetch_add(1, Ordering::Relaxed);
    let job = shared.job_receiver.lock().blocking_recv();
    shared.idle.fetch_sub(1, Ordering::Relaxed);
    job
}

fn read_snapshot<T>(
    connection: &Connection,
    read: impl FnOnce(&Connection) -> Result<T, StoreError>,
) -> Result<T, StoreError> {
    connection
        .prepare_cached("BEGIN")
        .and_then(|mut sql| sql.execute([]))
        .map_err(store_error)?;
    let result = read(connection);
    connection
        .prepare_cached("COMMIT")
        .and_then(|mut sql| sql.execute([]))
        .map_err(store_error)?;
    result
}
