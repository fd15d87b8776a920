//! Why a turn has no reply. Only data.

use crate::engine::budget::Exceeded;
use crate::providers::ProviderError;
use crate::providers::registry::Unavailable;
use crate::store::StoreError;

/// Why there is no reply.
#[derive(Debug)]
pub enum TurnError {
    /// Somebody cancelled.
    Stopped,
    /// The run's deadline passed.
    Overdue,
    /// A budget is spent.
    Budget(Exceeded),
    /// The provider (and every fallback) failed.
    Provider(ProviderError),
    /// Its batch was not done within a day.
    BatchExpired,
    /// The provider is not there.
    Unavailable(Unavailable),
    /// The record could not be written.
    Store(StoreError),
}

impl From<StoreError> for TurnError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}
