//! Picks the storage engine that the configuration names.

use std::sync::Arc;

use crate::config::Data;
use crate::store::sqlite::Sqlite;
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
