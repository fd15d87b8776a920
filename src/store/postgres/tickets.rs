//! The contract for tickets, by a table with one row.

use std::time::Duration;

use futures_util::future::BoxFuture;
use secrecy::SecretBox;

use crate::store::StoreError;
use crate::store::postgres::sql::{clock, params};
use crate::store::postgres::{PostgresStore, rows};
use crate::store::tickets::{TicketSecret, TicketSecrets};

const SECRET: &str = concat!("SELECT secret, ", clock!(), " AS now FROM ticket_secret");

impl TicketSecrets for PostgresStore {
    fn ticket_secret(&self) -> BoxFuture<'_, Result<TicketSecret, StoreError>> {
        Box::pin(self.readers.read(|db| {
            Box::pin(async move {
                let row = db.row(SECRET, params! {}).await?;
                let row = row.ok_or_else(|| rows::damaged("no secret for tickets"))?;
                let secret: Vec<u8> = rows::get(&row, "secret")?;
                Ok(TicketSecret {
                    secret: SecretBox::from(secret.into_boxed_slice()),
                    now: Duration::from_millis(rows::count(&row, "now")?),
                })
            })
        }))
    }
}
