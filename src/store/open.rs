//! Picks the storage engine that the configuration names.

use std::path::Path;
use std::sync::Arc;

use crate::config::Data;
use crate::store::sqlite::{SqliteStore, maintenance};
use crate::store::{HasSubscribersFn, PublishFn, RunStore, StoreError};

/// Opens the store in the data directory, made where it is missing, and locks it against other processes.
pub fn open(
    data: &Data,
    publish: PublishFn,
    has_subscribers: HasSubscribersFn,
) -> Result<Arc<dyn RunStore>, StoreError> {
    let store = SqliteStore::open(&data.dir, data.durability, publish, has_subscribers)?;
    Ok(Arc::new(store))
}

/// Looks for damage in the store of a data directory, beside a daemon or without one; what is wrong, a sentence each.
pub fn check(dir: &Path) -> Result<Vec<String>, StoreError> {
    maintenance::check(dir)
}

/// Copies the store of a data directory to a file, beside a daemon or without one; returns how many bytes that are.
pub fn backup(dir: &Path, target: &Path, overwrite: bool) -> Result<u64, StoreError> {
    maintenance::backup(dir, target, overwrite)
}
