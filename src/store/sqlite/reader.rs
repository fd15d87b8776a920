//! A connection for reading.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rusqlite::{Connection, Statement};

use crate::store::StoreError;
use crate::store::sql::dialect::Dialect;
use crate::store::sql::row::{Row, StoreResult};
use crate::store::sql::value::Params;
use crate::store::sqlite::error::store_error;

/// The lock is never waited for: one thread reads at a time.
pub struct SqliteReader {
    connection: Mutex<Connection>,
    leaves_out_malformed: AtomicBool,
}

impl SqliteReader {
    pub fn new(connection: Connection) -> Self {
        Self {
            connection: Mutex::new(connection),
            leaves_out_malformed: AtomicBool::new(false),
        }
    }

    pub fn with<T>(&self, read: impl FnOnce(&Connection) -> T) -> T {
        read(&self.connection.lock())
    }

    pub fn leaves_out_malformed(&self) -> bool {
        self.leaves_out_malformed.load(Ordering::Relaxed)
    }

    /// Whether lists are read without the runs that SQLite cannot read.
    pub fn leave_out_malformed(&self, leaves_out: bool) {
        self.leaves_out_malformed
            .store(leaves_out, Ordering::Relaxed);
    }

    pub fn for_each(
        &self,
        sql: &str,
        params: Params<'_, '_>,
        mut on_row: impl FnMut(&Row<'_>) -> StoreResult<ControlFlow<()>>,
    ) -> StoreResult<()> {
        let db = self.connection.lock();
        let mut statement = db
            .prepare_cached(&Dialect::Sqlite.text(sql))
            .map_err(store_error)?;
        bind(&mut statement, params).map_err(store_error)?;
        let mut rows = statement.raw_query();
        while let Some(row) = rows.next().map_err(store_error)? {
            if on_row(&Row::Sqlite(row))?.is_break() {
                break;
            }
        }
        Ok(())
    }

    /// Calls `read` within a transaction.
    pub fn snapshot<T>(
        &self,
        read: impl FnOnce(&Self) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        self.execute("BEGIN")?;
        let result = read(self);
        if self.connection.lock().is_autocommit() {
            // After some errors SQLite has ended the transaction.
            return result;
        }
        let ended = self.execute("COMMIT");
        result.and_then(|value| ended.map(|()| value))
    }

    fn execute(&self, sql: &str) -> StoreResult<()> {
        let db = self.connection.lock();
        let executed = db.prepare_cached(sql).and_then(|mut sql| sql.execute([]));
        executed.map(drop).map_err(store_error)
    }
}

/// Values without a parameter are ignored. A parameter without a value is an error.
pub fn bind(statement: &mut Statement<'_>, params: Params<'_, '_>) -> rusqlite::Result<()> {
    let mut bound = 0;
    for (name, value) in params {
        if let Some(position) = statement.parameter_index(name)? {
            statement.raw_bind_parameter(position, value)?;
            bound += 1;
        }
    }
    let expected = statement.parameter_count();
    match bound == expected {
        true => Ok(()),
        false => Err(rusqlite::Error::InvalidParameterCount(bound, expected)),
    }
}

#[cfg(test)]
mod tests {
    use rusqlite::Connection;

    use super::SqliteReader;
    use crate::store::StoreError;

    #[test]
    fn a_read_keeps_its_error_if_sqlite_has_rolled_back() {
        let db = SqliteReader::new(Connection::open_in_memory().expect("a database"));
        let result = db.snapshot(|db| {
            db.with(|db| db.execute_batch("ROLLBACK").expect("rolled back"));
            Err::<(), _>(StoreError::DiskFull)
        });
        assert!(matches!(result, Err(StoreError::DiskFull)), "{result:?}");
    }
}
