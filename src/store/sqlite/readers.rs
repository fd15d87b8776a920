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
const WAITING_READS: usize = 1024;
/// Most threads.
const MOST_READERS: usize = 4;

type Read = Box<dyn FnOnce(Result<&Connection, StoreError>) + Send>;

/// The readers of one database file.
pub struct Readers {
    file: PathBuf,
    most: usize,
    desk: Mutex<Option<Desk>>,
}

/// Where reads are handed in; gone once the store is closed.
struct Desk {
    reads: mpsc::Sender<Read>,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    reads: Mutex<mpsc::Receiver<Read>>,
    idle: AtomicUsize,
}

impl Readers {
    /// No thread runs yet.
    pub fn new(file: PathBuf) -> Self {
        let (sender, receiver) = mpsc::channel(WAITING_READS);
        let desk = Desk {
            reads: sender,
            shared: Arc::new(Shared {
                reads: Mutex::new(receiver),
                idle: AtomicUsize::new(0),
            }),
            threads: Vec::new(),
        };
        Self {
            file,
            most: std::thread::available_parallelism()
                .map_or(2, usize::from)
                .clamp(1, MOST_READERS),
            desk: Mutex::new(Some(desk)),
        }
    }

    /// Reads on one of the threads, all statements of `read` over one state of the database.
    pub async fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&Connection) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let reads = self.desk()?;
        let (answer, result) = oneshot::channel();
        let job: Read = Box::new(move |connection| {
            // Whoever asked may have gone.
            let _ = answer.send(connection.and_then(|connection| snapshot(connection, read)));
        });
        reads.send(job).await.map_err(|_| StoreError::Closed)?;
        result.await.map_err(|_| StoreError::Closed)?
    }

    /// Refuses further reads and hands over the threads, which end when all that waits is read.
    pub fn close(&self) -> Vec<JoinHandle<()>> {
        let mut desk = self.desk.lock().unwrap_or_else(PoisonError::into_inner);
        desk.take().map_or_else(Vec::new, |desk| desk.threads)
    }

    /// Where to hand in, with a thread more where all are busy.
    fn desk(&self) -> Result<mpsc::Sender<Read>, StoreError> {
        let mut desk = self.desk.lock().unwrap_or_else(PoisonError::into_inner);
        let desk = desk.as_mut().ok_or(StoreError::Closed)?;
        if desk.shared.idle.load(Ordering::Relaxed) == 0 {
            // One that panicked over a read is gone and leaves its place.
            desk.threads.retain(|thread| !thread.is_finished());
            if desk.threads.len() < self.most {
                let (file, shared) = (self.file.clone(), Arc::clone(&desk.shared));
                let started = std::thread::Builder::new()
                    .name("store-reader".to_owned())
                    .spawn(move || serve(&file, &shared));
                match started {
                    Ok(thread) => desk.threads.push(thread),
                    Err(error) if desk.threads.is_empty() => {
                        return Err(StoreError::Engine(format!(
                            "no thread to read with: {error}"
                        )));
                    }
                    // The others get to it.
                    Err(_) => {}
                }
            }
        }
        Ok(desk.reads.clone())
    }
}

fn serve(file: &std::path::Path, shared: &Shared) {
    let mut connection = None;
    while let Some(read) = next(shared) {
        if connection.is_none() {
            match schema::open_reader(file) {
                Ok(opened) => connection = Some(opened),
                Err(error) => {
                    read(Err(error));
                    continue;
                }
            }
        }
        if let Some(connection) = &connection {
            read(Ok(connection));
        }
    }
}

/// Idle readers queue for the lock; the one that has it waits for the next read.
fn next(shared: &Shared) -> Option<Read> {
    shared.idle.fetch_add(1, Ordering::Relaxed);
    let read = shared
        .reads
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .blocking_recv();
    shared.idle.fetch_sub(1, Ordering::Relaxed);
    read
}

fn snapshot<T>(
    connection: &Connection,
    read: impl FnOnce(&Connection) -> Result<T, StoreError>,
) -> Result<T, StoreError> {
    connection
        .prepare_cached("BEGIN")
        .and_then(|mut sql| sql.execute([]))
        .map_err(failed)?;
    let result = read(connection);
    connection
        .prepare_cached("COMMIT")
        .and_then(|mut sql| sql.execute([]))
        .map_err(failed)?;
    result
}

/// An error of the engine as the contract has it.
pub fn failed(error: rusqlite::Error) -> StoreError {
    match error.sqlite_error_code() {
        Some(ErrorCode::DiskFull) => StoreError::Full,
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => {
            StoreError::Damaged(error.to_string())
        }
        Some(_) => StoreError::Engine(error.to_string()),
        None => match error {
            // A column that does not hold what was put into it.
            rusqlite::Error::FromSqlConversionFailure(..)
            | rusqlite::Error::InvalidColumnType(..)
            | rusqlite::Error::IntegralValueOutOfRange(..)
            | rusqlite::Error::Utf8Error(..) => StoreError::Damaged(error.to_string()),
            error => StoreError::Engine(error.to_string()),
        },
    }
}
