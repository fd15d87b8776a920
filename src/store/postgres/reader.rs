//! A connection for reading.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use deadpool_postgres::Object;
use futures_util::TryStreamExt;
use tokio::sync::Notify;
use tokio_postgres::Row;

use crate::store::StoreError;
use crate::store::postgres::error::store_error;
use crate::store::sql::named::NamedSql;
use crate::store::sql::value::Params;

/// A connection on which one caller reads.
pub struct PostgresReader {
    /// `None` once it is taken out of the pool.
    client: Option<Object>,
    /// Whether a transaction has begun and not ended.
    is_in_transaction: AtomicBool,
    max_answer_time: Option<Duration>,
    unanswered: Arc<Notify>,
    /// Whether a statement got no answer in time: one may still come.
    is_unanswered: AtomicBool,
}

impl PostgresReader {
    pub fn new(client: Object, max_answer_time: Option<Duration>, unanswered: Arc<Notify>) -> Self {
        Self {
            client: Some(client),
            is_in_transaction: AtomicBool::new(false),
            max_answer_time,
            unanswered,
            is_unanswered: AtomicBool::new(false),
        }
    }

    /// Begins a transaction whose statements see one snapshot of the database.
    pub async fn begin(&self) -> Result<(), StoreError> {
        self.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            .await?;
        self.is_in_transaction.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Ends the transaction, unless a statement of it got no answer.
    pub async fn commit(&self) -> Result<(), StoreError> {
        if !self.is_unanswered.load(Ordering::Relaxed) {
            self.execute("COMMIT").await?;
            self.is_in_transaction.store(false, Ordering::Relaxed);
        }
        Ok(())
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

impl Drop for PostgresReader {
    /// A caller that gave up within a transaction, or without an answer, leaves a connection that nobody else can use.
    fn drop(&mut self) {
        if (*self.is_in_transaction.get_mut() || *self.is_unanswered.get_mut())
            && let Some(client) = self.client.take()
        {
            drop(Object::take(client));
        }
    }
}
