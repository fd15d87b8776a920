//! Chooses the storage engine.

use std::path::Path;
use std::sync::Arc;

use secrecy::ExposeSecret;

use crate::config::Data;
use crate::store::StoreError;
use crate::store::events::{HasSubscribersFn, PublishFn};
use crate::store::postgres::PostgresStore;
use crate::store::run_store::RunStore;
use crate::store::sqlite::{SqliteStore, maintenance};

/// Opens the PostgreSQL database, if there is one, else the store of the data directory, created if it is missing. No other
/// process can open it.
pub fn open(
    data: &Data,
    publish: PublishFn,
    has_subscribers: HasSubscribersFn,
) -> Result<Arc<dyn RunStore>, StoreError> {
    if let Some(url) = &data.url {
        let listen_url = data.listen_url.as_ref().unwrap_or(url);
        let urls = (url.expose_secret(), listen_url.expose_secret());
        let store = PostgresStore::open(urls, &data.cluster, publish, has_subscribers)?;
        return Ok(Arc::new(store));
    }
    let store = SqliteStore::open(&data.dir, data.durability, publish, has_subscribers)?;
    Ok(Arc::new(store))
}

/// Checks the URLs of the database without a connection. Returns the key of one that is wrong, and why, as the rest of a
/// sentence about it.
pub fn check_urls(data: &Data) -> Result<(), (&'static str, String)> {
    for (key, url) in [
        ("data.url", &data.url),
        ("data.listen_url", &data.listen_url),
    ] {
        if let Some(url) = url {
            let checked = PostgresStore::check_url(url.expose_secret());
            checked.map_err(|error| match error {
                StoreError::Backend(why) => (key, why),
                other => (key, other.to_string()),
            })?;
        }
    }
    Ok(())
}

/// Checks the store of a data directory, while a daemon uses it or not; returns one sentence for each problem.
pub fn check(dir: &Path) -> Result<Vec<String>, StoreError> {
    maintenance::check(dir)
}

/// Copies the store of a data directory to a file, while a daemon uses it or not; returns the number of bytes.
pub fn backup(dir: &Path, target: &Path, overwrite: bool) -> Result<u64, StoreError> {
    maintenance::backup(dir, target, overwrite)
}
