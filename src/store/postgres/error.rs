//! Errors of the PostgreSQL engine, and what they become for the callers of the store.

use std::error::Error as _;
use std::fmt;

use tokio::time::error::Elapsed;
use tokio_postgres::Error;
use tokio_postgres::config::{Config, Host};
use tokio_postgres::error::SqlState;

use crate::store::StoreError;

/// Host, port and database, without user and password.
#[derive(Clone, Debug)]
pub struct DatabaseName(String);

impl DatabaseName {
    pub fn new(config: &Config) -> Self {
        let hosts = config.get_hosts().iter().enumerate().map(|(index, host)| {
            let ports = config.get_ports();
            let port = ports.get(index).or(ports.first()).copied().unwrap_or(5432);
            match host {
                Host::Tcp(host) => format!("{host}:{port}"),
                Host::Unix(path) => path.display().to_string(),
            }
        });
        let hosts: Vec<String> = hosts.collect();
        let database = config
            .get_dbname()
            .or(config.get_user())
            .unwrap_or_default();
        Self(format!("the database {database} at {}", hosts.join(", ")))
    }

    /// An error while the database is opened.
    pub fn error(&self, error: &Error) -> StoreError {
        let hint = match error.code() {
            Some(&SqlState::INSUFFICIENT_PRIVILEGE) => {
                "; the user of data.url has to own the database, or may create tables in its schema"
            }
            Some(&SqlState::INVALID_CATALOG_NAME) => "; createdb creates it",
            Some(&SqlState::DUPLICATE_TABLE) => {
                "; the schema has tables of another program: choose an empty database or schema"
            }
            Some(
                &(SqlState::UNDEFINED_TABLE
                | SqlState::UNDEFINED_COLUMN
                | SqlState::UNDEFINED_FUNCTION
                | SqlState::DATATYPE_MISMATCH),
            ) => {
                "; it does not have the tables of this version of axed: restore a backup, or choose another database"
            }
            _ => "",
        };
        match store_error(error) {
            StoreError::Backend(why) => StoreError::Backend(format!("{self}: {why}{hint}")),
            other => other,
        }
    }

    /// The outcome of something that had a time limit.
    pub fn in_time<T>(&self, outcome: Result<Result<T, Error>, Elapsed>) -> Result<T, StoreError> {
        match outcome {
            Ok(outcome) => outcome.map_err(|error| self.error(&error)),
            Err(_) => Err(self.no_answer()),
        }
    }

    pub fn no_answer(&self) -> StoreError {
        StoreError::Backend(format!("{self} did not answer in time"))
    }
}

impl fmt::Display for DatabaseName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Maps an error of the server or of its connection to the contract's.
pub fn store_error(error: &Error) -> StoreError {
    match error.code() {
        _ if is_disk_full(error) => StoreError::DiskFull,
        Some(&(SqlState::DATA_CORRUPTED | SqlState::INDEX_CORRUPTED)) => {
            StoreError::Corrupt(describe(error))
        }
        // A stored value does not have the type that its column is written with.
        None if error
            .source()
            .is_some_and(|it| it.is::<tokio_postgres::types::WasNull>()) =>
        {
            StoreError::Corrupt(describe(error))
        }
        _ => StoreError::Backend(describe(error)),
    }
}

/// Whether the same transaction may succeed when it is repeated: a deadlock, or a conflict with another one.
pub fn is_transient(error: &Error) -> bool {
    matches!(
        error.code(),
        Some(&(SqlState::T_R_DEADLOCK_DETECTED | SqlState::T_R_SERIALIZATION_FAILURE))
    )
}

/// Whether the session cannot write: its server is a standby, or its database or role is set so.
pub fn is_read_only(error: &Error) -> bool {
    error.code() == Some(&SqlState::READ_ONLY_SQL_TRANSACTION)
}

/// Whether the server found no space for what a statement writes.
pub fn is_disk_full(error: &Error) -> bool {
    error.code() == Some(&SqlState::DISK_FULL)
}

/// With the causes: the error itself names only its kind.
pub fn describe(error: &Error) -> String {
    if let Some(server) = error.as_db_error() {
        return format!("{} ({})", server.message(), server.code().code());
    }
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let inner_text = inner.to_string();
        if !text.contains(&inner_text) {
            text = format!("{text}: {inner_text}");
        }
        cause = inner.source();
    }
    text
}
