//! The connections for reading. Each read is a task of its own: a caller that has begun one and is not polled, such as a stream
//! with several reads, would otherwise keep its connection from all others.

use deadpool_postgres::{Object, Pool};
use futures_util::TryStreamExt;
use futures_util::future::BoxFuture;
use tokio_postgres::Row;
use tokio_util::task::TaskTracker;

use crate::store::StoreError;
use crate::store::postgres::error::store_error;
use crate::store::postgres::sql::{NamedSql, Params};

pub struct ReaderPool {
    pool: Pool,
    tasks: TaskTracker,
}

/// A connection on which one caller reads.
pub struct Reader {
    /// `None` once it is taken out of the pool.
    client: Option<Object>,
    /// Whether a transaction has begun and not ended.
    is_in_transaction: bool,
}

impl ReaderPool {
    pub fn new(pool: Pool) -> Self {
        Self {
            pool,
            tasks: TaskTracker::new(),
        }
    }

    /// Calls `read`, which executes one statement.
    pub async fn read<T: Send + 'static>(
        &self,
        read: impl for<'r> FnOnce(&'r Reader) -> BoxFuture<'r, Result<T, StoreError>> + Send + 'static,
    ) -> Result<T, StoreError> {
        let pool = self.pool.clone();
        self.run(async move {
            let reader = Reader::take(&pool).await?;
            read(&reader).await
        })
        .await
    }

    /// Calls `read`, all of whose statements see one snapshot of the database.
    pub async fn read_snapshot<T: Send + 'static>(
        &self,
        read: impl for<'r> FnOnce(&'r Reader) -> BoxFuture<'r, Result<T, StoreError>> + Send + 'static,
    ) -> Result<T, StoreError> {
        let pool = self.pool.clone();
        self.run(async move {
            let mut reader = Reader::take(&pool).await?;
            reader
                .execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                .await?;
            reader.is_in_transaction = true;
            let result = read(&reader).await;
            reader.execute("COMMIT").await?;
            reader.is_in_transaction = false;
            result
        })
        .await
    }

    /// Rejects further reads. Those that have begun go on.
    pub fn close(&self) {
        self.pool.close();
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

impl Reader {
    async fn take(pool: &Pool) -> Result<Self, StoreError> {
        let client = pool.get().await.map_err(pool_error)?;
        Ok(Self {
            client: Some(client),
            is_in_transaction: false,
        })
    }

    pub async fn rows(&self, sql: &str, params: Params<'_, '_>) -> Result<Vec<Row>, StoreError> {
        let client = self.client.as_ref().ok_or(StoreError::Closed)?;
        let sql = NamedSql::parse(sql);
        let positions = sql.positions(params);
        let values: Vec<_> = positions.iter().map(|at| &params[*at].1).collect();
        let statement = client.prepare_cached(&sql.text).await;
        let statement = statement.map_err(|error| store_error(&error))?;
        let rows = client.query_raw(&statement, values).await;
        let rows = rows.map_err(|error| store_error(&error))?;
        rows.try_collect()
            .await
            .map_err(|error| store_error(&error))
    }

    /// The first row; `None` if there is none.
    pub async fn row(&self, sql: &str, params: Params<'_, '_>) -> Result<Option<Row>, StoreError> {
        Ok(self.rows(sql, params).await?.into_iter().next())
    }

    async fn execute(&self, sql: &str) -> Result<(), StoreError> {
        let client = self.client.as_ref().ok_or(StoreError::Closed)?;
        let done = client.batch_execute(sql).await;
        done.map_err(|error| store_error(&error))
    }
}

impl Drop for Reader {
    /// A caller that gave up within a transaction leaves a connection that nobody else can use.
    fn drop(&mut self) {
        if self.is_in_transaction
            && let Some(client) = self.client.take()
        {
            drop(Object::take(client));
        }
    }
}

fn pool_error(error: deadpool_postgres::PoolError) -> StoreError {
    match error {
        deadpool_postgres::PoolError::Backend(error) => store_error(&error),
        deadpool_postgres::PoolError::Closed => StoreError::Closed,
        other => StoreError::Backend(other.to_string()),
    }
}
