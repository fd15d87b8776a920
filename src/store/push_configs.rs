//! The contract for push notifications of A2A: who is notified of a task's states. The notifications are deliveries of the
//! outbox, committed with the write that they report.

use std::fmt;

use futures_util::future::BoxFuture;

use crate::domain::run::RunId;
use crate::store::StoreError;

/// Largest number of configurations of one run.
pub const MAX_PUSH_CONFIGS: usize = 16;

pub trait PushConfigs: Send + Sync + 'static {
    /// The configurations of a root run, by id.
    fn push_configs(&self, run: RunId) -> BoxFuture<'_, Result<Vec<PushConfig>, StoreError>>;

    /// Adds a configuration, or replaces the one with its id. A run that has ended is reported at once. Returns false if the
    /// run has [`MAX_PUSH_CONFIGS`] others.
    fn add_push_config(
        &self,
        run: RunId,
        config: PushConfig,
    ) -> BoxFuture<'_, Result<bool, StoreError>>;

    /// Removes a configuration with what is not delivered yet.
    fn delete_push_config(&self, run: RunId, id: String) -> BoxFuture<'_, Result<(), StoreError>>;
}

/// A receiver of notifications.
#[derive(Clone)]
pub struct PushConfig {
    pub id: String,
    pub url: String,
    pub target: PushTarget,
}

/// What a notification has beside its state.
#[derive(Clone, Default)]
pub struct PushTarget {
    /// The id of the task's context.
    pub context: String,
    /// Sent in a header of its own.
    pub token: Option<String>,
    /// A scheme of HTTP authentication, such as `Bearer`.
    pub scheme: Option<String>,
    pub credentials: Option<String>,
}

impl fmt::Debug for PushConfig {
    /// Without the URL and the rest, which may be secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PushConfig")
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}
