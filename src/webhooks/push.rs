//! Push notifications of A2A: the body and the headers of a delivery that reports the state of a task.

use jiff::Timestamp;
use serde_json::json;

use crate::domain::event::EventName;
use crate::domain::timestamp_text;
use crate::store::outbox::DueDelivery;
use crate::store::push_configs::PushTarget;

pub const CONTENT_TYPE: &str = "application/a2a+json";
const TOKEN: &str = "x-a2a-notification-token";

/// The update of the status that the event is. It has no texts of models and clients.
pub fn body(delivery: &DueDelivery, target: &PushTarget) -> String {
    let update = json!({
        "statusUpdate": {
            "taskId": delivery.run,
            "contextId": target.context,
            "status": {
                "state": state(delivery),
                "timestamp": timestamp_text::text(delivery.created_at),
            },
        },
    });
    update.to_string()
}

fn state(delivery: &DueDelivery) -> &'static str {
    match EventName::parse(&delivery.event) {
        Some(EventName::RunCompleted) => "TASK_STATE_COMPLETED",
        Some(EventName::RunFailed) => "TASK_STATE_FAILED",
        Some(EventName::RunCancelled) => "TASK_STATE_CANCELED",
        Some(EventName::ApprovalRequested | EventName::InputRequested) => {
            "TASK_STATE_INPUT_REQUIRED"
        }
        _ => "TASK_STATE_WORKING",
    }
}

/// What the receiver trusts: its token, and its authentication.
pub fn headers(
    delivery: &DueDelivery,
    target: &PushTarget,
    at: Timestamp,
) -> Vec<(&'static str, String)> {
    let mut headers = vec![
        ("webhook-id", delivery.id.to_string()),
        ("webhook-timestamp", at.as_second().to_string()),
    ];
    headers.extend(target.token.clone().map(|token| (TOKEN, token)));
    if let Some(scheme) = &target.scheme {
        let credentials = target.credentials.as_deref().unwrap_or_default();
        let value = format!("{scheme} {credentials}");
        headers.push(("authorization", value.trim_end().to_owned()));
    }
    headers
}
