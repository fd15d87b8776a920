//! Why a turn has no reply. Only data.

use crate::engine::state::budget::BudgetExceeded;
use crate::providers::ProviderError;
use crate::providers::registry::ProviderUnavailable;
use crate::store::StoreError;

/// Why there is no reply.
#[derive(Debug)]
pub enum TurnError {
    /// Somebody cancelled.
    Cancelled,
    /// The run's deadline passed.
    DeadlineExceeded,
    /// A budget is spent.
    Budget(BudgetExceeded),
    /// The provider (and every fallback) failed.
    Provider(ProviderError),
    /// Its batch was not done within a day.
    BatchExpired,
    /// The provider is not there.
    Unavailable(ProviderUnavailable),
    /// The record could not be written.
    Store(StoreError),
}

impl From<StoreError> for TurnError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}
