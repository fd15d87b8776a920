//! The time by the clock of the server.

use std::time::Duration;

use futures_util::future::BoxFuture;

use crate::store::StoreError;
use crate::store::cluster::DatabaseTime;
use crate::store::engine::Engine;
use crate::store::postgres::PostgresStore;
use crate::store::reader::ReadMode;
use crate::store::sql::clock::clock;
use crate::store::sql::row::damaged;

const TIME: &str = concat!("SELECT ", clock!(), " AS now");

impl DatabaseTime for PostgresStore {
    fn database_time(&self) -> BoxFuture<'_, Result<Duration, StoreError>> {
        Box::pin(async {
            let read = self.read(ReadMode::Statement, |db| {
                Box::pin(db.first(TIME, &[], |row| row.get("now")))
            });
            let now = read.await?.ok_or_else(|| damaged("no time"))?;
            Ok(Duration::from_millis(now))
        })
    }
}
