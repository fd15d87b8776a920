//! The connections for reading. Each read is a task of its own: a caller that has begun one and is not polled, such as a stream
//! with several reads, would otherwise keep its connection from all others.

use std::sync::Arc;
use std::time::Duration;

use deadpool_postgres::{Pool, PoolError, TimeoutType};
use futures_util::future::BoxFuture;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio_util::task::TaskTracker;

use crate::store::StoreError;
use crate::store::postgres::connect::Connector;
use crate::store::postgres::error::store_error;
use crate::store::postgres::reader::PostgresReader;
use crate::store::reader::{ReadMode, Reader};

/// How many reads at once may take long, and how long another one waits.
const MAX_LONG_READS: usize = 3;
const MAX_LONG_READ_WAIT: Duration = Duration::from_secs(30);

pub struct ReaderPool {
    connections: Connections,
    tasks: TaskTracker,
    /// Permits of reads that may take long.
    long_reads: Arc<Semaphore>,
}

#[derive(Clone)]
struct Connections {
    pool: Pool,
    /// How long a server that works may take to answer a statement.
    max_answer_time: Option<Duration>,
    /// Notified when the server did not answer the writer in time: it answers no reader either.
    unanswered: Arc<Notify>,
}

impl ReaderPool {
    pub fn new(connector: &Connector) -> Result<Self, StoreError> {
        Ok(Self {
            connections: Connections {
                pool: connector.reader_pool()?,
                max_answer_time: connector.max_answer_time(),
                unanswered: Arc::clone(&connector.unanswered),
            },
            tasks: TaskTracker::new(),
            long_reads: Arc::new(Semaphore::new(MAX_LONG_READS)),
        })
    }

    /// Calls `read`. What may take long waits for one of a few permits, so that others find connections.
    pub async fn read<T: Send + 'static>(
        &self,
        mode: ReadMode,
        read: impl for<'r> FnOnce(&'r Reader) -> BoxFuture<'r, Result<T, StoreError>> + Send + 'static,
    ) -> Result<T, StoreError> {
        let permit = match mode.is_long() {
            true => Some(self.long_read_permit().await?),
            false => None,
        };
        let connections = self.connections.clone();
        let read = async move {
            // Kept until the read has ended, also if the caller gives up: the server goes on.
            let _permit = permit;
            let reader = connections.take().await?;
            match mode {
                ReadMode::Statement | ReadMode::Long => read(&Reader::Postgres(reader)).await,
                ReadMode::Snapshot | ReadMode::LongSnapshot => {
                    reader.begin().await?;
                    let reader = Reader::Postgres(reader);
                    let result = read(&reader).await;
                    if let Reader::Postgres(reader) = &reader {
                        reader.commit().await?;
                    }
                    result
                }
            }
        };
        match self.tasks.spawn(read).await {
            Ok(result) => result,
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            // The runtime ends.
            Err(_) => Err(StoreError::Closed),
        }
    }

    async fn long_read_permit(&self) -> Result<OwnedSemaphorePermit, StoreError> {
        let permit = Arc::clone(&self.long_reads).acquire_owned();
        let permit = tokio::time::timeout(MAX_LONG_READ_WAIT, permit).await;
        permit.ok().and_then(Result::ok).ok_or_else(|| {
            let why = "others read long lists, and did not end in time";
            StoreError::Backend(why.to_owned())
        })
    }

    /// Rejects further reads. Those that have begun go on.
    pub fn close(&self) {
        self.connections.pool.close();
    }
}

impl Connections {
    async fn take(self) -> Result<PostgresReader, StoreError> {
        let client = self.pool.get().await.map_err(pool_error)?;
        Ok(PostgresReader::new(
            client,
            self.max_answer_time,
            self.unanswered,
        ))
    }
}

fn pool_error(error: PoolError) -> StoreError {
    match error {
        PoolError::Backend(error) => store_error(&error),
        PoolError::Closed => StoreError::Closed,
        PoolError::Timeout(TimeoutType::Wait) => {
            StoreError::Backend("no connection to the database became free in time".to_owned())
        }
        PoolError::Timeout(_) => {
            StoreError::Backend("the database did not answer in time".to_owned())
        }
        other => StoreError::Backend(other.to_string()),
    }
}
