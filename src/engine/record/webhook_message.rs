//! A message to a webhook, in the form that standardwebhooks.com recommends: `type`, `timestamp`, `data`.

use std::sync::Arc;

use jiff::Timestamp;
use serde::Serialize;

use crate::domain::event::EventName;
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

/// The delivery of a message about an agent itself. A webhook without a list of events gets it too.
pub fn of_agent(
    webhook: Option<&Webhook>,
    event: EventName,
    time: Timestamp,
    data: impl Serialize,
) -> Vec<NewDelivery> {
    let is_receiver = |it: &&Webhook| it.events.is_empty() || it.is_subscribed_to(event);
    let webhook = webhook.filter(is_receiver);
    let delivery =
        webhook.map(|webhook| delivery(Arc::new(webhook.clone()), event.as_str(), time, data));
    delivery.into_iter().collect()
}
