//! The writer's connection: its prepared statements, and how many of them are sent at once.

use std::cell::RefCell;
use std::collections::HashMap;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures_util::TryStreamExt;
use futures_util::future::{MaybeDone, maybe_done, try_join_all};
use tokio::sync::Notify;
use tokio_postgres::{Client, Error, Row, RowStream};
use tokio_util::task::AbortOnDropHandle;
use tracing::warn;

use crate::store::changes::Statement;
use crate::store::postgres::connect::Connector;
use crate::store::postgres::statements::{STATEMENTS, Sql};
use crate::store::sql::named::NamedSql;
use crate::store::sql::value::{NamedValue, Params, Value};

/// How long the answer to one statement may take; more than the server waits for a lock.
const MAX_ANSWER_TIME: Duration = Duration::from_secs(20);

/// A statement with its parameters, to be sent.
#[derive(Debug)]
pub struct Query<'a> {
    sql: Source,
    params: QueryParams<'a>,
    /// Whether the transaction must not be committed if this affects no row.
    pub must_affect: bool,
}

impl<'a> Query<'a> {
    pub fn new(sql: Sql, params: Vec<NamedValue<'a>>) -> Self {
        Self {
            sql: Source::Known(sql),
            params: QueryParams::Owned(params),
            must_affect: false,
        }
    }

    /// One of [`Changes`].
    ///
    /// [`Changes`]: crate::store::changes::Changes
    pub fn of(statement: &'a Statement) -> Self {
        Self {
            sql: Source::Text(statement.sql),
            params: QueryParams::Borrowed(&statement.params),
            must_affect: false,
        }
    }

    /// The statement of a write, without which nothing is committed.
    pub fn required_text(sql: &'static str, params: Vec<NamedValue<'a>>) -> Self {
        Self {
            sql: Source::Text(sql),
            params: QueryParams::Owned(params),
            must_affect: true,
        }
    }

    /// One without which nothing is committed.
    pub fn required(sql: Sql, params: Vec<NamedValue<'a>>) -> Self {
        Self {
            must_affect: true,
            ..Self::new(sql, params)
        }
    }
}

#[derive(Debug)]
enum QueryParams<'a> {
    Owned(Vec<NamedValue<'a>>),
    Borrowed(&'a [NamedValue<'a>]),
}

