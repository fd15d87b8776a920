//! Why a turn has no reply. Only data.

use crate::engine::state::budget::BudgetExceeded;
use crate::providers::ProviderError;
use crate::providers::registry::ProviderUnavailable;
use crate::store::StoreError;

#[derive(Debug)]
pub enum TurnError {
    Cancelled,
    DeadlineExceeded,
    Budget(BudgetExceeded),
    /// The provider and every fallback failed.
    Provider(ProviderError),
    /// The batch was not done within a day.
    BatchExpired,
    /// The provider is not configured.
    Unavailable(ProviderUnavailable),
    /// The record could not be written.
    Store(StoreError),
}

impl From<StoreError> for TurnError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}
