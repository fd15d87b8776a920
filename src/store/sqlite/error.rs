//! Errors of the SQLite engine, and what they become for the callers of the store.

use rusqlite::ErrorCode;
use rusqlite::ffi::SQLITE_IOERR_SHMSIZE;

use crate::store::StoreError;

/// Why a task was not done.
pub enum WriteError {
    /// The task itself is wrong. The other tasks of its batch are not affected.
    Rejected(StoreError),
    /// SQLite failed. Nothing of the batch is committed.
    Database(rusqlite::Error),
}

impl From<rusqlite::Error> for WriteError {
    fn from(error: rusqlite::Error) -> Self {
        Self::Database(error)
    }
}

/// Whether SQLite refused one write, so that the other writes of its batch may succeed. Otherwise the database is locked,
/// or the disk is full or fails.
pub fn is_single_write_error(error: &rusqlite::Error) -> bool {
    matches!(
        error.sqlite_error_code(),
        Some(
            ErrorCode::ConstraintViolation
                | ErrorCode::TooBig
                | ErrorCode::TypeMismatch
                | ErrorCode::DatabaseCorrupt
        )
    )
}

/// Whether SQLite found no space, for a write or for the index of the log.
pub fn is_disk_full(error: &rusqlite::Error) -> bool {
    let extended_code = error.sqlite_error().map(|error| error.extended_code);
    extended_code == Some(SQLITE_IOERR_SHMSIZE)
        || error.sqlite_error_code() == Some(ErrorCode::DiskFull)
}

/// Whether SQLite found the file damaged, or a read of it failed with EIO or ENXIO: both have the same code.
pub fn is_damage(error: &rusqlite::Error) -> bool {
    matches!(
        error.sqlite_error_code(),
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase)
    )
}

/// Maps an error of SQLite to the contract's.
pub fn store_error(error: rusqlite::Error) -> StoreError {
    match error.sqlite_error_code() {
        _ if is_disk_full(&error) => StoreError::DiskFull,
        _ if is_damage(&error) => StoreError::Malformed(error.to_string()),
        Some(_) if is_single_write_error(&error) => StoreError::Refused(error.to_string()),
        Some(_) => StoreError::Backend(error.to_string()),
        None => match error {
            // A stored value does not have the type that its column is written with.
            rusqlite::Error::FromSqlConversionFailure(..)
            | rusqlite::Error::InvalidColumnType(..)
            | rusqlite::Error::IntegralValueOutOfRange(..)
            | rusqlite::Error::Utf8Error(..) => StoreError::Corrupt(error.to_string()),
            error => StoreError::Backend(error.to_string()),
        },
    }
}
