//! The connections for reading. Each read is a task of its own: a caller that has begun one and is not polled, such as a stream
//! with several reads, would otherwise keep its connection from all others.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use deadpool_postgres::{Object, Pool, PoolError, TimeoutType};
use futures_util::TryStreamExt;
use futures_util::future::BoxFuture;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio_postgres::Row;
use tokio_util::task::TaskTracker;

use crate::store::StoreError;
use crate::store::postgres::connect::Connector;
use crate::store::postgres::error::store_error;
use crate::store::postgres::sql::{NamedSql, Params};

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

/// A connection on which one caller reads.
pub struct Reader {
    /// `None` once it is taken out of the pool.
    client: Option<Object>,
    /// Whether a transaction has begun and not ended.
    is_in_transaction: bool,
    max_answer_time: Option<Duration>,
    unanswered: Arc<Notify>,
    /// Whether a statement got no answer in time: one may still come.
    is_unanswered: AtomicBool,
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

    /// As [`Self::read`], for what reads more the more a tenant has stored: a few at a time, so that others find connections.
    pub async fn read_long<T: Send + 'static>(
        &self,
        read: impl for<'r> FnOnce(&'r Reader) -> BoxFuture<'r, Result<T, StoreError>> + Send + 'static,
    ) -> Result<T, StoreError> {
        let permit = self.long_read_permit().await?;
        self.read(move |db| with_permit(permit, read(db))).await
    }

    /// As [`Self::read_snapshot`], a few at a time as [`Self::read_long`].
    pub async fn read_long_snapshot<T: Send + 'static>(
        &self,
        read: impl for<'r> FnOnce(&'r Reader) -> BoxFuture<'r, Result<T, StoreError>> + Send + 'static,
    ) -> Result<T, StoreError> {
        let permit = self.long_read_permit().await?;
        self.read_snapshot(move |db| with_permit(permit, read(db)))
            .await
    }

    async fn long_read_permit(&self) -> Result<OwnedSemaphorePermit, StoreError> {
        let permit = Arc::clone(&self.long_reads).acquire_owned();
        let permit = tokio::time::timeout(MAX_LONG_READ_WAIT, permit).await;
        permit.ok().and_then(Result::ok).ok_or_else(|| {
            let why = "others read long lists, and did not end in time";
            StoreError::Backend(why.to_owned())
        })
    }

    /// Calls `read`, which executes one statement.
    pub async fn read<T: Send + 'static>(
        &self,
        read: impl for<'r> FnOnce(&'r Reader) -> BoxFuture<'r, Result<T, StoreError>> + Send + 'static,
    ) -> Result<T, StoreError> {
        let connections = self.connections.clone();
        self.run(async move {
            let reader = Reader::take(connections).await?;
            read(&reader).await
        })
        .await
    }

    /// Calls `read`, all of whose statements see one snapshot of the database.
    pub async fn read_snapshot<T: Send + 'static>(
        &self,
        read: impl for<'r> FnOnce(&'r Reader) -> BoxFuture<'r, Result<T, StoreError>> + Send + 'static,
    ) -> Result<T, StoreError> {
        let connections = self.connections.clone();
        self.run(async move {
            let mut reader = Reader::take(connections).await?;
            reader
                .execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                .await?;
            reader.is_in_transaction = true;
            let result = read(&reader).await;
            if reader.is_unanswered.load(Ordering::Relaxed) {
                return result;
            }
            reader.execute("COMMIT").await?;
            reader.is_in_transaction = false;
            result
        })
        .await
    }

    /// Rejects further reads. Those that have begun go on.
    pub fn close(&self) {
        self.connections.pool.close();
    }

    async fn run<T: Send + 'static>(
        &self,
        read: impl Future<Output = Result<T, StoreError>> + Send + 'static,
    ) -> Result<T, StoreError> {
        match self.tasks.spawn(read).await {
            Ok(result) => result,
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            // The runtime ends.
            Err(_) => Err(StoreError::Closed),
        }
    }
}

/// Keeps the permit until the read has ended, also if the caller gives up: the server goes on.
fn with_permit<'r, T: Send + 'r>(
    permit: OwnedSemaphorePermit,
    read: BoxFuture<'r, T>,
) -> BoxFuture<'r, T> {
    Box::pin(async move {
        let _permit = permit;
        read.await
    })
}

impl Reader {
    async fn take(connections: Connections) -> Result<Self, StoreError> {
        let client = connections.pool.get().await.map_err(pool_error)?;
        Ok(Self {
            client: Some(client),
            is_in_transaction: false,
            max_answer_time: connections.max_answer_time,
            unanswered: connections.unanswered,
            is_unanswered: AtomicBool::new(false),
        })
    }

    pub async fn rows(&self, sql: &str, params: Params<'_, '_>) -> Result<Vec<Row>, StoreError> {
        let client = self.client.as_ref().ok_or(StoreError::Closed)?;
        let sql = NamedSql::parse(sql);
        let positions = sql.positions(params);
        let values: Vec<_> = positions.iter().map(|at| &params[*at].1).collect();
        self.answered(async {
            let statement = client.prepare_cached(&sql.text).await?;
            client
                .query_raw(&statement, values)
                .await?
                .try_collect()
                .await
        })
        .await
    }

    /// The first row; `None` if there is none.
    pub async fn row(&self, sql: &str, params: Params<'_, '_>) -> Result<Option<Row>, StoreError> {
        Ok(self.rows(sql, params).await?.into_iter().next())
    }

    async fn execute(&self, sql: &str) -> Result<(), StoreError> {
        let client = self.client.as_ref().ok_or(StoreError::Closed)?;
        self.answered(client.batch_execute(sql)).await
    }

    /// The answer to a statement. A server that hangs would keep the connection, and its caller, for ever.
    async fn answered<T>(
        &self,
        answer: impl Future<Output = Result<T, tokio_postgres::Error>>,
    ) -> Result<T, StoreError> {
        let answer = async {
            match self.max_answer_time {
                Some(limit) => tokio::time::timeout(limit, answer).await.ok(),
                None => Some(answer.await),
            }
        };
        let answered = tokio::select! {
            answered = answer => answered,
            () = self.unanswered.notified() => None,
        };
        let answered = answered.ok_or_else(|| {
            self.is_unanswered.store(true, Ordering::Relaxed);
            StoreError::Backend("the database did not answer in time".to_owned())
        })?;
        answered.map_err(|error| store_error(&error))
    }
}

impl Drop for Reader {
    /// A caller that gave up within a transaction, or without an answer, leaves a connection that nobody else can use.
    fn drop(&mut self) {
        if (self.is_in_transaction || *self.is_unanswered.get_mut())
            && let Some(client) = self.client.take()
        {
            drop(Object::take(client));
        }
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
