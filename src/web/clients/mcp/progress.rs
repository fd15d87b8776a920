//! Progress of a call, from the events of its run's tree.

use rmcp::model::{ProgressNotificationParam, ProgressToken};
use serde_json::{Value, json};

use crate::domain::event::StoredEvent;
use crate::domain::message::shorten;

/// Maximum characters of a text that a model or a provider wrote.
const MAX_TEXT: usize = 200;

/// The notification about an event; `None` for events that say nothing new to a person.
pub fn notification(token: &ProgressToken, event: &StoredEvent) -> Option<Value> {
    let data: Value = serde_json::from_str(&event.data).ok()?;
    let text = describe(&event.name, &data)?;
    let agent = data["agent"].as_str().unwrap_or_default();
    // The number of the event grows, and progress has to.
    #[expect(
        clippy::cast_precision_loss,
        reason = "a tree has far fewer than 2^53 events"
    )]
    let progress = event.seq as f64;
    let params = ProgressNotificationParam::new(token.clone(), progress)
        .with_message(format!("{agent}: {text}"));
    Some(json!({ "jsonrpc": "2.0", "method": "notifications/progress", "params": params }))
}

fn describe(name: &str, data: &Value) -> Option<String> {
    let field = |field: &str| shorten(data[field].as_str().unwrap_or_default(), MAX_TEXT);
    Some(match name {
        "run.queued" if data["depth"] == 0 => "queued".to_owned(),
        "run.started" if data["depth"] == 0 => "started".to_owned(),
        "turn.started" => format!("turn {}", data["turn"]),
        "tool.started" => format!("calls {}", field("tool")),
        "agent.called" => format!(
            "calls the agent {}: {}",
            field("child_agent"),
            field("task")
        ),
        "agent.returned" => format!("the agent {} has returned", field("child_agent")),
        "approval.requested" => format!("waits for approval of {}", field("tool")),
        "approval.decided" => field("decision"),
        "retry.scheduled" => format!("repeats a request to its model: {}", field("reason")),
        "batch.submitted" => "waits for a batch of its provider".to_owned(),
        "run.paused" => "paused".to_owned(),
        "run.resumed" => "resumed".to_owned(),
        "run.cancelling" => "is being cancelled".to_owned(),
        _ => return None,
    })
}
