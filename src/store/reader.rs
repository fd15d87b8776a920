//! A connection of either engine for reading. A query is written once for both: see [`crate::store::sql`].

use std::ops::ControlFlow;

use crate::store::StoreError;
use crate::store::postgres::reader::PostgresReader;
use crate::store::sql::dialect::Dialect;
use crate::store::sql::row::{Row, StoreResult};
use crate::store::sql::value::Params;
use crate::store::sqlite::reader::SqliteReader;

pub enum Reader {
    /// Its statements see one snapshot of the database, and none of them waits.
    Sqlite(SqliteReader),
    Postgres(PostgresReader),
}

/// What a read needs. With SQLite every one sees one snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadMode {
    /// It executes one statement.
    Statement,
    /// All its statements see one snapshot.
    Snapshot,
    /// As `Statement`, for what reads more the more a tenant has stored: only a few of them at a time.
    Long,
    LongSnapshot,
}

impl ReadMode {
    pub fn is_long(self) -> bool {
        matches!(self, Self::Long | Self::LongSnapshot)
    }
}

impl Reader {
    pub fn dialect(&self) -> Dialect {
        match self {
            Self::Sqlite(_) => Dialect::Sqlite,
            Self::Postgres(_) => Dialect::Postgres,
        }
    }

    /// Whether a run that is read with this error is left out of a list. One that SQLite cannot read may only have met a disk that
    /// fails a read, until it is read again.
    pub fn leaves_out(&self, error: &StoreError) -> bool {
        match (self, error) {
            (Self::Sqlite(reader), StoreError::Malformed(_)) => reader.leaves_out_malformed(),
            _ => error.is_damage(),
        }
    }

    /// The rows of a query.
    pub async fn query<T: Send>(
        &self,
        sql: &str,
        params: Params<'_, '_>,
        mut read: impl FnMut(&Row<'_>) -> StoreResult<T> + Send,
    ) -> StoreResult<Vec<T>> {
        let mut found = Vec::new();
        let push = |row: &Row<'_>| {
            found.push(read(row)?);
            Ok(ControlFlow::Continue(()))
        };
        self.for_each(sql, params, push).await?;
        Ok(found)
    }

    /// The first row of a query; `None` if there is none.
    pub async fn first<T: Send>(
        &self,
        sql: &str,
        params: Params<'_, '_>,
        mut read: impl FnMut(&Row<'_>) -> StoreResult<T> + Send,
    ) -> StoreResult<Option<T>> {
        let mut found = None;
        let set = |row: &Row<'_>| {
            found = Some(read(row)?);
            Ok(ControlFlow::Break(()))
        };
        self.for_each(sql, params, set).await?;
        Ok(found)
    }

    pub async fn exists(&self, sql: &str, params: Params<'_, '_>) -> StoreResult<bool> {
        Ok(self.first(sql, params, |_| Ok(())).await?.is_some())
    }

    /// Calls `on_row` with the rows of a query until it breaks. SQLite reads no more rows then.
    pub async fn for_each(
        &self,
        sql: &str,
        params: Params<'_, '_>,
        mut on_row: impl FnMut(&Row<'_>) -> StoreResult<ControlFlow<()>> + Send,
    ) -> StoreResult<()> {
        match self {
            Self::Sqlite(reader) => reader.for_each(sql, params, on_row),
            Self::Postgres(reader) => {
                for row in &reader.rows(sql, params).await? {
                    if on_row(&Row::Postgres(row))?.is_break() {
                        break;
                    }
                }
                Ok(())
            }
        }
    }
}
