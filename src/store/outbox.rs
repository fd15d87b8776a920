//! What the store keeps of webhook deliveries: committed with the write that they tell of, due until they are delivered
//! or given up, gone with their run. Knows no HTTP and no policy of retries.

use std::fmt;
use std::sync::Arc;

use jiff::Timestamp;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::domain::run::RunId;
use crate::domain::webhook::{DeliveryId, Webhook};

/// Most deliveries that a list shows.
pub const MAX_LISTED_DELIVERIES: usize = 1000;
/// Tries that are kept of a delivery, the last ones.
pub const MAX_STORED_ATTEMPTS: usize = 50;

/// A delivery that is committed with a write, due at once.
#[derive(Clone, Debug)]
pub struct NewDelivery {
    /// Its name.
    pub id: DeliveryId,
    /// Where it goes, and what signs it.
    pub webhook: Arc<Webhook>,
    /// The name of the event that it tells.
    pub event: &'static str,
    /// The body, the same in all its tries.
    pub body: String,
    /// When the event happened.
    pub created_at: Timestamp,
}

/// Which due deliveries to hand out.
#[derive(Clone, Debug, Default)]
pub struct DueQuery {
    /// Due by this time.
    pub due_by: Timestamp,
    /// Not these, which are under way.
    pub in_flight: Vec<DeliveryId>,
    /// Not of these keys to these hosts, as [`crate::net::host_name`] spells them.
    pub excluded_hosts: Vec<(String, String)>,
    /// At most so many of each key.
    pub limit: usize,
}

/// What is due.
#[derive(Clone, Debug, Default)]
pub struct DueDeliveries {
    /// The deliveries, longest due first.
    pub deliveries: Vec<DueDelivery>,
    /// When the first of those that are not due yet will be.
    pub next_due_at: Option<Timestamp>,
}

/// A delivery to be tried.
#[derive(Clone)]
pub struct DueDelivery {
    /// Its name.
    pub id: DeliveryId,
    /// The root run that it is about.
    pub run: RunId,
    /// That run's agent.
    pub agent: String,
    /// The name of the key that the run was accepted with; empty without one.
    pub owner: String,
    /// Where it goes.
    pub url: String,
    /// That address's host, as [`crate::net::host_name`] spells it.
    pub host: String,
    /// The environment variable with the secret that signs it; unset means the server's.
    pub secret_env: Option<String>,
    /// The body.
    pub body: String,
    /// When it was due first, or was sent again by hand.
    pub since: Timestamp,
    /// Tries since then.
    pub attempt_count: u32,
}

impl fmt::Debug for DueDelivery {
    /// Without the address, which may hold a secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DueDelivery")
            .field("id", &self.id)
            .field("host", &self.host)
            .field("tries", &self.attempt_count)
            .finish_non_exhaustive()
    }
}

/// What came of a try.
#[derive(Clone, Debug)]
pub struct AttemptRecord {
    /// The delivery.
    pub id: DeliveryId,
    /// Its [`DueDelivery::since`]: where somebody has sent it again meanwhile, the try does not count for that.
    pub since: Timestamp,
    /// The try.
    pub attempt: DeliveryAttempt,
    /// What becomes of the delivery.
    pub outcome: AttemptOutcome,
}

/// What becomes of a delivery after a try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttemptOutcome {
    /// It has arrived.
    Delivered,
    /// It is tried again at this time.
    RetryAt(Timestamp),
    /// It is given up.
    GivenUp,
}

/// One try of a delivery.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "DeliveryAttempt")]
pub struct DeliveryAttempt {
    /// When it began.
    pub time: Timestamp,
    /// HTTP's status, where there was an answer.
    pub status: Option<u16>,
    /// Why it did not arrive; null where it did.
    pub error: Option<String>,
}

/// Where a delivery stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum DeliveryStatus {
    /// It is due, or will be.
    Pending,
    /// It has arrived.
    Delivered,
    /// It was given up.
    Failed,
}

/// A delivery as it is listed.
#[derive(Clone, Debug)]
pub struct Delivery {
    /// Its name.
    pub id: DeliveryId,
    /// The name of the event that it tells.
    pub event: String,
    /// Where it goes, with everything in it.
    pub url: String,
    /// Where it stands.
    pub status: DeliveryStatus,
    /// When the event happened.
    pub created_at: Timestamp,
    /// Its tries, at most the last [`KEPT_TRIES`], oldest first.
    pub attempts: Vec<DeliveryAttempt>,
    /// When it is tried next.
    pub next_attempt_at: Option<Timestamp>,
}
