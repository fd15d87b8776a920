//! The contract for tickets that every node accepts. They are signed, so that nothing is stored of a single one.

use std::time::Duration;

use futures_util::future::BoxFuture;
use secrecy::SecretBox;

use crate::store::StoreError;

/// What tickets are signed with, and the time at which this was read.
pub struct TicketSecret {
    pub secret: SecretBox<[u8]>,
    /// Since any fixed moment, by one clock for all tickets of this secret.
    pub now: Duration,
}

pub trait TicketSecrets: Send + Sync + 'static {
    /// The secret of all nodes, and the database's time.
    fn ticket_secret(&self) -> BoxFuture<'_, Result<TicketSecret, StoreError>>;
}
