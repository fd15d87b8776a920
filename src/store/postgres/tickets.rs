//! The contract for tickets, by a table with one row.

use std::time::Duration;

use futures_util::future::BoxFuture;
use secrecy::SecretBox;

use crate::store::StoreError;
use crate::store::engine::Engine;
use crate::store::postgres::PostgresStore;
use crate::store::reader::ReadMode;
use crate::store::sql::clock::clock;
use crate::store::sql::row::damaged;
use crate::store::tickets::{TicketSecret, TicketSecrets};

const SECRET: &str = "SELECT secret FROM ticket_secret";
const TIME: &str = concat!("SELECT ", clock!(), " AS now");

impl TicketSecrets for PostgresStore {
    fn ticket_secret(&self) -> BoxFuture<'_, Result<TicketSecret, StoreError>> {
        Box::pin(async {
            let read = self.read(ReadMode::Statement, |db| {
                Box::pin(db.first(SECRET, &[], |row| row.get::<[u8; 32]>("secret")))
            });
            let secret = read
                .await?
                .ok_or_else(|| damaged("no secret for tickets"))?;
            Ok(SecretBox::new(Box::new(secret)))
        })
    }

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
