//! A message to a webhook, in the form that standardwebhooks.com recommends: `type`, `timestamp`, `data`.

use std::sync::Arc;

use jiff::Timestamp;
use serde::Serialize;

use crate::domain::timestamp_text;
use crate::domain::webhook::{DeliveryId, Webhook};
use crate::store::NewDelivery;

#[derive(Serialize)]
struct Body<T> {
    r#type: &'static str,
    #[serde(serialize_with = "timestamp_text::serialize")]
    timestamp: Timestamp,
    data: T,
}

/// The delivery of an event to a webhook.
pub fn delivery(
    webhook: Arc<Webhook>,
    event: &'static str,
    time: Timestamp,
    data: impl Serialize,
) -> NewDelivery {
    let body = Body {
        r#type: event,
        timestamp: time,
        data,
    };
    NewDelivery {
        id: DeliveryId::new(),
        webhook,
        event,
        body: serde_json::to_string(&body).unwrap_or_default(),
        created_at: time,
        alert: None,
    }
}
