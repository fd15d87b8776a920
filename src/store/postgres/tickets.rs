//! The contract for tickets, by a table with one row.

use std::time::Duration;

use futures_util::future::BoxFuture;
use secrecy::SecretBox;

use crate::store::StoreError;
use crate::store::postgres::{PostgresStore, rows};
use crate::store::sql::clock::clock;
use crate::store::sql::value::params;
use crate::store::tickets::{TicketSecret, TicketSecrets};

const SECRET: &str = "SELECT secret FROM ticket_secret";
const TIME: &str = concat!("SELECT ", clock!(), " AS now");

impl TicketSecrets for PostgresStore {
    fn ticket_secret(&self) -> BoxFuture<'_, Result<TicketSecret, StoreError>> {
        Box::pin(self.readers.read(|db| {
            Box::pin(async move {
                let row = db.row(SECRET, params! {}).await?;
                let row = row.ok_or_else(|| rows::damaged("no secret for tickets"))?;
                let secret: Vec<u8> = rows::get(&row, "secret")?;
                let secret = <[u8; 32]>::try_from(secret);
                let secret = secret.map_err(|_| rows::damaged("a secret for tickets"))?;
                Ok(SecretBox::new(Box::new(secret)))
            })
        }))
    }

    fn database_time(&self) -> BoxFuture<'_, Result<Duration, StoreError>> {
        Box::pin(self.readers.read(|db| {
            Box::pin(async move {
                let row = db.row(TIME, params! {}).await?;
                let row = row.ok_or_else(|| rows::damaged("no time"))?;
                Ok(Duration::from_millis(rows::count(&row, "now")?))
            })
        }))
    }
}
