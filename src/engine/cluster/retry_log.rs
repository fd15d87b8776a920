//! The log of what is tried again and again, once a second for as long as the database is away.

use crate::store::StoreError;

/// Logs the first failure, and the first success after it.
pub struct RetryLog {
    work: &'static str,
    is_failing: bool,
}

impl RetryLog {
    /// `work` begins the line.
    pub fn new(work: &'static str) -> Self {
        Self {
            work,
            is_failing: false,
        }
    }

    pub fn add<T>(&mut self, outcome: &Result<T, StoreError>) {
        let was_failing = std::mem::replace(&mut self.is_failing, outcome.is_err());
        let work = self.work;
        match outcome {
            Err(error) if !was_failing => {
                tracing::warn!(error = %error, "{work} fails and is tried again: {error}");
            }
            Err(error) => tracing::debug!(error = %error, "{work} fails still: {error}"),
            Ok(_) if was_failing => tracing::info!("{work} works again"),
            Ok(_) => {}
        }
    }
}
