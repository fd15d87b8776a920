//! Chooses the storage engine.

use std::path::Path;
use std::sync::Arc;

use secrecy::{ExposeSecret, SecretString};
use tracing::warn;

use crate::config::{Data, Durability};
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
    if data.listen_url.is_some() {
        let dir = data.dir.display();
        warn!("data.listen_url has no effect without data.url: runs are recorded in {dir}");
    }
    let store = SqliteStore::open(&data.dir, data.durability, publish, has_subscribers)?;
    Ok(Arc::new(store))
}

/// Opens the store of a data directory that exists, for a command without a daemon. No other process can open it meanwhile.
pub fn open_existing(dir: &Path, durability: Durability) -> Result<Arc<dyn RunStore>, StoreError> {
    Ok(Arc::new(SqliteStore::open_existing(dir, durability)?))
}

/// Checks the URLs of the database without a connection. Returns the keys of those that are wrong, each with the reason as the rest
/// of a sentence about it.
pub fn check_urls(data: &Data) -> Vec<(&'static str, String)> {
    let urls = [
        ("data.url", &data.url),
        ("data.listen_url", &data.listen_url),
    ];
    let check = |(key, url): (&'static str, &Option<SecretString>)| {
        let error = PostgresStore::check_url(url.as_ref()?.expose_secret()).err()?;
        Some(match error {
            StoreError::Backend(why) => (key, why),
            other => (key, other.to_string()),
        })
    };
    urls.into_iter().filter_map(check).collect()
}

/// Checks the store of a data directory, while a daemon uses it or not; returns one sentence for each problem.
pub fn check(dir: &Path) -> Result<Vec<String>, StoreError> {
    maintenance::check(dir)
}

/// Copies the store of a data directory to a file, while a daemon uses it or not; returns the number of bytes.
pub fn backup(dir: &Path, target: &Path, overwrite: bool) -> Result<u64, StoreError> {
    maintenance::backup(dir, target, overwrite)
}
