//! Picks the storage engine that the configuration names.

use std::path::Path;
use std::sync::Arc;

use crate::config::Data;
use crate::store::sqlite::{Sqlite, maintenance};
use crate::store::{Bell, Listening, RunStore, StoreError};

/// Opens the store in the data directory, made where it is missing, and locks it against other processes.
pub fn open(
    data: &Data,
    bell: Bell,
    listening: Listening,
) -> Result<Arc<dyn RunStore>, StoreError> {
    let store = Sqlite::open(&data.dir, data.durability, bell, listening)?;
    Ok(Arc::new(store))
}

/// Looks for damage in the store of a data directory, beside a daemon or without one; what is wrong, a sentence each.
pub fn check(dir: &Path) -> Result<Vec<String>, StoreError> {
    maintenance::check(dir)
}

/// Copies the store of a data directory to a file, beside a daemon or without one; returns how many bytes that are.
pub fn backup(dir: &Path, to: &Path, replaces: bool) -> Result<u64, StoreError> {
    maintenance::backup(dir, to, replaces)
}