impl<'a> QueryParams<'a> {
    fn values(&self) -> Params<'_, 'a> {
        match self {
            Self::Owned(values) => values,
            Self::Borrowed(values) => values,
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Source {
    Known(Sql),
    Text(&'static str),
}

/// What a statement has done.
#[derive(Debug)]
pub struct Outcome {
    pub rows: Vec<Row>,
    /// The number of rows returned, or else changed.
    pub affected: u64,
}

pub struct Connection {
    client: Client,
    /// Drives the connection. Aborting it closes the connection, also if an answer is outstanding.
    driver: AbortOnDropHandle<()>,
    statements: Vec<Rc<PreparedStatement>>,
    /// Those that are prepared when they are executed first.
    by_text: RefCell<HashMap<&'static str, Rc<PreparedStatement>>>,
    /// Notified when an answer does not come in time.
    unanswered: Arc<Notify>,
}

struct PreparedStatement {
    statement: tokio_postgres::Statement,
    sql: NamedSql,
    /// Where the values of the last execution were, by the number of their parameter.
    positions: RefCell<Vec<usize>>,
}

impl Connection {
    pub async fn open(connector: &Connector) -> Result<Self, Error> {
        let (client, driver) = connector.connect_driven().await?;
        let driver = AbortOnDropHandle::new(driver);
        let prepare = STATEMENTS.iter().map(|sql| prepare(&client, sql));
        let statements = try_join_all(prepare).await?;
        Ok(Self {
            client,
            driver,
            statements,
            by_text: RefCell::default(),
            unanswered: Arc::clone(&connector.unanswered),
        })
    }

    pub fn is_closed(&self) -> bool {
        self.client.is_closed()
    }

    pub async fn execute(&self, query: &Query<'_>) -> Result<Outcome, Error> {
        self.prepare_texts(std::slice::from_ref(query)).await?;
        self.answered(self.send(query)).await
    }

    /// Prepares what was not executed yet, so that all statements can be sent at once.
    async fn prepare_texts(&self, queries: &[Query<'_>]) -> Result<(), Error> {
        for query in queries {
            if let Source::Text(sql) = query.sql
                && !self.by_text.borrow().contains_key(sql)
            {
                let prepared = self.answered(prepare(&self.client, sql)).await?;
                self.by_text.borrow_mut().insert(sql, prepared);
            }
        }
        Ok(())
    }

    /// Waits for the answer to one statement. If there is none in time, the connection is closed, so that the answer is an error.
    async fn answered<T>(&self, answer: impl Future<Output = T>) -> T {
        let mut answer = pin!(answer);
        match tokio::time::timeout(MAX_ANSWER_TIME, answer.as_mut()).await {
            Ok(answered) => answered,
            Err(_) => {
                warn!(
                    "The database did not answer the writer within {MAX_ANSWER_TIME:?}: closing the connection"
                );
                self.driver.abort();
                self.unanswered.notify_waiters();
                answer.await
            }
        }
    }

    async fn send(&self, query: &Query<'_>) -> Result<Outcome, Error> {
        let prepared = match query.sql {
            Source::Known(sql) => Rc::clone(&self.statements[sql as usize]),
            Source::Text(sql) => {
                let known = self.by_text.borrow().get(sql).cloned();
                match known {
                    Some(known) => known,
                    None => prepare(&self.client, sql).await?,
                }
            }
        };
        let values = prepared.bind(query.params.values());
        let rows = self.client.query_raw(&prepared.statement, values).await?;
        collect(rows).await
    }

    /// Sends all statements before it waits for the first: one round trip. The first error is returned; the statements
    /// after it had none or the transaction's.
    pub async fn execute_all(&self, queries: &[Query<'_>]) -> Result<Vec<Outcome>, Error> {
        self.prepare_texts(queries).await?;
        let mut pending = Vec::with_capacity(queries.len());
        for query in queries {
            let mut execution = Box::pin(maybe_done(self.send(query)));
            // The first poll sends it.
            let _ = futures_util::poll!(execution.as_mut());
            pending.push(execution);
        }
        let mut outcomes = Vec::with_capacity(queries.len());
        for mut execution in pending {
            if matches!(*execution, MaybeDone::Future(_)) {
                self.answered(execution.as_mut()).await;
            }
            if let Some(outcome) = execution.as_mut().take_output() {
                outcomes.push(outcome?);
            }
        }
        Ok(outcomes)
    }
}

async fn prepare(client: &Client, sql: &str) -> Result<Rc<PreparedStatement>, Error> {
    let sql = NamedSql::parse(sql);
    Ok(Rc::new(PreparedStatement {
        statement: client.prepare(&sql.text).await?,
        sql,
        positions: RefCell::default(),
    }))
}

async fn collect(rows: RowStream) -> Result<Outcome, Error> {
    let mut rows = std::pin::pin!(rows);
    let mut found = Vec::new();
    while let Some(row) = rows.try_next().await? {
        found.push(row);
    }
    Ok(Outcome {
        affected: rows.rows_affected().unwrap_or(found.len() as u64),
        rows: found,
    })
}

impl PreparedStatement {
    /// The values in the order of the parameters.
    fn bind<'p, 'a>(&self, params: Params<'p, 'a>) -> Vec<&'p Value<'a>> {
        let mut positions = self.positions.borrow_mut();
        if !self.sql.are_positions(params, &positions) {
            *positions = self.sql.positions(params);
        }
        positions.iter().map(|at| &params[*at].1).collect()
    }
}
