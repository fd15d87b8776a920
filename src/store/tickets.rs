//! The contract for tickets that every node accepts. They are signed, so that nothing is stored of a single one.

use std::time::Duration;

use futures_util::future::BoxFuture;
use secrecy::SecretBox;

use crate::store::StoreError;

/// What tickets are signed with.
pub type TicketSecret = SecretBox<[u8; 32]>;

pub trait TicketSecrets: Send + Sync + 'static {
    /// The secret of all nodes. It never changes.
    fn ticket_secret(&self) -> BoxFuture<'_, Result<TicketSecret, StoreError>>;

    /// The time by the database's clock, since any fixed moment.
    fn database_time(&self) -> BoxFuture<'_, Result<Duration, StoreError>>;
}
