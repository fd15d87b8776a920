//! The contract for webhook deliveries. They are committed with the write that they report, are due until they succeed or are
//! given up, and are deleted with their run. Retry policy is up to the caller.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use jiff::Timestamp;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use crate::domain::run::RunId;
use crate::domain::timestamp_text;
use crate::domain::webhook::DeliveryId;
use crate::store::StoreError;
use crate::store::push_configs::PushTarget;

/// Largest number of deliveries that [`Outbox::deliveries`] returns.
pub const MAX_LISTED_DELIVERIES: usize = 1000;
/// Attempts that are kept of a delivery: the last ones.
pub const MAX_STORED_ATTEMPTS: usize = 50;

pub trait Outbox: Send + Sync + 'static {
    /// Webhook deliveries that are due, longest due first, and when the next one will be. One whose time is further ahead than any
    /// wait is due, too: the clock was set back.
    fn due_deliveries(&self, query: DueQuery) -> BoxFuture<'_, Result<DueDeliveries, StoreError>>;

    /// Records an attempt. Ignored if it is recorded already, or if the delivery was deleted with its run.
    fn record_attempt(&self, record: AttemptRecord) -> BoxFuture<'_, Result<(), StoreError>>;

    /// The newest deliveries of a run, oldest of them first, at most [`MAX_LISTED_DELIVERIES`].
    fn deliveries(&self, run: RunId) -> BoxFuture<'_, Result<Vec<Delivery>, StoreError>>;

    /// Makes a delivery due now, whatever its status, and restarts its retries. Returns false if the run has no such delivery.
    fn resend(&self, run: RunId, id: DeliveryId) -> BoxFuture<'_, Result<bool, StoreError>>;

    /// The number of deliveries that are due now or later, counted up to `max`.
    fn count_pending(&self, max: usize) -> BoxFuture<'_, Result<u64, StoreError>>;

    /// Notified after every commit that made deliveries due. For one listener: a notification is kept while it does not
    /// listen, and several may become one.
    fn delivery_notify(&self) -> Arc<Notify>;
}

/// Selects due deliveries.
#[derive(Clone, Debug, Default)]
pub struct DueQuery {
    pub due_by: Timestamp,
    /// These are left out.
    pub in_flight: Vec<DeliveryId>,
    /// Owners and hosts that are left out, as [`crate::ssrf::normalize_host`] writes them.
    pub excluded_hosts: Vec<(String, String)>,
    /// Largest number of deliveries of each owner.
    pub limit: usize,
    /// The wait after the first failed attempt, which doubles with each: deliveries whose time is further ahead than their own wait are
    /// due too. `None` to look only for those that are further ahead than any wait, which takes less.
    pub first_retry: Option<Duration>,
}

#[derive(Clone, Debug, Default)]
pub struct DueDeliveries {
    /// Longest due first.
    pub deliveries: Vec<DueDelivery>,
    /// When the first of the others will be due.
    pub next_due_at: Option<Timestamp>,
}

/// A delivery to be attempted.
#[derive(Clone)]
pub struct DueDelivery {
    pub id: DeliveryId,
    /// The root run whose event it reports.
    pub run: RunId,
    pub agent: String,
    /// The API key that has accepted the run; empty without keys.
    pub owner: String,
    pub url: String,
    /// The URL's host, as [`crate::ssrf::normalize_host`] writes it.
    pub host: String,
    /// The environment variable with the signing secret; `None` for the server's.
    pub secret_env: Option<String>,
    /// Empty for a push notification, which is made of the other fields.
    pub body: String,
    /// The name of the event, and when it happened.
    pub event: String,
    pub created_at: Timestamp,
    /// `None` if it is not a push notification.
    pub push: Option<PushTarget>,
    /// When it was first due, or was resent.
    pub since: Timestamp,
    /// Attempts since then.
    pub attempt_count: u32,
}

impl fmt::Debug for DueDelivery {
    /// Without the URL, which may contain a secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DueDelivery")
            .field("id", &self.id)
            .field("host", &self.host)
            .field("tries", &self.attempt_count)
            .finish_non_exhaustive()
    }
}

/// An attempt with its outcome.
#[derive(Clone, Debug)]
pub struct AttemptRecord {
    pub id: DeliveryId,
    /// Its [`DueDelivery::since`]: if the delivery was resent since, the outcome does not change it. Nor does it if another
    /// process has delivered it meanwhile.
    pub since: Timestamp,
    pub attempt: DeliveryAttempt,
    pub outcome: AttemptOutcome,
}

/// What happens to a delivery after an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttemptOutcome {
    Delivered,
    /// After this time by the store's clock: that of this node may change meanwhile.
    RetryIn(Duration),
    GivenUp,
}

/// One attempt to deliver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "DeliveryAttempt")]
pub struct DeliveryAttempt {
    /// When the attempt began.
    #[serde(serialize_with = "timestamp_text::serialize")]
    #[schemars(with = "Timestamp")]
    pub time: Timestamp,
    /// The HTTP status of the response; null if there was none.
    pub status: Option<u16>,
    /// Why the attempt failed; null if it succeeded.
    pub error: Option<String>,
}

/// The status of a delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum DeliveryStatus {
    /// Due now or later.
    Pending,
    /// The receiver has accepted it.
    Delivered,
    /// The last attempt failed, and there is no other.
    Failed,
}

/// A delivery in a list.
#[derive(Clone, Debug)]
pub struct Delivery {
    pub id: DeliveryId,
    /// The name of the event.
    pub event: String,
    /// The whole URL, which may contain a secret.
    pub url: String,
    pub status: DeliveryStatus,
    /// When the event happened.
    pub created_at: Timestamp,
    /// At most the last [`MAX_STORED_ATTEMPTS`], oldest first.
    pub attempts: Vec<DeliveryAttempt>,
    /// `None` if no further attempt is planned.
    pub next_attempt_at: Option<Timestamp>,
}
