//! The readers: a few threads with a connection each, started when they are needed. Knows no SQL of its own.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use rusqlite::{Connection, ErrorCode};
use tokio::sync::{mpsc, oneshot};

use crate::store::StoreError;
use crate::store::sqlite::schema;

/// Reads that may wait; whoever has one more waits himself.
const MAX_QUEUED_READS: usize = 1024;
/// Most threads.
const MAX_READERS: usize = 4;

type ReadJob = Box<dyn FnOnce(Result<&Connection, StoreError>) + Send>;

/// The readers of one database file.
pub struct ReaderPool {
    file: PathBuf,
    max_threads: usize,
    state: Mutex<Option<PoolState>>,
}

/// Where reads are handed in; gone once the store is closed.
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
    /// No thread runs yet.
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

    /// Reads on one of the threads, all statements of `read` over one state of the database.
    pub async fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&Connection) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let job_sender = self.job_sender()?;
        let (reply, result) = oneshot::channel();
        let job: ReadJob = Box::new(move |connection| {
            // Whoever asked may have gone.
            let _ = reply.send(connection.and_then(|connection| read_snapshot(connection, read)));
        });
        job_sender.send(job).await.map_err(|_| StoreError::Closed)?;
        result.await.map_err(|_| StoreError::Closed)?
    }

    /// Refuses further reads and hands over the threads, which end when all that waits is read.
    pub fn close(&self) -> Vec<JoinHandle<()>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.take().map_or_else(Vec::new, |desk| desk.threads)
    }

    /// Where to hand in, with a thread more where all are busy.
    fn job_sender(&self) -> Result<mpsc::Sender<ReadJob>, StoreError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let state = state.as_mut().ok_or(StoreError::Closed)?;
        if state.shared.idle.load(Ordering::Relaxed) == 0 {
            // One that panicked over a read is gone and leaves its place.
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
                            "no thread to read with: {error}"
                        )));
                    }
                    // The others get to it.
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

/// Idle readers queue for the lock; the one that has it waits for the next read.
fn next_job(shared: &SharedQueue) -> Option<ReadJob> {
    shared.idle.fetch_add(1, Ordering::Relaxed);
    let job = shared
        .job_receiver
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .blocking_recv();
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

/// An error of the engine as the contract has it.
pub fn store_error(error: rusqlite::Error) -> StoreError {
    match error.sqlite_error_code() {
        Some(ErrorCode::DiskFull) => StoreError::DiskFull,
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => {
            StoreError::Corrupt(error.to_string())
        }
        Some(_) => StoreError::Backend(error.to_string()),
        None => match error {
            // A column that does not hold what was put into it.
            rusqlite::Error::FromSqlConversionFailure(..)
            | rusqlite::Error::InvalidColumnType(..)
            | rusqlite::Error::IntegralValueOutOfRange(..)
            | rusqlite::Error::Utf8Error(..) => StoreError::Corrupt(error.to_string()),
            error => StoreError::Backend(error.to_string()),
        },
    }
}
