//! Opens the database of a data directory for a copy of all of it, while no daemon uses it.

use std::path::Path;

use rusqlite::Connection;

use crate::config::Durability;
use crate::store::StoreError;
use crate::store::sqlite::files::{self, DATABASE_FILE};
use crate::store::sqlite::lock::{self, Lock};
use crate::store::sqlite::schema;

/// The database with its tables of this version. Nobody else can open it for writing meanwhile.
pub struct Offline {
    pub connection: Connection,
    _lock: Lock,
}

/// Opens the database that a daemon has left.
pub fn open(dir: &Path) -> Result<Offline, StoreError> {
    let file = dir.join(DATABASE_FILE);
    if files::file_size(&file).is_none() {
        return Err(StoreError::NoDatabase(file.display().to_string()));
    }
    create(dir)
}

/// Opens the database, created if it is missing.
pub fn create(dir: &Path) -> Result<Offline, StoreError> {
    let lock = lock::acquire(dir)?;
    let file = dir.join(DATABASE_FILE);
    files::check_wal_has_database(&file)?;
    lock::create_private_file(&file)?;
    Ok(Offline {
        connection: schema::open_writer(&file, Durability::Power)?,
        _lock: lock,
    })
}
